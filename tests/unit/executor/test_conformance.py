"""The executor of a worker process does what the one in this process does."""

from __future__ import annotations

import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from conformance import assert_same, transcript
from testdata import GOLDENS

from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.executor.worker import WorkerExecutor
from jaxengine.executor.worker_messages import StepDone, Submit, decoder, encode, keys_of
from jaxengine.executor.worker_process import WorkerDied, WorkerError, WorkerHung
from jaxengine.lab.tap import tapped
from jaxengine.sampling_params import SamplingParams
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import StepResult
from jaxengine.sched.shapes import sampler_of
from jaxengine.wire.messages import EngineRequest

MODEL = GOLDENS / "llama"


def core(fault_tolerance: bool, **settings: Any) -> EngineCore:
    chosen = {
        "model": str(MODEL),
        "max_model_len": 192,
        "block_size": 4,
        "num_gpu_blocks_override": 48,
        "max_logprobs": 5,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 17,
        "warmup": "lazy",
        "enable_fault_tolerance": fault_tolerance,
    }
    return EngineCore(EngineConfig.of(**(chosen | settings)))


REQUESTS: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"prompt_logprobs": 2, "logit_bias": {5: 2.0}},
    {"temperature": 1.0, "seed": 7, "frequency_penalty": 0.5},
]


def recorded(engine: EngineCore) -> tuple[list[Batch], dict[str, list[int]]]:
    """Run the requests, and keep the batches."""
    batches: list[Batch] = []

    def record(submit: Callable[[Batch], Any], batch: Batch) -> Any:
        batches.append(batch)
        return submit(batch)

    ids: dict[str, list[int]] = {}
    for number, params in enumerate(REQUESTS):
        settings = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True} | params
        prompt = [(31 * i + number) % 300 + 3 for i in range(25)]
        engine.add_request(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                params=SamplingParams(**settings),
                arrival_time=0.0,
                eos_token_ids=[2],
            )
        )
    with tapped(engine.executor, submit=record):
        while engine.has_work():
            for output in engine.step():
                ids.setdefault(output.request_id, []).extend(output.new_token_ids)
    return batches, ids


@pytest.fixture(scope="module")
def worker() -> Iterator[EngineCore]:
    engine = core(True, fault_tolerance_config='{"step_timeout_sec": 3}')
    yield engine
    engine.shutdown()


def test_same_batches_same_results(worker: EngineCore) -> None:
    inline = core(False)
    try:
        batches, ids = recorded(inline)
        assert any(b.seeds for b in batches) and any(b.prompt_rows for b in batches)

        def mask(batch: Batch) -> Any:
            words = -(-inline.facts.spec.vocab_size // 32)
            return np.full((batch.sampler_rows, words), 0x0F0F0F0F, np.int32)

        masked = [Batch(**{**vars(b), "masked": i % 3 == 0}) for i, b in enumerate(batches)]
        for script in (batches, masked):
            wanted = transcript(inline.executor, script, mask)
            assert_same(wanted, transcript(worker.executor, script, mask))
            assert_same(wanted, transcript(worker.executor, script, mask, depth=1))
        assert recorded(worker)[1] == ids
        built = (inline.facts.sched_sizes, inline.facts.spec, inline.facts.batch_shape)
        assert built == (worker.facts.sched_sizes, worker.facts.spec, worker.facts.batch_shape)
        for tokens, rows, decode_only in ((17, 1, False), (3, 1, False), (1, 1, True)):
            shape = inline.executor.choose(tokens, rows, decode_only, tokens)
            assert worker.executor.choose(tokens, rows, decode_only, tokens) == shape
        assert worker.executor.stats().keys() == inline.executor.stats().keys()
    finally:
        inline.shutdown()


def test_a_step_of_compiled_programs_has_no_time_to_compile(worker: EngineCore) -> None:
    """Its hang is noticed after step_timeout_sec, with the greedy sampler alone too."""
    executor = worker.executor
    assert isinstance(executor, WorkerExecutor)
    recorded(worker)
    deadline = time.monotonic() + 20
    while ("greedy", 1) not in executor.ready_programs and time.monotonic() < deadline:
        time.sleep(0.05)
    batches, _ = recorded(worker)
    greedy = next(b for b in batches if sampler_of(b, lambda key: False)[0] == "greedy")
    keys = keys_of(greedy, lambda key: key == ("greedy", 1))
    assert ("greedy", 1) in keys and set(keys) <= executor.ready_programs


def test_failures_of_the_worker(worker: EngineCore) -> None:
    executor = worker.executor
    assert isinstance(executor, WorkerExecutor)
    batches, _ = recorded(worker)
    batch = batches[0]
    broken = Batch(**{**vars(batch), "blob": batch.blob[:-1]})
    good, bad, late = executor.submit(batch), executor.submit(broken), executor.submit(batch)
    executor.result(good)  # what came before a failure still counts
    with pytest.raises(WorkerError) as caught:
        executor.result(bad)
    assert caught.value.kind == "TypeError"
    executor.reset()
    assert executor.alive and late not in executor._results
    executor.result(executor.submit(batch))

    ended: list[bool] = []
    executor.watch(lambda: ended.append(executor.alive))
    psutil.Process(executor.pid).send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(WorkerHung, match="a step took more than 3 s"):
        executor.result(executor.submit(batch))
    assert time.monotonic() - began < 3 + 2
    with pytest.raises(WorkerDied):
        executor.submit(batch)
    with pytest.raises(WorkerDied):
        executor.reset()
    old = executor.pid
    executor.respawn()
    assert ended == [False] and executor.alive and executor.epoch == 1
    assert executor.pid != old and not psutil.pid_exists(old)
    executor.result(executor.submit(batch))


def test_a_worker_that_cannot_start() -> None:
    with pytest.raises(ValueError, match="max_model_len 9999") as caught:
        core(True, max_model_len=9999)
    assert "in build" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="fault_tolerance_config: Object contains unknown field"):
        core(True, fault_tolerance_config='{"timeout": 3}')
    with pytest.raises(ValueError, match="inject_faults: Invalid enum value 'melt'"):
        core(True, inject_faults='[{"kind": "melt", "step": 3}]')


