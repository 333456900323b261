"""Tiny engines, shared by all tests of a session, and ways to run requests through them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from msgspec.structs import force_setattr
from testdata import GOLDENS

from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.sampling_params import SamplingParams
from jaxengine.sched.plan import StepPlan
from jaxengine.wire.messages import EngineOutput, EngineRequest, TokenLogprobs

VOCAB, EOS = 320, 2
MAX_LEN = 192

# Few shapes, so that few programs are compiled. The tight pools hold one longest sequence.
ONE_ROW = {"max_num_seqs": 1, "max_num_batched_tokens": 17}
THREE_ROWS = {"max_num_seqs": 3, "max_num_batched_tokens": 63}
TIGHT = {"max_num_seqs": 5, "max_num_batched_tokens": 40}
TIGHT_16 = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "block_size": 16}
ALONE = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 128,
    "block_size": 16,
    "enable_prefix_caching": False,
    "async_scheduling": False,
}  # the oracle: a request alone, whole, nothing cached, other shapes


@functools.cache
def _engine(settings: tuple[tuple[str, Any], ...]) -> EngineCore:
    defaults = {
        "model": "llama",
        "max_model_len": MAX_LEN,
        "block_size": 4,
        "max_logprobs": 5,
    }
    chosen = {**defaults, **dict(settings)}
    chosen.setdefault("num_gpu_blocks_override", MAX_LEN // chosen["block_size"])
    chosen["model"] = str(GOLDENS / chosen["model"])
    core = EngineCore(EngineConfig.of(**chosen))
    OPEN.append(core)
    return core


OPEN: list[EngineCore] = []


def engine(**settings: Any) -> EngineCore:
    """The session's engine of these settings; idle, with an empty prefix cache."""
    settings.setdefault("warmup", "lazy")  # most tests use few of the programs
    core = _engine(tuple(sorted(settings.items())))
    assert not core.has_work()
    core.scheduler.reset_prefix_cache()
    return core


def oracle_engine(model: str = "llama") -> EngineCore:
    return engine(model=model, **ALONE)


@contextmanager
def depth(core: EngineCore, steps: int) -> Iterator[None]:
    """Run with so many steps in the pipeline: 1 is synchronous, 2 asynchronous scheduling."""
    before, core.pipeline.depth = core.pipeline.depth, steps
    try:
        yield
    finally:
        core.pipeline.depth = before


def request(name: str, prompt: Iterable[int], **params: Any) -> EngineRequest:
    """Greedy without end unless `params` say otherwise; `bad_words` are token ids here. Values that
    the front refuses (no token asked, min_tokens above max_tokens) are nothing to the engine."""
    words = params.pop("bad_words", [])
    settings = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params
    made = SamplingParams()
    for field_name, value in settings.items():
        force_setattr(made, field_name, value)
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        arrival_time=0.0,
        params=made,
        eos_token_ids=[EOS],
        bad_words_token_ids=words,
    )


