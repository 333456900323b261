"""The setting `inject_faults`: which step fails on purpose, and how."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import msgspec

from jaxengine.config import EngineConfig


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One planned fault: `times` in a row, beginning with the `step`-th step (or reset) since the
    engine started. `where`: in the worker that owns the device, or in the engine itself."""

    kind: Literal["raise", "oom", "hang", "kill", "exit", "slow"]
    step: int
    rank: int = 0
    times: int = 1
    where: Literal["worker", "engine"] = "worker"
    during: Literal["step", "reset"] = "step"
    seconds: float = 1.0  # of slow


def parse_faults(text: str | None) -> list[Fault]:
    """Raises ValueError that names the setting and what is wrong with it."""
    if text is None:
        return []
    try:
        faults = msgspec.json.decode(text, type=list[Fault])
    except msgspec.MsgspecError as error:
        raise ValueError(f"inject_faults: {error}") from None
    for fault in faults:
        if fault.step < 1 or fault.times < 1 or fault.seconds < 0:
            raise ValueError("inject_faults: step and times must be at least 1, seconds at least 0")
    return faults


def for_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """The configuration with only this rank's planned faults."""
    if config.fault.inject_faults is None:
        return config
    mine = [fault for fault in parse_faults(config.fault.inject_faults) if fault.rank == rank]
    text = msgspec.json.encode(mine).decode() if mine else None
    return replace(config, fault=replace(config.fault, inject_faults=text))
