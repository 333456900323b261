"""The dispatches of an engine that speculates around its steps: drafts before, notes after."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Array

from jaxengine.models.decoder import KV
from jaxengine.models.spec import Params
from jaxengine.parallel.mesh import Devices
from jaxengine.runner.draft.drafter import Drafter
from jaxengine.runner.draft.verify import NO_DRAFT, Drafted
from jaxengine.runner.programs import Key, Programs
from jaxengine.runner.state import Counted, SlotState, new_state
from jaxengine.sched.batch import Bucket, view
from jaxengine.sched.executor import Batch
from jaxengine.sched.verify_batch import ON_DEVICE, verify_layout


class DraftRunner:
    """Counts, and the drafter's parameters and KV if there is one. One thread at a time."""

    def __init__(
        self, programs: Programs, drafter: Drafter | None, target: Params, devices: Devices
    ) -> None:
        """`target` are the target's parameters. Raises the loader's errors."""
        self._programs = programs
        self._devices = devices
        self._drafter = drafter
        self._params: Any = drafter.load(target) if drafter is not None else {}
        self._kv: KV = ()
        self.counted: Counted | None = None  # None until something is to be counted
        self._no_drafts: dict[Bucket, Array] = {}
        self.reset()

    def proposed(self, batch: Batch, slots: SlotState) -> Array:
        """The drafts [S, K] of a step; what the host gave is not in them."""
        bucket = batch.bucket
        if self._programs.drafter is not None:
            draft = self._programs.get(Key("draft", bucket))
            self._kv, drafts = draft(self._params, self._kv, slots, self.counted, batch.blob)
            return drafts
        layout = verify_layout(bucket, self._programs.shapes.config.shape)
        if (view(batch.blob, layout, "drafts") == ON_DEVICE).any():
            look_up = self._programs.get(Key("lookup", bucket))
            return look_up(slots, self.counted.length, batch.blob)  # type: ignore[union-attr]
        if bucket not in self._no_drafts:
            none = np.full((bucket.rows, bucket.drafts), NO_DRAFT, np.int32)
            self._no_drafts[bucket] = self._devices.put(none, self._devices.data)
        return self._no_drafts[bucket]

    def sampled(
        self, batch: Batch, slots: SlotState, rows_hidden: Array, hidden: Array | None
    ) -> None:
        """Take note of a step without drafts that was sampled. `rows_hidden` [b, D] are its rows'
        hidden states, `hidden` [T, D] its tokens'."""
        drafter = self._programs.drafter
        if drafter is None:
            return
        if drafter.remembers:
            assert self.counted is not None
            remember = self._programs.get(Key("remember", batch.sampler_rows))
            feature = remember(self.counted.feature, rows_hidden, batch.rows_blob)
            self.counted = self.counted._replace(feature=feature)
        if drafter.layers is not None:
            follow = self._programs.get(Key("follow", batch.bucket))
            given = hidden if drafter.reads_hidden else None
            self._kv = follow(self._params, self._kv, slots.history, given, batch.blob)

    def accepted(self, batch: Batch, drafted: Drafted, rows: Array) -> None:
        """Take note of which drafts of a step were accepted; `rows` is its output."""
        drafter = self._programs.drafter
        if drafter is not None and drafter.reads_hidden and drafter.layers is not None:
            follow = self._programs.get(Key("follow", batch.bucket))
            self._kv = follow(self._params, self._kv, drafted, rows, batch.blob)

    def reset(self) -> None:
        """Fresh state; parameters stay."""
        self._kv, self.counted = (), None  # first: there may be no room for two
        if self._drafter is not None:
            self._kv = new_state(self._drafter.kv)
        self.counted = new_state(self._programs.shapes.counted)

    def sleep(self) -> None:
        """Parameters and state are dropped: most parameters are the target's, or small."""
        self._kv, self.counted, self._params = (), None, {}

    def wake_up(self, target: Params) -> None:
        """The target's parameters are back; `reset` follows. Raises the loader's errors."""
        if self._drafter is not None:
            self._params = self._drafter.load(target)
