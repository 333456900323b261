"""Settings of XLA and CUDA that must be in place before JAX is imported. Standard library only.

`setup()` sets only what the user has not set, and returns what it set, for the log and
`jaxengine doctor`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxengine.config import ParallelConfig

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4

# Rematerialisation costs compile time and saves nothing where there is no backward pass.
FLAGS = {"xla_disable_hlo_passes": "rematerialization"}

# Of programs that span several devices. Collectives have hung in CUDA graphs: they are taken from
# XLA's own list of what it captures, whatever else is in it. They run beside computation, and
# merging the products of two microbatches (same weights) would undo their overlap.
MESH_FLAGS = {
    "xla_gpu_enable_command_buffer": "-COLLECTIVES",
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    "xla_gpu_dot_merger_threshold_mb": "0",
}

_applied: dict[str, str] = {}


def setup(parallel: ParallelConfig | None = None) -> dict[str, str]:
    """Apply what the user has not set; returns all that was set in this process.

    `parallel` are the settings of the engine that runs here: they say whether its programs span
    several devices, which the devices that this process sees do not (a rank may see one of eight).
    A later call adds what an earlier one, without them, did not know; what it adds is read when
    JAX first uses a device. `JAXENGINE_MALLOC=off` leaves glibc alone.
    """
    _setup_process()
    if parallel is not None and gpu_expected():
        _mesh_settings(parallel)
    return _applied


@functools.cache
def _setup_process() -> None:
    """What does not depend on the engine, once."""
    if "jax" in sys.modules:
        _applied["note"] = "JAX was imported first; settings of its environment are the user's"
    _default("TF_CPP_MIN_LOG_LEVEL", "2")
    if gpu_expected():
        _gpu_settings()
    elif "JAX_PLATFORMS" not in os.environ and "JAX_PLATFORM_NAME" not in os.environ:
        # Saves the search for accelerator plugins.
        _default("JAX_PLATFORMS", "cpu")
    if os.environ.get("JAXENGINE_MALLOC", "on") != "off" and _keep_freed_memory():
        _applied["malloc"] = "M_MMAP_MAX=0, M_TRIM_THRESHOLD=max"


def mesh_devices(parallel: ParallelConfig) -> int:
    """Devices that one program of the engine spans, in all its processes. A pipeline's stages are
    programs of their own."""
    return parallel.tensor_parallel_size * parallel.attention_data_parallel_size


def xla_flags(devices: int) -> dict[str, str]:
    """Flags of programs that span so many GPUs."""
    return FLAGS | MESH_FLAGS if devices > 1 else FLAGS


def gpu_expected() -> bool:
    """True when an NVIDIA device is visible to the system (JAX may still lack its plugin)."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return False
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()


def compute_capabilities() -> list[str]:
    """Of every visible NVIDIA device, as "9.0"; empty where nvidia-smi cannot tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    ask = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        ask.append(f"--id={visible}")
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        _applied["note"] = f"nvidia-smi could not tell the devices: {error}"
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _gpu_settings() -> None:
    """Settings of any engine on NVIDIA devices; see docs/kernels.md for the reasons."""
    _default("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    _default("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "xla_gpu_per_fusion_autotune_cache_dir")
    for name, value in xla_flags(1).items():
        _default_flag(name, value)


def _mesh_settings(parallel: ParallelConfig) -> None:
    """Settings of an engine whose programs span several NVIDIA devices."""
    devices = mesh_devices(parallel)
    if devices < 2:
        return
    for name, value in xla_flags(devices).items():
        _default_flag(name, value)
    if devices > parallel.nnodes:
        _default("NCCL_LAUNCH_MODE", "GROUP")  # one process, many devices
    capabilities = compute_capabilities()
    if capabilities and all(c.startswith("9.") for c in capabilities):
        # One hardware queue keeps a collective's launch in order; on Blackwell it costs speed.
        _default("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _default_flag(name: str, value: str) -> None:
    """Add a flag to XLA_FLAGS unless it is there."""
    if not has_flag(name):
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()
        _applied[f"XLA_FLAGS --{name}"] = value


def has_flag(name: str) -> bool:
    """True when XLA_FLAGS says something about the flag already."""
    flags = os.environ.get("XLA_FLAGS", "")
    return f"--{name}=" in flags or f"--{name} " in f"{flags} "


def cache_dir(setting: str | None) -> Path | None:
    """Folder of compiled programs; None when switched off."""
    if setting == "off":
        return None
    if setting:
        return Path(setting)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "jaxengine" / "xla"


def _default(name: str, value: str) -> None:
    if name not in os.environ:
        os.environ[name] = value
        _applied[name] = value


def _keep_freed_memory() -> bool:
    """Stop glibc from returning XLA's temporary buffers to the system after every call.

    XLA:CPU allocates a program's temporaries per call; above glibc's mmap ceiling every call
    would fault all its pages in again.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_MAX, 0)) and bool(libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
