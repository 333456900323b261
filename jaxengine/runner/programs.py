"""The compiled programs: compiled ahead of time, once each, into the persistent cache.

Programs are dispatched as compiled executables, so a step can never trace or compile by
accident; every compilation goes through here and is counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxengine.models.decoder import KV
from jaxengine.models.spec import Params
from jaxengine.parallel.layout import Stage
from jaxengine.parallel.mesh import Devices
from jaxengine.runner.cache_lock import compiling
from jaxengine.runner.draft.drafter import Drafter
from jaxengine.runner.draft.lookup import FROM_DRAFTER, Lookup
from jaxengine.runner.forward import ForwardOutput, StepConfig, forward
from jaxengine.runner.sampling_step import pool_rows, sample_rows, score_prompt
from jaxengine.runner.spec_programs import (
    SpecShapes,
    lower_accept,
    lower_draft,
    lower_follow,
    lower_lookup,
    lower_remember,
    lower_verify,
)
from jaxengine.runner.state import Counted, DeviceState, SlotState, seed_slot
from jaxengine.sched.batch import BatchShape, Bucket, layout_of, rows_layout
from jaxengine.sched.slot_record import SlotShape

log = logging.getLogger(__name__)


Kind = Literal[
    "forward", "sample", "greedy", "score", "pool", "seed",
    "lookup", "draft", "verify", "accept", "follow", "remember",
]  # fmt: skip


class Key(NamedTuple):
    """Names a program: the forward of a bucket, the sampler of so many rows and that of greedy
    ones, the prompt scorer of so many tokens and their pooling, the slot writer; with drafts what
    a bucket's step consists of, and what the drafter does behind every step
    (`runner.draft.drafter`)."""

    kind: Kind
    size: Bucket | int = 0


class Specs(NamedTuple):
    """How parameters and caches are divided over the mesh: trees of PartitionSpec."""

    params: Any
    kv: Any


class Programs:
    """Programs by key. Thread-safe.

    `params` and `state` may be ShapeDtypeStructs: compiling needs no weights, so that programs
    compile while weights load.
    """

    def __init__(
        self,
        config: StepConfig,
        params: Params,
        state: DeviceState,
        slot_shape: SlotShape,
        threads: int = 2,
        stages: Sequence[Devices] = (Devices(),),
        specs: Specs | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`stages` are the devices of the pipeline's stages; samplers run on the last."""
        self._config = config
        self._params = params
        self._state = state
        self._slot_shape = slot_shape
        self._stages = stages
        self._devices = stages[-1]
        self._specs = specs or Specs(P(), P())
        self._urgent = ThreadPoolExecutor(threads, "compile")
        # Half the threads: tracing holds the interpreter, which requests need too.
        self._pool = ThreadPoolExecutor(
            max(1, threads // 2), "warm-up", initializer=_yield_to_others
        )
        self._futures: dict[Key, Future[Any]] = {}
        self._lock = threading.Lock()
        self.num_compiled = 0
        self.compiled_after_warmup = 0
        self.warm = False
        self._drafter = drafter
        self.lookup = Lookup(1, 1)  # of the programs that look drafts up

    @property
    def batch_shape(self) -> BatchShape:
        return self._config.shape

    @property
    def counted(self) -> Counted:
        """Shapes of what engines that speculate keep beside the slots."""
        return self._speculative().counted

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, while the engine drafts with it and not by look-up."""
        return self._drafter if self.lookup == FROM_DRAFTER else None

    def start(self, keys: Sequence[Key], urgent: bool = False) -> None:
        """Queue compilations, in this order; the urgent ones at full priority."""
        pool = self._urgent if urgent else self._pool
        with self._lock:
            for key in map(_own, keys):
                if key not in self._futures:
                    self._futures[key] = pool.submit(self._compile, key)

    def wait(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Wait for all that was queued. Raises what a compilation raised."""
        futures = list(self._futures.values())
        for done, future in enumerate(futures):
            future.result()
            if progress:
                progress(done + 1, len(futures))
        self.warm = True

    def wait_in_background(self) -> None:
        """`warm` turns True when all that is queued now is compiled."""
        threading.Thread(target=self._wait_quietly, name="warm-up", daemon=True).start()

    def get(self, key: Key) -> Callable[..., Any]:
        """The program. One that is still queued is compiled here and now instead."""
        key = _own(key)
        with self._lock:
            future = self._futures.get(key)
            mine = future is None or future.cancel()
            if mine:
                if self.warm:
                    self.compiled_after_warmup += 1
                    log.warning("compiling %s after warm-up", key)
                future = self._futures[key] = Future()
        assert future is not None
        if mine:
            try:
                future.set_result(self._compile(key))
            except BaseException as error:
                future.set_exception(error)
                raise
        return future.result()

    def ready(self, key: Key) -> bool:
        future = self._futures.get(_own(key))
        return future is not None and future.done()

    def shutdown(self) -> None:
        for pool in (self._pool, self._urgent):
            pool.shutdown(wait=True, cancel_futures=True)

    def _wait_quietly(self) -> None:
        done: set[Key] = set()
        while waiting := [key for key in list(self._futures) if key not in done]:
            for key in waiting:
                if not self._ended_well(key):
                    return  # never warm; a step that needs it raises the error
                done.add(key)
        self.warm = True

    def _ended_well(self, key: Key) -> bool:
        """Wait for a compilation. False when it failed, or will not be done."""
        while True:
            future = self._futures[key]
            try:
                error = future.exception()
                break
            except CancelledError:
                if self._futures[key] is future:
                    return False  # shut down; otherwise `get` compiles it itself
        if error is not None:
            log.error("warm-up: %s does not compile: %s", _describe(key), error)
        return error is None

    def _compile(self, key: Key) -> Any:
        started = time.monotonic()
        compiled: Any
        if isinstance(key.size, Bucket) and len(self._stages) > 1:
            compiled = self._pipeline(key.size)
        else:
            with compiling(_cache_folder(), f"{self._config} {key}"):
                compiled = self._lowered(key).compile()
        self.num_compiled += 1
        seconds = time.monotonic() - started
        log.info("program %d ready: %s, %.1f s", self.num_compiled, _describe(key), seconds)
        return compiled

    def _pipeline(self, bucket: Bucket) -> Callable[..., Any]:
        """All stages of a forward as one call. Nothing in it waits for a device: while a stage
        works on this step, the one before may already work on the next."""
        count, num_layers = len(self._stages), self._config.spec.num_layers
        stages = [Stage(i, count) for i in range(count)]
        programs = [self._lowered_stage(bucket, stage).compile() for stage in stages]

        def run(params: Params, kv: KV, last_token: Array, blob: Any) -> tuple[KV, Any]:
            written: KV = ()
            carry: Any = last_token
            for stage, program, devices in zip(stages, programs, self._stages, strict=True):
                layers = stage.layers(num_layers)
                carry = devices.put(carry, devices.data)
                part, carry = program(
                    stage_params(params, stage, num_layers),
                    kv[layers.start : layers.stop],
                    carry,
                    blob,
                )
                written += part
            return written, carry

        return run

    def _lowered_stage(self, bucket: Bucket, stage: Stage) -> Any:
        config, devices = self._config, self._stages[stage.index]
        data, kv_spec, num_layers = devices.data, self._specs.kv, config.spec.num_layers
        layers = stage.layers(num_layers)

        def run_forward(
            params: Params, kv: KV, carry: Array, blob: Array
        ) -> tuple[KV, ForwardOutput | Array]:
            return forward(config, bucket, params, kv, carry, blob, stage)

        carry: Any = self._state.slots.last_token
        if stage.count > 1:  # it comes from other devices
            carry = jax.ShapeDtypeStruct(carry.shape, carry.dtype)
        if not stage.is_first:
            tokens = devices.num_shards * bucket.tokens
            carry = jax.ShapeDtypeStruct((tokens, config.spec.hidden_size), jnp.float32)
        return devices.lower(
            run_forward,
            (
                stage_params(self._params, stage, num_layers),
                self._state.kv[layers.start : layers.stop],
                carry,
                _ints(devices.num_shards * layout_of(bucket, config.shape).size),
            ),
            (stage_params(self._specs.params, stage, num_layers), kv_spec, data, data),
            (kv_spec, data),
            donate=(1,),
        )

    def _lowered(self, key: Key) -> Any:
        config, slots, devices = self._config, self._state.slots, self._devices
        data, shards = devices.data, devices.num_shards
        width = config.width
        if isinstance(key.size, Bucket):
            match key.kind:
                case "lookup":
                    return lower_lookup(self._speculative(), key.size, self.lookup)
                case "draft":
                    return lower_draft(self._speculative(), key.size)
                case "verify":
                    return lower_verify(self._speculative(), key.size)
                case "accept":
                    return lower_accept(self._speculative(), key.size)
                case "follow":
                    return lower_follow(self._speculative(), key.size)
            return self._lowered_stage(key.size, Stage())
        if key.kind == "seed":
            shape = self._slot_shape

            def run_seed(slots: SlotState, blob: Array) -> SlotState:
                return seed_slot(shape, slots, blob)

            args = (slots, _ints(shards * shape.blob_size))
            return devices.lower(run_seed, args, (data, data), data, donate=(0,))
        size = key.size
        if key.kind == "remember":
            return lower_remember(self._speculative(), size)
        head, head_specs = head_params(self._params), head_params(self._specs.params)
        hidden = jax.ShapeDtypeStruct((shards * size, width), jnp.float32)
        if key.kind == "score":

            def run_score(params: Params, hidden: Array, targets: Array) -> Array:
                return devices.fetched(score_prompt(config, params, hidden, targets))

            targets = _ints(shards * size)
            specs = (head_specs, data, data)
            return devices.lower(run_score, (head, hidden, targets), specs, devices.fetch)

        if key.kind == "pool":
            num_rows = config.row_buckets[-1]

            def run_pool(hidden: Array, index: Array) -> Array:
                return devices.fetched(pool_rows(config.final(hidden), index, num_rows))

            return devices.lower(
                run_pool, (hidden, _ints(shards * size)), (data, data), devices.fetch
            )

        greedy = key.kind == "greedy"

        def run_sample(
            params: Params, slots: SlotState, hidden: Array, blob: Array, mask: Array
        ) -> tuple[SlotState, Array]:
            slots, rows = sample_rows(config, size, params, slots, hidden, blob, mask, greedy)
            return slots, devices.fetched(rows)

        mask = _ints(shards * size, -(-config.spec.vocab_size // 32))
        rows = _ints(shards * rows_layout(size).size)
        return devices.lower(
            run_sample,
            (head, slots, hidden, rows, mask),
            (head_specs, data, data, data, data),
            (data, devices.fetch),
            donate=(1,),
        )

    def _speculative(self) -> SpecShapes:
        return SpecShapes(
            self._config,
            self._params,
            head_params(self._params),
            self._specs.params,
            head_params(self._specs.params),
            self._specs.kv,
            self._state,
            self._devices,
            self._drafter,
        )


def _own(key: Key) -> Key:
    """The key of the program that serves it: only what runs the model's layers differs when a
    bucket is run as two microbatches."""
    if isinstance(key.size, Bucket) and key.size.dbo and key.kind not in ("forward", "verify"):
        return Key(key.kind, replace(key.size, dbo=False))
    return key


def stage_params(params: Any, stage: Stage, num_layers: int) -> Any:
    """The leaves of one stage; a spec for all leaves stays as it is."""
    if stage.count == 1 or not isinstance(params, dict):
        return params
    layers = stage.layers(num_layers)
    part = {"layers": params["layers"][layers.start : layers.stop]}
    if stage.is_first:
        part["embed"] = params["embed"]
    if stage.is_last:
        part |= {"final_norm": params["final_norm"], "head": params["head"]}
    return part


def _cache_folder() -> Path | None:
    """Of what this process compiles; None where it would not be written (JAX lets the first of
    several processes write, and the engine all of them on CPU): waiting would win nothing."""
    folder = jax.config.jax_compilation_cache_dir
    writes = jax.process_index() == 0 or jax.default_backend() == "cpu"
    return Path(folder) if folder and writes else None


def _yield_to_others() -> None:
    """Compile at low priority: requests are served meanwhile."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _describe(key: Key) -> str:
    if isinstance(key.size, Bucket) and key.size.drafts:
        return f"{key.kind} {key.size.rows} rows of {key.size.drafts} drafts"
    if isinstance(key.size, Bucket):
        what = "" if key.kind == "forward" else f"{key.kind} "
        return f"{what}{'decode' if key.size.decode_only else 'mixed'} {key.size.tokens}"
    return f"{key.kind} {key.size}" if key.size else key.kind


def head_params(params: Any) -> Any:
    """The leaves that the output head reads; a spec for all leaves stays as it is."""
    if not isinstance(params, dict):
        return params
    name = "head" if "head" in params else "embed"
    return {name: params[name]} if name in params else {}


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