def test_what_is_sent_is_what_arrives() -> None:
    from jaxengine.sched.batch import Bucket

    batch = Batch(
        Bucket(4, 1, False),
        np.arange(9, dtype=np.int32),
        1,
        np.arange(3, dtype=np.int32),
        (1,),
        seeds=[np.zeros(0, np.int32)],
        prompt_rows=[(0, 1, 2, 3)],
        prompt_targets=np.arange(8, dtype=np.int32).reshape(2, 4)[:, 1:],
    )
    sent = Submit(1, batch)
    message = encode(sent)
    back = decoder(Submit)(message).batch
    assert np.shares_memory(back.blob, np.frombuffer(message, np.uint8))  # no copy was made
    assert (back.bucket, back.num_rows, back.prompt_rows) == (batch.bucket, (1,), [(0, 1, 2, 3)])
    for mine, yours in (
        (batch.blob, back.blob),
        (batch.seeds[0], back.seeds[0]),
        (batch.prompt_targets, back.prompt_targets),
    ):
        assert mine is not None and yours is not None
        assert mine.shape == yours.shape and mine.dtype == yours.dtype
        assert mine.tolist() == yours.tolist()
    assert back.pool_index is None
    result = StepResult(
        np.array([[7]], np.int32),
        np.array([1], np.int32),
        bad_rows=np.array([True]),
        logprobs=np.array([[0.5, 0.25]], np.float32),
        prompt_logprobs={3: (batch.blob[:2], np.ones((1, 2), np.float32), batch.blob[:1])},
    )
    [again] = decoder(StepDone)(encode(StepDone(1, [result]))).results
    assert again.bad_rows.tolist() == [True] and again.bad_rows.dtype == bool
    assert again.logprobs.tolist() == [[0.5, 0.25]] and again.logprobs.dtype == np.float32
    assert [part.tolist() for part in again.prompt_logprobs[3]] == [[0, 1], [[1.0, 1.0]], [0]]
    with pytest.raises(TypeError, match="object does not go"):
        encode(Submit(1, object()))  # type: ignore[arg-type]
    assert {("seed", 0), ("score", 4)} <= set(keys_of(batch, lambda key: True))


def test_kv_offload_through_a_worker() -> None:
    """Prefixes come back from host memory, also after the worker was replaced."""
    engine = core(True, kv_offloading_size=0.01)
    [(pool, *_), _] = engine.executor._transfers
    shared = pathlib.Path(pool.address)
    assert shared.exists()
    try:
        before = recorded(engine)[1]
        deadline = time.monotonic() + 20
        while engine.has_work() and time.monotonic() < deadline:
            engine.step()
        stored = engine.stats().extra
        assert sum(n for name, n in stored.items() if "store" in name) > 0, stored
        engine.on_fault()
        engine.recover(respawn=True)
        assert recorded(engine)[1] == before
        loaded = engine.stats().extra
        assert sum(n for name, n in loaded.items() if "load" in name) > 0, loaded
        engine.on_fault()
        engine.recover(respawn=False)
        assert recorded(engine)[1] == before
    finally:
        engine.shutdown()
    assert not shared.exists()
