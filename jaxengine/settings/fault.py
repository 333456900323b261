"""The settings inside `fault_tolerance_config`."""

from __future__ import annotations

from typing import Literal

import msgspec

from jaxengine.config import FaultConfig

STEP_TIMEOUT = 60.0  # seconds a step may take when its programs are compiled
COMPILE_TIMEOUT = 300.0  # ... and when one of them is still compiling
LEAST_SILENCE = 3.0  # a process says something every second; a busy machine may be late


class FaultSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`auto_recover`: never waits for an order; retry resets a worker that lives; respawn does so
    too, and replaces one that does not (or that a retry did not help)."""

    engine_recovery_timeout_sec: float = 120.0
    auto_recover: Literal["never", "retry", "respawn"] = "never"
    step_timeout_sec: float = STEP_TIMEOUT

    @property
    def compile_timeout_sec(self) -> float:
        return max(self.step_timeout_sec, COMPILE_TIMEOUT)

    @property
    def silence_sec(self) -> float:
        """A worker that is heard of no more for so long is stopped, even if it should compile; so
        is an engine process, which holds no device then."""
        return max(self.step_timeout_sec, LEAST_SILENCE)


def fault_settings(config: FaultConfig) -> FaultSettings:
    """Raises ValueError that names the setting and what is wrong with it."""
    given = config.fault_tolerance_config
    if given is None:
        return FaultSettings()
    try:
        if isinstance(given, str):
            settings = msgspec.json.decode(given, type=FaultSettings)
        else:
            settings = msgspec.convert(given, FaultSettings)
    except msgspec.MsgspecError as error:
        raise ValueError(f"fault_tolerance_config: {error}") from None
    for name in ("engine_recovery_timeout_sec", "step_timeout_sec"):
        if not getattr(settings, name) > 0:
            raise ValueError(f"fault_tolerance_config: {name} must be more than 0")
    return settings


def silence_limit(config: FaultConfig) -> float:
    """Seconds after which a process that answers nothing is given up. Without fault tolerance the
    engine owns the device: few calls of its runtime hold the interpreter for long, but some may."""
    settings = fault_settings(config)
    if config.enable_fault_tolerance:
        return settings.silence_sec
    return settings.compile_timeout_sec
