"""Data parallel engines under load while ranks fail: real processes, real kills."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import pathlib
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest
from serverlib import Server, call, chunks, eventually, metric, running

from jaxengine.config import EngineConfig
from jaxengine.engine import wire
from jaxengine.engine.async_llm import AsyncLLM, Placement, UnavailableError
from jaxengine.engine.stub import canned_tokens
from jaxengine.frontend.outputs import RequestOutput
from jaxengine.sampling_params import SamplingParams

C, CC = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True}
PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=1)
LLAMA = pathlib.Path(__file__).resolve().parents[2] / "../shared/goldens/llama"


@contextlib.asynccontextmanager
async def engines(**settings: Any) -> AsyncIterator[AsyncLLM]:
    config = EngineConfig.of(
        **{"data_parallel_size": 4, "enable_fault_tolerance": True, "max_num_seqs": 32} | settings
    )
    engine = await AsyncLLM.start(config, core=wire.STUB_CORE, skip_tokenizer_init=True)
    try:
        yield engine
    finally:
        await engine.shutdown()


def _kill(engine: AsyncLLM, rank: int) -> None:
    pid = engine.engine_pids[rank]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def _last(engine: AsyncLLM, prompt: list[int], placement: Placement) -> RequestOutput:
    last = None
    async for output in engine.generate(prompt, PARAMS, placement=placement):
        last = output
    assert last is not None
    return last


async def _client(engine: AsyncLLM, number: int, rounds: int, reasons: dict[str, int]) -> None:
    """Ask again and again; what comes is the truth, or the beginning of it."""
    for round_ in range(rounds):
        prompt = [1000 + 100 * number + round_, 7, 3 + number]
        last = await _last(engine, prompt, Placement())
        (choice,) = last.outputs
        expected = canned_tokens(prompt, 60)
        assert choice.finish_reason in ("length", "abort")
        if choice.finish_reason == "length":
            assert choice.token_ids == expected
        else:
            assert choice.token_ids == expected[: len(choice.token_ids)]
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
        reasons[choice.finish_reason] = reasons.get(choice.finish_reason, 0) + 1


async def _order(engine: AsyncLLM, rank: int, instruction: str) -> None:
    order = engine.orders.apply({"instruction": instruction, "params": {"rank": rank}})
    end = time.monotonic() + 30
    while order.payload()["status"] == "pending":
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
    assert order.payload()["success"], order.payload()


@pytest.mark.parametrize("replay", [False, True], ids=["abort", "replay"])
async def test_ranks_fail_under_load(replay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 clients on 4 ranks; rank 1 raises, rank 2 is killed. Nobody hangs, the others' answers
    are whole, and with replays everybody's are; then both ranks come back by order."""
    monkeypatch.setenv("JAXENGINE_STUB_STEP_SECONDS", "0.01")
    faults = json.dumps([{"rank": 1, "step": 40, "kind": "raise"}])
    async with engines(inject_faults=faults, retry_aborted_requests=replay) as engine:
        reasons: dict[str, int] = {}
        clients = [asyncio.create_task(_client(engine, i, 3, reasons)) for i in range(32)]
        await asyncio.sleep(0.8)
        _kill(engine, 2)
        died = time.monotonic()
        while len(engine.board.healthy()) > 2:
            assert time.monotonic() < died + 5
            await asyncio.sleep(0.02)
        done, hanging = await asyncio.wait(clients, timeout=30)
        assert not hanging
        for client in done:
            client.result()
        assert reasons.get("length", 0) + reasons.get("abort", 0) == 96
        # a rank of four held a quarter of 32; the dead one and the faulted one held so much each
        assert reasons.get("abort", 0) == 0 if replay else 2 <= reasons["abort"] <= 40
        states = {i: h.state for i, h in engine.board.ranks.items()}
        assert states == {0: "healthy", 1: "unhealthy", 2: "dead", 3: "healthy"}
        text = engine.metrics.render().decode()
        moved = "replayed" if replay else "aborted"
        for rank in (1, 2):
            (line,) = [
                x
                for x in text.splitlines()
                if x.startswith(f"jaxengine:fault_{moved}_requests_total")
                and f'engine="{rank}"' in x
            ]
            assert float(line.rsplit(" ", 1)[1]) >= 1
        assert engine.num_requests == 0

        with pytest.raises(UnavailableError):
            await engine.add([1], PARAMS, placement=Placement(2))
        await _order(engine, 1, "retry")
        await _order(engine, 2, "respawn")
        assert engine.board.healthy() == [0, 1, 2, 3]
        for rank in range(4):
            last = await _last(engine, [5, 6, rank], Placement(rank))
            assert last.outputs[0].token_ids == canned_tokens([5, 6, rank], 60)
        pids = [pid for pid in engine.engine_pids.values() if pid is not None]
    await asyncio.sleep(0.1)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
