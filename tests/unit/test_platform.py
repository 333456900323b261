"""GPU settings: set where the user has set nothing, per machine, and understood by XLA."""

import os
import subprocess
import sys

import pytest

from jaxengine import platform

NAMES = (
    "XLA_FLAGS",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_LAUNCH_MODE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES",
)


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(platform, "_applied", {})
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that the end of the test takes back what is set
        monkeypatch.delenv(name)
    return monkeypatch


def test_one_device_keeps_xlas_graphs(env: pytest.MonkeyPatch) -> None:
    platform._gpu_settings(["9.0"])
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"
    assert os.environ["XLA_FLAGS"] == "--xla_disable_hlo_passes=rematerialization"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ


def test_eight_devices_overlap_collectives(env: pytest.MonkeyPatch) -> None:
    platform._gpu_settings(["9.0"] * 8)
    flags = os.environ["XLA_FLAGS"]
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in flags
    assert "--xla_gpu_dot_merger_threshold_mb=0" in flags
    assert "COLLECTIVES" not in flags and "command_buffer=FUSION" in flags
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_blackwell_keeps_its_queues(env: pytest.MonkeyPatch) -> None:
    platform._gpu_settings(["10.0"] * 8)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ


def test_the_user_wins(env: pytest.MonkeyPatch) -> None:
    env.setenv("XLA_FLAGS", "--xla_gpu_dot_merger_threshold_mb=32")
    env.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    env.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    platform._gpu_settings(["9.0"] * 2)
    assert os.environ["XLA_FLAGS"].count("dot_merger") == 1
    assert "--xla_gpu_dot_merger_threshold_mb=32" in os.environ["XLA_FLAGS"]
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"


def test_xla_knows_the_flags(env: pytest.MonkeyPatch) -> None:
    platform._gpu_settings(["9.0"] * 2)
    code = "import jax; jax.devices(); print('fine')"
    settings = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "fine", done.stderr
