"""Settings of XLA and CUDA that must be in place before JAX is imported. Standard library only.

`setup()` sets only what the user has not set, and returns what it set, for the log and
`jaxengine doctor`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4

# What XLA may put in a CUDA graph: all but collectives, which have hung in graphs.
GRAPH_COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL"

# With several devices: collectives beside computation. Merging the products of two microbatches
# (same weights) would undo their overlap.
OVERLAP_FLAGS = {
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    "xla_gpu_dot_merger_threshold_mb": "0",
}

_applied: dict[str, str] = {}


def setup() -> dict[str, str]:
    """Apply once per process; later calls return the first result.

    Environment variables already present win. `JAXENGINE_MALLOC=off` leaves glibc alone.
    """
    if _applied:
        return _applied
    if "jax" in sys.modules:
        _applied["note"] = "JAX was imported first; settings of its environment are the user's"
    _default("TF_CPP_MIN_LOG_LEVEL", "2")
    if gpu_expected():
        _gpu_settings(compute_capabilities())
    elif "JAX_PLATFORMS" not in os.environ and "JAX_PLATFORM_NAME" not in os.environ:
        # Saves the search for accelerator plugins.
        _default("JAX_PLATFORMS", "cpu")
    if os.environ.get("JAXENGINE_MALLOC", "on") != "off" and _keep_freed_memory():
        _applied["malloc"] = "M_MMAP_MAX=0, M_TRIM_THRESHOLD=max"
    return _applied


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


def _gpu_settings(capabilities: list[str]) -> None:
    """Settings of one or more NVIDIA devices; see docs/kernels.md for the reasons."""
    _default("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    _default("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "xla_gpu_per_fusion_autotune_cache_dir")
    # Rematerialisation costs compile time and saves nothing where there is no backward pass.
    _default_flag("xla_disable_hlo_passes", "rematerialization")
    if len(capabilities) < 2:
        return
    _default("NCCL_LAUNCH_MODE", "GROUP")  # one process, many devices
    _default_flag("xla_gpu_enable_command_buffer", GRAPH_COMMANDS)
    for name, value in OVERLAP_FLAGS.items():
        _default_flag(name, value)
    if all(c.startswith("9.") for c in capabilities):
        # One hardware queue keeps a collective's launch in order; on Blackwell it costs speed.
        _default("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _default_flag(name: str, value: str) -> None:
    """Add a flag to XLA_FLAGS unless the user's already has it."""
    flags = os.environ.get("XLA_FLAGS", "")
    if f"--{name}=" in flags or f"--{name} " in f"{flags} ":
        return
    os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()
    _applied[f"XLA_FLAGS --{name}"] = value


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
