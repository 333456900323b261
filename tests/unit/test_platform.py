"""GPU settings: set where the user has set nothing, for the engine's mesh, understood by XLA."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxengine import platform
from jaxengine.config import EngineConfig
from jaxengine.engine.assemble import open_executor
from jaxengine.executor.nodes import run_follower
from jaxengine.executor.worker_messages import Channel, Reply, Start, StartFailed
from jaxengine.lab.aot import aot
from jaxengine.lab.aot.aot_step import compile_steps
from jaxengine.settings.coupling import member_config
from jaxengine.settings.ranks import rank_config

NAMES = (
    "XLA_FLAGS",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_LAUNCH_MODE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES",
)
ONE = "--xla_disable_hlo_passes=rematerialization"
SEVERAL = (
    f"{ONE} --xla_gpu_enable_command_buffer=-COLLECTIVES"
    " --xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_dot_merger_threshold_mb=0"
)
of = EngineConfig.of
COUPLED = member_config(of(data_parallel_size=8, enable_expert_parallel=True), 3, 15000)


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has set nothing yet, on a machine with GPUs."""
    monkeypatch.setattr(platform, "_applied", {})
    again = functools.cache(platform._setup_process.__wrapped__)
    monkeypatch.setattr(platform, "_setup_process", again)
    monkeypatch.setattr(platform, "gpu_expected", lambda: True)
    monkeypatch.setattr(platform, "compute_capabilities", lambda: ["9.0"])
    monkeypatch.setenv("JAXENGINE_MALLOC", "off")
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that the end of the test takes back what is set
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("config", "visible", "several", "nccl"),
    [
        pytest.param(of(), 1, False, False, id="one GPU"),
        pytest.param(of(), 8, False, False, id="one GPU of eight that are visible"),
        pytest.param(of(tensor_parallel_size=8), 8, True, True, id="TP 8 in one process"),
        pytest.param(of(attention_data_parallel_size=8), 8, True, True, id="attention DP 8"),
        pytest.param(COUPLED, 1, True, False, id="coupled ranks with one GPU each"),
        pytest.param(
            member_config(
                of(data_parallel_size=4, enable_expert_parallel=True, tensor_parallel_size=2),
                1, 15000,
            ),
            2, True, True, id="coupled ranks with two GPUs each",
        ),
        pytest.param(
            of(tensor_parallel_size=2, nnodes=2, node_rank=1), 1, True, False,
            id="nodes with one GPU each",
        ),
        pytest.param(of(tensor_parallel_size=4, nnodes=2), 2, True, True, id="nodes with two"),
        pytest.param(of(pipeline_parallel_size=4), 4, False, False, id="stages of one GPU"),
        pytest.param(
            of(pipeline_parallel_size=2, tensor_parallel_size=2), 4, True, True,
            id="stages of two GPUs",
        ),
        pytest.param(
            rank_config(of(data_parallel_size=8), 3), 1, False, False, id="a dense rank of eight"
        ),
    ],
)  # fmt: skip
def test_the_engines_mesh_decides(
    env: pytest.MonkeyPatch, config: EngineConfig, visible: int, several: bool, nccl: bool
) -> None:
    """Not the GPUs that a process sees. Programs without collectives keep all of XLA's graphs."""
    env.setattr(platform, "compute_capabilities", lambda: ["9.0"] * visible)
    platform.setup(config.parallel)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"
    assert os.environ["XLA_FLAGS"] == (SEVERAL if several else ONE)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == ("1" if several else None)
    assert os.environ.get("NCCL_LAUNCH_MODE") == ("GROUP" if nccl else None)


def test_a_later_call_adds_what_the_engine_needs(env: pytest.MonkeyPatch) -> None:
    platform.setup()
    assert os.environ["XLA_FLAGS"] == ONE
    applied = platform.setup(of(tensor_parallel_size=2).parallel)
    assert os.environ["XLA_FLAGS"] == SEVERAL
    assert applied["XLA_FLAGS --xla_gpu_dot_merger_threshold_mb"] == "0"
    platform.setup(of(tensor_parallel_size=2).parallel)
    assert os.environ["XLA_FLAGS"] == SEVERAL