async def test_kills_are_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is killed every 3 s and comes back by itself: with replays no client notices, and
    somebody always gets tokens."""
    monkeypatch.setenv("JAXENGINE_STUB_STEP_SECONDS", "0.02")
    settings = {"auto_recover": "respawn"}
    async with engines(retry_aborted_requests=True, fault_tolerance_config=settings) as engine:
        reasons: dict[str, int] = {}
        clients = [asyncio.create_task(_client(engine, i, 10, reasons)) for i in range(20)]
        everybody = asyncio.gather(*clients)
        rank, kills, longest = 0, 0, 0.0
        changed, tokens = time.monotonic(), -1
        due = changed + 1
        while not everybody.done():
            await asyncio.sleep(0.02)
            now = time.monotonic()
            if engine.metrics.totals.generation_tokens != tokens:
                tokens = engine.metrics.totals.generation_tokens
                longest, changed = max(longest, now - changed), now
            if now > due and len(engine.board.healthy()) == 4:
                _kill(engine, rank % 4)
                rank, kills, due = rank + 1, kills + 1, now + 3
        await everybody
        assert reasons == {"length": 200} and kills >= 2
        assert longest < 1


@pytest.fixture(scope="module")
def up() -> Iterator[Server]:
    with running(
        "--data-parallel-size",
        "2",
        "--enable-fault-tolerance",
        "--api-key",
        "key",
        "--max-model-len",
        "8192",
        step=0.02,
    ) as server:
        yield server


KEY = {"Authorization": "Bearer key"}


def _call(up: Server, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return call(up.url, path, body, KEY | named)


def _state(up: Server, rank: int) -> str:
    status, body, _ = _call(up, "/fault_tolerance/status")
    assert status == 200
    return str(body["engines"][rank]["status"])


def _engines(up: Server) -> dict[int, psutil.Process]:
    """Engine processes by rank: their titles tell."""
    found = {}
    for child in psutil.Process(up.process.pid).children():
        title = " ".join(child.cmdline())
        if title.startswith("jaxengine::engine"):
            found[int(title.removeprefix("jaxengine::engine").split()[0])] = child
    return found


def test_the_routes(up: Server) -> None:
    assert call(up.url, "/fault_tolerance/status")[0] == 401
    assert call(up.url, "/fault_tolerance/apply", {"instruction": "retry"})[0] == 401
    status, body, _ = _call(up, "/fault_tolerance/status")
    assert status == 200 and body["schema_version"] == 1 and body["total_engines"] == 2
    assert [(e["id"], e["status"], e["epoch"]) for e in body["engines"]] == [
        (0, "healthy", 0),
        (1, "healthy", 0),
    ]
    for wrong, named in [
        ({}, "instruction"),
        ({"instruction": "explode"}, "instruction"),
        ({"instruction": "retry", "params": []}, "params"),
        ({"instruction": "retry", "params": {"rank": 2}}, "params"),
        ([], "instruction"),
    ]:
        status, body, _ = _call(up, "/fault_tolerance/apply", wrong)
        assert status == 400 and body["error"]["param"] == named
    status, body, _ = call(up.url, "/fault_tolerance/apply", headers=KEY, raw=b"{")
    assert status == 400 and "not valid JSON" in body["error"]["message"]
    assert _call(up, "/fault_tolerance/result/none")[0] == 404

    order = {"instruction": "retry", "params": {"rank": 0}}
    status, body, _ = _call(up, "/fault_tolerance/apply", order)
    assert status == 202 and body["request_id"] and body["message"]
    path = f"/fault_tolerance/result/{body['request_id']}"
    eventually(lambda: _call(up, path)[1]["status"] == "done")
    answer = _call(up, path)[1]
    assert answer["success"] is False and answer["results"][0]["reason"]
    entry = _call(up, "/fault_tolerance/status")[1]["engines"][0]
    assert entry["status"] == "healthy" and entry["last_ft_request_id"] == body["request_id"]
    assert entry["ft_error"] == answer["results"][0]["reason"]


def test_a_request_chooses_its_rank(up: Server) -> None:
    body = {"prompt": "hi", "max_tokens": 2}
    assert _call(up, C, body | {"data_parallel_rank": 1})[0] == 200
    assert _call(up, C, body, X_data_parallel_rank="0")[0] == 200
    for fields, header in [
        ({"data_parallel_rank": 2}, None),
        ({"data_parallel_rank": -1}, None),
        ({"data_parallel_rank": "0"}, None),
        ({"data_parallel_rank": 0}, "1"),
        ({}, "one"),
        ({}, "2"),
    ]:
        headers = {} if header is None else {"X_data_parallel_rank": header}
        status, answer, _ = _call(up, C, body | fields, **headers)
        assert status == 400 and answer["error"]["param"] == "data_parallel_rank", answer


def test_health_and_recovery_over_http(up: Server) -> None:
    assert call(up.url, "/health")[:2] == (200, {"status": "ok"})
    streams: list[list[dict[str, Any]]] = []

    def stream(rank: int) -> None:
        body = LONG | {"max_tokens": 150, "data_parallel_rank": rank, "stream": True}
        data = json.dumps(body).encode()
        import urllib.request

        request = urllib.request.Request(
            up.url + C, data, KEY | {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            events = response.read().decode().removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        streams.append([json.loads(e.removeprefix("data: ")) for e in events[:-1]])

    threads = [threading.Thread(target=stream, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    eventually(lambda: _call(up, "/load")[1]["server_load"] == 2)
    time.sleep(0.3)
    _engines(up)[1].kill()
    eventually(lambda: _state(up, 1) == "dead", 2)
    for thread in threads:
        thread.join(20)
    reasons = sorted(s[-1]["choices"][0]["finish_reason"] for s in streams)
    assert reasons == ["abort", "length"]
    assert call(up.url, "/health")[:2] == (200, {"status": "degraded"})
    assert _call(up, C, {"prompt": "x", "max_tokens": 2})[0] == 200

    _engines(up)[0].kill()
    eventually(lambda: _state(up, 0) == "dead", 2)
    status, body, headers = call(up.url, "/health")
    assert (status, body) == (503, {"status": "unavailable"}) and headers["retry-after"]
    assert call(up.url, "/health/live")[0] == 200
    for path, wanted in ((C, {"prompt": "x"}), (CC, {"messages": [{"role": "user"}]})):
        status, body, headers = _call(up, path, wanted)
        assert status == 503 and headers["retry-after"]
        assert body["error"]["code"] == "unavailable"

    status, body, _ = _call(up, "/fault_tolerance/apply", {"instruction": "respawn"})
    assert status == 202
    eventually(lambda: call(up.url, "/health")[:2] == (200, {"status": "ok"}), 30)
    entries = _call(up, "/fault_tolerance/status")[1]
    assert [e["epoch"] for e in entries["engines"]] == [1, 1] and len(entries["history"]) >= 6
    for rank in (0, 1):
        body = {"prompt": "x", "max_tokens": 3, "data_parallel_rank": rank}
        assert _call(up, C, body)[0] == 200

    text = _call(up, "/metrics")[1]
    for rank in (0, 1):
        for series in (
            f'engine_faults_total{{engine="{rank}",kind="ProcessDied"',
            f'engine_recoveries_total{{engine="{rank}",model_name="demo",outcome="ok"}} 1',
            f'engine_state{{engine="{rank}",model_name="demo",state="healthy"}} 1',
            f'num_requests_running{{engine="{rank}"',
        ):
            assert f"jaxengine:{series}" in text, series
    assert 'engine_unhealthy_seconds_total{engine="1"' in text


def test_one_death_ends_the_server_without_fault_tolerance() -> None:
    """B46; B45: and nothing stays."""
    with running("--data-parallel-size", "2", "--shutdown-timeout", "1", step=0.02) as up:
        family = up.family()
        assert call(up.url, "/fault_tolerance/status")[0] == 404
        _engines(up)[1].kill()
        eventually(lambda: call(up.url, "/health")[0] == 503, 2)
        assert up.process.wait(15) == 1
        _, left = psutil.wait_procs(family, timeout=5)
        assert not left
        assert any("data-parallel rank 1" in line for line in up.lines)


def test_kill_9_of_the_front_leaves_no_rank() -> None:
    """B45, under load."""
    with running("--data-parallel-size", "2", "--enable-fault-tolerance", step=0.02) as up:
        family = up.family()
        thread = threading.Thread(target=_ignore_errors, args=(up.url,))
        thread.start()
        eventually(lambda: metric(up.url, "num_requests_running") == 1)
        up.process.kill()
        _, left = psutil.wait_procs(family, timeout=5)
        assert not left
        thread.join(5)


def _ignore_errors(url: str) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        chunks(url, C, LONG)


def test_external_and_hybrid_modes() -> None:
    """A server for rank 1 of 3, and one for ranks 1 and 2: each refuses what is not its own."""
    size = ("--data-parallel-size", "3", "--enable-fault-tolerance")
    external = ("--data-parallel-rank", "1", "--data-parallel-external-lb")
    hybrid = (
        "--data-parallel-hybrid-lb",
        "--data-parallel-size-local",
        "2",
        "--data-parallel-start-rank",
        "1",
    )
    for mode, ranks in ((external, [1]), (hybrid, [1, 2])):
        with running(*size, *mode) as up:
            entries = call(up.url, "/fault_tolerance/status")[1]["engines"]
            assert [entry["id"] for entry in entries] == ranks
            for rank in range(3):
                body = {"prompt": "hi", "max_tokens": 2, "data_parallel_rank": rank}
                assert call(up.url, C, body)[0] == (200 if rank in ranks else 400)
            text = call(up.url, "/metrics")[1]
            assert 'engine="1"' in text and 'engine="0"' not in text
            psutil.Process(_engines(up)[1].pid).kill()
            eventually(lambda: call(up.url, "/health")[0] == (503 if ranks == [1] else 200), 2)  # noqa: B023
            order = {"instruction": "respawn", "params": {"rank": 1}}
            assert call(up.url, "/fault_tolerance/apply", order)[0] == 202
            eventually(lambda: call(up.url, "/health")[1] == {"status": "ok"}, 30)  # noqa: B023


def test_a_rank_that_cannot_start_is_shown() -> None:
    from serverlib import spawn

    process = spawn("--data-parallel-size", "2", core="faulty_cores:StartFails")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "data-parallel rank" in text and "no device was found" in text
    assert "Traceback" in text


async def test_two_ranks_of_a_model_answer_alike() -> None:
    """Both ranks say what the reference says, and requests whose rank is killed go on in the
    other as if nothing had been."""
    case = json.loads((LLAMA / "golden.json").read_text())["cases"][1]
    prompt, greedy = case["prompt"], case["greedy"]
    config = EngineConfig.of(
        model=str(LLAMA),
        data_parallel_size=2,
        enable_fault_tolerance=True,
        retry_aborted_requests=True,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=128,
        num_gpu_blocks_override=32,
        warmup="lazy",
        dtype="float32",
    )
    params = SamplingParams(temperature=0.0, max_tokens=len(greedy), ignore_eos=True)
    engine = await AsyncLLM.start(config, skip_tokenizer_init=True)
    try:
        for rank in (0, 1):
            last = None
            async for out in engine.generate(prompt, params, placement=Placement(rank)):
                last = out
            assert last is not None and last.outputs[0].token_ids == greedy
        stream = await engine.add(prompt, params, kind="delta")
        tokens: list[int] = []
        killed = False
        async for out in stream:
            tokens += out.outputs[0].token_ids
            if len(tokens) >= 5 and not killed:
                killed = True
                _kill(engine, max(engine.board.ranks, key=lambda r: _running(engine, r)))
        assert killed and tokens == greedy
        while len(engine.board.healthy()) == 2:
            await asyncio.sleep(0.01)
        async for out in engine.generate(prompt, params):
            last = out
        assert last.outputs[0].token_ids == greedy
    finally:
        await engine.shutdown()


def _running(engine: AsyncLLM, rank: int) -> int:
    """Sequences that the front has in flight there."""
    return engine._group.placer.balancer.loads[rank].own
