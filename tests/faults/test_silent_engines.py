"""Processes that stand still (SIGSTOP): noticed, routed round, killed, replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import serverlib
from dp_servers import rank_processes
from serverlib import call, eventually, running

from jaxengine.config import EngineConfig
from jaxengine.engine.stub import canned_tokens
from jaxengine.front.async_llm import AsyncLLM, EngineDeadError, Placement
from jaxengine.front.hub.hub import Hub
from jaxengine.front.hub.messages import Report
from jaxengine.front.hub.remote import RemoteGroup
from jaxengine.metrics.prometheus import Metrics
from jaxengine.sampling_params import SamplingParams
from jaxengine.text.outputs import RequestOutput
from jaxengine.wire import frames as wire
from jaxengine.wire.messages import EngineOutputs

C = "/v1/completions"
TOKENS = 400
SOON = 60  # seconds, on a machine that has other things to do
QUICK = {"step_timeout_sec": 1}  # 3 s of silence are the least that count


@contextlib.asynccontextmanager
async def engines(**flags: Any) -> AsyncIterator[AsyncLLM]:
    engine = await AsyncLLM.start(
        EngineConfig.of(**flags), core=wire.STUB_CORE, skip_tokenizer_init=True
    )
    pids = [pid for pid in engine.engine_pids.values() if pid is not None]
    family = [psutil.Process(pid) for pid in pids]
    try:
        yield engine
    finally:
        await engine.shutdown()
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left


async def until(check: Any) -> None:
    async with asyncio.timeout(SOON):
        while not check():
            await asyncio.sleep(0.01)


async def last(
    engine: AsyncLLM, prompt: list[int], rank: int | None = None, tokens: int = TOKENS
) -> RequestOutput:
    """How a request ended; what it has is right as far as it goes."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    outputs = [o async for o in engine.generate(prompt, params, placement=Placement(rank))]
    output = outputs[-1]
    got = output.outputs[0].token_ids
    assert got == canned_tokens(prompt, tokens)[: len(got)]
    return output


def pid_of(engine: AsyncLLM, rank: int) -> int:
    pid = engine.engine_pids[rank]
    assert pid is not None
    return pid