@pytest.mark.parametrize("capabilities", [["10.0"] * 8, ["9.0", "10.0"], []], ids=str)
def test_other_gpus_keep_their_queues(env: pytest.MonkeyPatch, capabilities: list[str]) -> None:
    env.setattr(platform, "compute_capabilities", lambda: capabilities)
    platform.setup(of(tensor_parallel_size=8).parallel)
    assert os.environ["XLA_FLAGS"] == SEVERAL
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ


def test_the_user_wins(env: pytest.MonkeyPatch) -> None:
    env.setenv("XLA_FLAGS", "--xla_gpu_dot_merger_threshold_mb=32")
    env.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    env.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    platform.setup(of(tensor_parallel_size=2).parallel)
    assert os.environ["XLA_FLAGS"].count("dot_merger") == 1
    assert "--xla_gpu_dot_merger_threshold_mb=32" in os.environ["XLA_FLAGS"]
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"


# -- the processes that own a device ----------------------------------------------------------


def _tell_flags(config: EngineConfig) -> None:
    raise ValueError(os.environ.get("XLA_FLAGS"))


@pytest.mark.parametrize("start", [open_executor, run_follower], ids=["engine", "node"])
def test_an_engine_and_a_node_set_their_meshs_flags(
    env: pytest.MonkeyPatch, start: Callable[[EngineConfig], Any]
) -> None:
    build: Any = types.ModuleType("jaxengine.executor.build")
    build.build = _tell_flags
    env.setitem(sys.modules, build.__name__, build)
    with pytest.raises(ValueError) as found:
        start(of(tensor_parallel_size=2, nnodes=2, node_rank=1))
    assert str(found.value) == SEVERAL


WORKER = """
import os, sys, types
from jaxengine import platform
platform.gpu_expected, platform.compute_capabilities = lambda: True, lambda: ["9.0"]
def build(config):
    raise ValueError(f"{os.environ['CUDA_DEVICE_MAX_CONNECTIONS']} {os.environ['XLA_FLAGS']}")
sys.modules["jaxengine.executor.build"] = types.ModuleType("jaxengine.executor.build")
sys.modules["jaxengine.executor.build"].build = build
from jaxengine.executor.worker_main import main
main(int(sys.argv[1]))
"""


def test_a_worker_that_sees_one_gpu_overlaps_with_the_other_ranks(env: pytest.MonkeyPatch) -> None:
    """The layout of dual-batch overlap: ranks that share experts, one GPU a rank."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", WORKER, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    channel: Channel[Reply] = Channel(ours, Reply)
    channel.send(Start(COUPLED, os.getpid()))
    reply = channel.receive()
    process.wait(60)
    channel.close()
    assert isinstance(reply, StartFailed) and reply.message == f"1 {SEVERAL}"


def test_aot_check_compiles_with_the_flags_of_the_layout(env: pytest.MonkeyPatch) -> None:
    """Each case with those of its own mesh, whatever stands beside it."""
    seen = []

    def in_processes(
        module: str, cases: list[dict[str, Any]], *, flags: list[str], timeout: float
    ) -> Iterator[dict[str, Any]]:
        seen.append((len(cases), " ".join(flags)))
        yield from cases

    env.setattr(aot, "in_processes", in_processes)
    several = {"attention_data_parallel_size": 8}
    cases = [several, {**several, "dbo": True}, {}]
    assert list(compile_steps(cases)) == cases
    assert seen == [(2, SEVERAL), (1, ONE)]
    seen.clear()
    env.setenv("XLA_FLAGS", "--xla_gpu_dot_merger_threshold_mb=32")  # the engine leaves it alone
    list(compile_steps([several]))
    assert "latency_hiding" in seen[0][1] and "dot_merger" not in seen[0][1]


def test_xla_knows_the_flags(env: pytest.MonkeyPatch) -> None:
    platform.setup(of(tensor_parallel_size=2).parallel)
    code = "import jax; jax.devices(); print('fine')"
    settings = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "fine", done.stderr
