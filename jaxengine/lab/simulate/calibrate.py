"""Measure the real engine over the shapes of its steps, and make a table of it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict

import numpy as np

from jaxengine.engine.core import EngineCore
from jaxengine.lab.bench.offload import measure_device
from jaxengine.lab.simulate.clock import Clock, WallClock
from jaxengine.lab.simulate.recorder import Recorder, engine_request
from jaxengine.lab.simulate.table import Sample, Table, fit
from jaxengine.parallel.layout import StepLayout
from jaxengine.sched.buckets import all_buckets

Prompt = list[int]
DECODE_STEPS = 6  # measured of each number of rows
SMALL = 256  # tokens of a prefill step that is measured in one form more
SHORT = 8  # tokens of a prompt that only brings a decode row


class Calibration:
    """Measures `core` in rounds; samples add up. The engine must be idle between them."""

    def __init__(
        self,
        core: EngineCore,
        *,
        most_rows: int | None = None,
        most_tokens: int | None = None,
        clock: Clock | None = None,
        seed: int = 0,
    ) -> None:
        """`most_rows`, `most_tokens`: larger steps are not measured, but extrapolated.
        Raises ValueError for engines whose steps are not of one device's plain kind."""
        parallel = core.config.parallel
        several = parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1
        if several or core.facts.num_shards > 1 or core.facts.sched_sizes.max_drafts:
            raise ValueError("calibration is for one device, without speculation")
        self.core = core
        self.samples: list[Sample] = []
        self._clock = clock or WallClock()
        sched_sizes = core.facts.sched_sizes
        buckets = all_buckets(sched_sizes.max_num_seqs, sched_sizes.max_num_batched_tokens)
        self._pool = sched_sizes.num_blocks * sched_sizes.block_size
        self._longest = sched_sizes.max_model_len - DECODE_STEPS - SHORT - 2
        each = SHORT + DECODE_STEPS + sched_sizes.block_size
        # Of each kind the first one that is large enough, and all below.
        rows = _up_to([b.tokens for b in buckets if b.decode_only], most_rows)
        self._decode = [n for n in rows if n * each <= self._pool]
        self._mixed = _up_to([b.tokens for b in buckets if not b.decode_only], most_tokens)
        self._rng = np.random.default_rng(seed)
        self._names = 0
        self._rows_per_turn = _rows_per_turn(core)

    def warm(self) -> None:
        """Run every program once: the first run is slower."""
        with closing(Recorder(self.core, self._rows_per_turn, self._clock)) as recorder:
            for n in self._decode:
                self._run(recorder, [self._prompt(SHORT) for _ in range(n)], 2)
            for tokens in self._mixed:
                self._run(recorder, [self._prompt(min(tokens, self._longest))], 1)

    def round(self, told: Callable[[str], None] = lambda _: None) -> None:
        """Every decode bucket, every mixed bucket, both with short and long contexts."""
        self.core.scheduler.reset_prefix_cache()
        with closing(Recorder(self.core, self._rows_per_turn, self._clock)) as recorder:
            for n in self._decode:
                told(f"decode {n} rows")
                self._run(recorder, [self._prompt(SHORT) for _ in range(n)], DECODE_STEPS)
            context = min(self._mixed[-1], self._longest, self._pool // 2)
            shared = self._prompt(context)
            told(f"decode with contexts of {context}")
            self._run(recorder, [shared], 1)
            for n in [n for n in self._decode if n <= 8]:
                # The prefix is in the cache: contexts that cost no prefill.
                prompts = [shared + self._prompt(SHORT) for _ in range(n)]
                self._run(recorder, prompts, DECODE_STEPS)
            for tokens in self._mixed:
                told(f"prefill {tokens} tokens")
                length = min(tokens, self._longest)
                prompts = [self._prompt(length)]
                behind = min(length, self._longest - context)
                if behind > SHORT and context + behind <= self._pool:
                    prompts.append(shared + self._prompt(behind))
                self._one_a_step(recorder, prompts)
                if tokens <= SMALL:
                    halves = [self._prompt(max(1, length // 2)) for _ in range(2)]
                    self._run(recorder, halves, 1)
            told("prefill beside decodes")
            for tokens in self._mixed:
                self._beside(recorder, min(8, self._decode[-1]), min(tokens - 8, self._longest))
        self.samples += recorder.samples

    def table(self, byte_s: float = 0.0) -> Table:
        """What the rounds so far give; `byte_s` of `copy_seconds_per_byte`. Raises ValueError
        before the first round."""
        core, layout = self.core, self.core.facts.kv_layout
        sched_sizes = core.facts.sched_sizes
        sizes = asdict(sched_sizes)
        sizes["windows"] = [group["window"] for group in sizes.pop("groups")]
        return Table(
            model=core.facts.info["model"],
            machine=f"{platform.machine()}, {os.cpu_count()} cores",
            engine=sizes,
            depth=core.pipeline.depth,
            rows_per_turn=self._rows_per_turn,
            byte_s=byte_s,
            page_bytes=tuple(layout.page_bytes(g) for g in range(layout.num_groups)),
            **fit(self.samples),
        )

    def _run(self, recorder: Recorder, prompts: list[Prompt], output_len: int) -> None:
        for prompt in prompts:
            self._names += 1
            self.core.add_request(engine_request(f"c{self._names}", prompt, output_len))
        self._drain(recorder)

    def _one_a_step(self, recorder: Recorder, prompts: list[Prompt]) -> None:
        """Each prompt is a step, planned while the one before it runs."""
        for prompt in prompts:
            self._names += 1
            self.core.add_request(engine_request(f"c{self._names}", prompt, 1))
            recorder.step()
        self._drain(recorder)

    def _beside(self, recorder: Recorder, rows: int, length: int) -> None:
        """A prompt that comes while rows decode."""
        if length < 1:
            return
        for _ in range(rows):
            self._names += 1
            name = f"c{self._names}"
            self.core.add_request(engine_request(name, self._prompt(SHORT), DECODE_STEPS))
        for _ in range(3):
            recorder.step()
        self._run(recorder, [self._prompt(length)], 1)

    def _drain(self, recorder: Recorder) -> None:
        while self.core.has_work():
            for output in recorder.step():
                if output.error:
                    raise RuntimeError(output.error)

    def _prompt(self, length: int) -> Prompt:
        vocab = self.core.facts.spec.vocab_size
        return [int(i) for i in self._rng.integers(min(100, vocab - 1), vocab, length)]


def _up_to(sizes: list[int], most: int | None) -> list[int]:
    if most is None or most >= sizes[-1]:
        return sizes
    return [n for n in sizes if n < most] + [next(n for n in sizes if n >= most)]


def copy_seconds_per_byte(core: EngineCore, blocks: int = 16) -> float:
    """Of KV between the device and host memory, in the slower direction."""
    rates = measure_device(core.facts.kv_layout, blocks)
    return 1 / (min(rates.values()) * 2**20)


def _rows_per_turn(core: EngineCore) -> int:
    """Decode rows whose attention goes on to the longest one's end; 0 = all of the bucket."""
    import jax

    if core.facts.kv_layout.kind == "head_major":  # the kernels: every row its own length
        return 1
    return StepLayout().rows_per_turn if jax.default_backend() == "cpu" else 0