@dataclass
class Seen:
    """All that one request got."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: list[TokenLogprobs | None] | None = None
    finish: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cached: int = 0

    def add(self, output: EngineOutput) -> None:
        assert self.finish is None, f"{output.request_id} got output after its end"
        self.ids += output.new_token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt is None, f"{output.request_id} got prompt_logprobs twice"
            self.prompt = output.prompt_logprobs
        self.finish, self.stop_reason = output.finish_reason, output.stop_reason
        self.error = output.error
        self.cached = output.num_cached_tokens


BeforeStep = Callable[[EngineCore, int], None]


def run(
    core: EngineCore,
    requests: Iterable[EngineRequest],
    before_step: BeforeStep | None = None,
    max_steps: int = 20_000,
) -> dict[str, Seen]:
    """All at once, to the end; the blocks are checked after every step."""
    seen: dict[str, Seen] = {}
    for wire in requests:
        seen[wire.request_id] = Seen()
        core.add_request(wire)
    for step in range(max_steps):
        if before_step is not None:
            before_step(core, step)
        if not core.has_work():
            break
        for output in core.step():
            seen.setdefault(output.request_id, Seen()).add(output)
        core.scheduler.check_integrity()
    assert not core.has_work(), "the engine did not come to an end"
    assert core.scheduler.kv_usage == 0
    return seen


def alone(core: EngineCore, requests: Iterable[EngineRequest]) -> dict[str, Seen]:
    """Each by itself."""
    return {wire.request_id: run(core, [wire])[wire.request_id] for wire in requests}


def ids_of(seen: dict[str, Seen]) -> dict[str, list[int]]:
    return {name: one.ids for name, one in seen.items()}


@contextmanager
def recorded_plans(
    core: EngineCore, slots: list[list[int]] | None = None
) -> Iterator[list[StepPlan]]:
    """Every plan that the scheduler makes inside the block; `slots` gets the token slots that
    each may write."""
    plans: list[StepPlan] = []
    schedule = core.scheduler.schedule

    def record() -> StepPlan | None:
        plan = schedule()
        if plan is not None:
            plans.append(plan)
            if slots is not None:
                slots.append(_token_slots(core, plan))
        return plan

    core.scheduler.schedule = record  # type: ignore[method-assign]
    try:
        yield plans
    finally:
        core.scheduler.schedule = schedule  # type: ignore[method-assign]


def _token_slots(core: EngineCore, plan: StepPlan) -> list[int]:
    """Of the first KV group, worked out without the packer."""
    size = core.facts.sched_sizes.block_size
    table = core.scheduler.block_tables[0]
    return [
        int(table[plan.slots[row], position // size]) * size + position % size
        for row in range(plan.num_rows)
        for position in range(plan.start[row], plan.start[row] + plan.num_new[row])
    ]


# -- compilations of any kind, eager operations included ------------------------------------

_compile_events: list[str] = []


def _listen(event: str, _seconds: float, **_: Any) -> None:
    if event.startswith("/jax/core/compile"):
        _compile_events.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


@contextmanager
def no_compilation() -> Iterator[None]:
    """Nothing is traced, lowered or compiled inside the block, and no eager operation runs: one
    that ran before would have to compile again."""
    for core in OPEN:  # lazy engines may still compile in the background
        for future in core.executor.programs._futures.values():
            future.exception()
    jax.clear_caches()
    before = len(_compile_events)
    yield
    found = _compile_events[before:]
    assert not found, found


# -- device state ---------------------------------------------------------------------------


def kv_rows(core: EngineCore) -> np.ndarray:
    """A copy of all keys and values by token slot: [N * P, 2 * layers * G * C]."""
    kv = core.executor._state.kv
    return np.concatenate(
        [np.asarray(x).reshape(-1, x.shape[-1]) for pair in kv for x in pair], axis=1
    ).copy()


def fill_kv(core: EngineCore, value: float) -> None:
    """Overwrite the whole pool. Only between requests."""
    runner = core.executor
    kv = tuple(
        tuple(jax.device_put(np.full(x.shape, value, x.dtype)) for x in pair)
        for pair in runner._state.kv
    )
    runner._state = runner._state._replace(kv=kv)


# -- random requests ------------------------------------------------------------------------


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def random_params(rng: random.Random) -> dict[str, Any]:
    """Sampling parameters of every kind, each now and then; always reproducible."""
    params: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        "seed": rng.randrange(-(2**63), 2**63),
        "ignore_eos": rng.random() < 0.5,
    }
    kinds: dict[str, Callable[[], Any]] = {
        "top_k": lambda: rng.choice([1, 5, 70, 100_000]),
        "top_p": lambda: rng.choice([0.1, 0.9, 0.99]),
        "min_p": lambda: rng.choice([0.02, 0.3]),
        "repetition_penalty": lambda: rng.choice([0.8, 1.3]),
        "frequency_penalty": lambda: rng.choice([-0.5, 0.7]),
        "presence_penalty": lambda: rng.choice([-0.5, 0.7]),
        "logit_bias": lambda: {rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(3)},
        "allowed_token_ids": lambda: rng.sample(range(3, VOCAB), rng.choice([1, 4, 60])),
        "bad_words": lambda: [prompt_of(rng, rng.choice([1, 1, 2, 3])) for _ in range(8)],
        "min_tokens": lambda: rng.randrange(1, 8),
        "stop_token_ids": lambda: rng.sample(range(3, VOCAB), rng.choice([1, 6, 40])),
        "logprobs": lambda: rng.choice([0, 1, 5]),
        "prompt_logprobs": lambda: rng.choice([0, 2, 5]),
    }
    for name, make in kinds.items():
        if rng.random() < 0.2:
            params[name] = make()
    return params


def random_request(
    rng: random.Random, name: str, longest: int = 50, most_tokens: int = 30
) -> EngineRequest:
    length = rng.choice([rng.randrange(1, longest), rng.randrange(1, 12)])
    return request(
        name,
        prompt_of(rng, length),
        max_tokens=rng.choice([0, 1, 2, rng.randrange(1, most_tokens)]),
        **random_params(rng),
    )