@pytest.mark.parametrize(
    "replay", [pytest.param(False, marks=pytest.mark.slow), True], ids=["abort", "replay"]
)
async def test_one_of_two_stands_still(replay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """M7. For a moment: nothing happens. For good: its requests end, or go on in the other rank;
    new ones go there at once; it is killed, and replaced by order or by itself."""
    monkeypatch.setenv("JAXENGINE_STUB_STEP_SECONDS", "0.02")
    fault = QUICK | {"auto_recover": "respawn" if replay else "never"}
    flags = {"data_parallel_size": 2, "enable_fault_tolerance": True}
    async with engines(
        **flags, fault_tolerance_config=fault, retry_aborted_requests=replay
    ) as engine:
        victim = pid_of(engine, 1)
        client = engine._group._clients[1]  # type: ignore[union-attr]
        os.kill(victim, signal.SIGSTOP)
        await until(lambda: client._silence.seconds >= 1)
        os.kill(victim, signal.SIGCONT)
        await until(lambda: client._silence.seconds == 0)

        # The choice of the rank is the balancer's: what its client has fixed is not replayed.
        asked = [asyncio.create_task(last(engine, [100 + i, 7])) for i in range(8)]
        loads = engine._group.placer.balancer.loads  # type: ignore[union-attr]
        await until(lambda: loads[0].running == loads[1].running == 4)
        os.kill(victim, signal.SIGSTOP)
        await until(lambda: engine.board.ranks[1].state != "healthy")
        late = [asyncio.create_task(last(engine, [200 + i, 7], tokens=5)) for i in range(4)]
        ends = [output.outputs[0].finish_reason for output in await asyncio.gather(*asked, *late)]
        assert ends.count("abort") == (0 if replay else 4)
        assert ends.count("length") == len(ends) - ends.count("abort")
        assert ends[8:] == ["length"] * 4

        if not replay:
            await until(lambda: engine.board.ranks[1].state == "dead")
            order = engine.orders.apply({"instruction": "respawn"})
            await until(lambda: order.payload()["status"] == "done")
            assert order.payload()["success"]
        await until(lambda: engine.board.healthy() == [0, 1])
        assert not psutil.pid_exists(victim) and pid_of(engine, 1) != victim
        history = [e for e in engine.board.payload()["history"] if e["id"] == 1 and "status" in e]
        assert [(e["status"], e.get("fault_info")) for e in history] == [
            ("healthy", None),
            ("unhealthy", "EngineSilent"),
            ("dead", "EngineSilent"),
            ("starting", None),
            ("healthy", None),
        ]
        assert (await last(engine, [5, 6], 1, 3)).outputs[0].finish_reason == "length"
        family = [psutil.Process(pid_of(engine, 1))]
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left


@pytest.mark.slow
async def test_a_long_step_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop says nothing for longer than silence may last; the input thread answers. At the end
    the process stands still, and closing does not wait for it."""
    monkeypatch.setenv("JAXENGINE_STUB_STEP_SECONDS", "5")
    flags = {"enable_fault_tolerance": True}
    async with engines(**flags, fault_tolerance_config=QUICK) as engine:
        before = pid_of(engine, 0)
        assert (await last(engine, [5, 6], tokens=1)).outputs[0].finish_reason == "length"
        assert pid_of(engine, 0) == before and len(engine.board.payload()["history"]) == 1
        os.kill(before, signal.SIGSTOP)
        await asyncio.wait_for(engine.shutdown(), SOON)


async def test_without_fault_tolerance_silence_is_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXENGINE_STUB_STEP_SECONDS", "0.02")
    async with engines() as engine:
        engine._group._silence_limit = 3.0
        stopped = psutil.Process(pid_of(engine, 0))
        asked = asyncio.create_task(last(engine, [5, 6], tokens=4000))
        await until(lambda: engine.stats.num_running == 1)
        stopped.suspend()
        with pytest.raises(EngineDeadError, match="said nothing for 3 s; it was killed"):
            await asyncio.wait_for(asked, SOON)
        assert engine.errored
        with pytest.raises(EngineDeadError, match="said nothing for 3 s"):
            await last(engine, [5, 6])


async def test_behind_a_hub_silence_is_death() -> None:
    """The supervisor of several API processes owns the engines; it tells them."""
    config = EngineConfig.of(api_server_count=2)
    hub = Hub(config, wire.STUB_CORE, Metrics("demo", 128, range(1)), lambda text, _: text)
    hub.group._silence_limit = 3.0
    remote = RemoteGroup(config, hub.metrics.health, hub.address, 0, lambda: Report(b"", 0))
    stopped = None
    try:
        await asyncio.gather(hub.start(), remote.start())
        runs = [asyncio.create_task(run) for run in (hub.run(), remote.run(_drop))]
        pid = hub.group.pid
        assert pid is not None
        stopped = psutil.Process(pid)
        stopped.suspend()
        for run in runs:
            with pytest.raises(EngineDeadError, match="the engine process said nothing for 3 s"):
                await asyncio.wait_for(run, SOON)
    finally:
        await remote.close()
        await hub.close()
    assert not stopped.is_running()


async def _drop(rank: int, message: EngineOutputs) -> None:
    pass


def test_a_lone_engine_over_http() -> None:
    """The whole server stands still for longer than silence may last: nobody is blamed for that.
    Then its engine does: 503, and all is well after a respawn."""
    flags = ["--enable-fault-tolerance", "--fault-tolerance-config", '{"step_timeout_sec": 1}']
    with running(*flags) as up:
        engine = rank_processes(up)[0]
        family = up.family()
        for process in family:
            process.suspend()
        time.sleep(5)
        for process in family:  # the front first
            process.resume()
        assert call(up.url, C, {"prompt": "hi", "max_tokens": 2})[0] == 200
        time.sleep(2)
        status = call(up.url, "/fault_tolerance/status")[1]
        assert len(status["history"]) == 1 and rank_processes(up)[0] == engine

        engine.suspend()
        eventually(lambda: call(up.url, "/health")[0] == 503, SOON)
        status, body, headers = call(up.url, C, {"prompt": "hi"})
        assert status == 503 and body["error"]["code"] == "unavailable" and headers["retry-after"]
        assert call(up.url, "/health/live")[0] == 200
        eventually(lambda: not engine.is_running(), SOON)
        assert call(up.url, "/fault_tolerance/apply", {"instruction": "respawn"})[0] == 202
        eventually(lambda: call(up.url, "/health")[:2] == (200, {"status": "ok"}), SOON)
        assert call(up.url, C, {"prompt": "hi", "max_tokens": 2})[0] == 200
        assert 'engine_faults_total{engine="0",kind="EngineSilent"' in call(up.url, "/metrics")[1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["jaxengine::engine0", "jaxengine::api1"])
def test_a_server_of_several_processes_ends(
    victim: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of an engine that stands still, and of an API process; nothing is left."""
    script = tmp_path / "impatient.py"
    script.write_text(_IMPATIENT)

    def spawn(*flags: str, core: str, step: float) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(script), *flags],
            env={**os.environ, "PYTHONPATH": str(serverlib.ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    monkeypatch.setattr(serverlib, "spawn", spawn)
    with running("--api-server-count", "2", "--port", "0") as up:
        family = up.family()
        [process] = [p for p in family if p.cmdline()[0].startswith(victim)]
        process.suspend()
        assert up.process.wait(SOON) == 1
        _, left = psutil.wait_procs(family, timeout=10)
        assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
        assert any("said nothing for 3 s" in line for line in up.lines)


_IMPATIENT = """
import sys
from jaxengine.cli import main as cli
from jaxengine.front.ranks import group
from jaxengine.front.hub import hub

if __name__ == "__main__":
    hub.silence_limit = group.silence_limit = lambda config: 3.0
    cli.main(["serve", "--stub", *sys.argv[1:]])
"""


_PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
child.wait()
"""
_CHILD = """
import sys, time
from jaxengine.executor.parent import tie_to_parent
tie_to_parent(int(sys.argv[1]))
print("tied", flush=True)
time.sleep(600)
"""


def test_a_child_that_stands_still_dies_with_its_parent() -> None:
    """An engine that stands still is killed while its worker does so too."""
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, _CHILD], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "tied\n"
        [child] = psutil.Process(parent.pid).children()
        os.kill(parent.pid, signal.SIGSTOP)
        child.suspend()
        parent.kill()
        eventually(lambda: not child.is_running(), SOON)
