"""Which device a call would run on, and whether the Hopper kernels can."""

from __future__ import annotations

import functools
import logging

import jax

log = logging.getLogger(__name__)
BACKENDS = ("auto", "mosaic", "xla")
_assumed = ""


def assume(capability: str) -> None:
    """Choose backends as for a device of this compute capability ("9.0"); "" ends that. For
    compiling on a machine without the device. Reasons are then said again."""
    global _assumed
    _assumed = capability
    _say.cache_clear()


def compute_capability() -> str:
    """Compute capability of the default device as "9.0"; "" where it is no NVIDIA GPU."""
    return _assumed or _real_capability()


@functools.cache
def _real_capability() -> str:
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return ""
    return str(getattr(device, "compute_capability", ""))


@functools.cache
def num_sms() -> int:
    """Streaming multiprocessors of the default device; 132 (H100, H200) where unknown."""
    return int(getattr(jax.devices()[0], "core_count", 0) or 132)


def device_reason() -> str:
    """Why the default device cannot run the kernels; "" if it can."""
    capability = compute_capability()
    if capability == "":
        return f"the device is {jax.devices()[0].platform}, not an NVIDIA GPU"
    if capability != "9.0":
        return f"the kernels are for compute capability 9.0, the device has {capability}"
    return ""


@functools.cache
def _say(op: str, reason: str) -> None:
    log.info("%s runs in XLA: %s", op, reason)


def choose(op: str, backend: str, shape_reason: str, *, simulated: bool = False) -> bool:
    """True for Mosaic. "auto" falls back to XLA with one log line that says why.

    Raises ValueError for an unknown backend, and for "mosaic" where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if backend == "xla":
        return False
    reason = shape_reason or ("" if simulated else device_reason())
    if not reason:
        return True
    if backend == "mosaic":
        raise ValueError(f"{op} cannot use backend 'mosaic': {reason}")
    _say(op, reason)
    return False
