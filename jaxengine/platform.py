"""Settings of XLA and CUDA that must be in place before JAX is imported. Standard library only.

`setup()` sets only what the user has not set, and returns what it set, for the log and
`jaxengine doctor`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4

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
        _default("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
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
