"""What clients ask of an engine core beside requests: its cache, pauses, sleep, profiles.

The functions work on the core's own books; its loop's thread calls them, between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxengine.sched.block_map import SHARED, block_states
from jaxengine.wire.messages import EngineOutput

if TYPE_CHECKING:
    from jaxengine.engine.core import EngineCore


def control(core: EngineCore, method: str, args: list[Any]) -> Any:
    """Carry out a named call. Raises ValueError for an unknown name, and what the call raises."""
    scheduler, profiler = core.scheduler, core._profiler
    calls: dict[str, Callable[..., Any]] = {
        "reset_prefix_cache": lambda *args: reset_prefix_cache(core, *args),
        "kv_blocks": lambda: kv_blocks(core),
        "check_integrity": scheduler.check_integrity,
        "pause": lambda *args: pause(core, *args),
        "resume": lambda: resume(core),
        "is_paused": lambda: scheduler.is_paused,
        "sleep": lambda *args: sleep(core, *args),
        "wake_up": lambda *args: wake_up(core, *args),
        "is_sleeping": lambda: bool(core._asleep),
        "wait_warm": core.executor.wait_warm,
        "start_profile": profiler.start,
        "stop_profile": profiler.stop,
    }
    if method not in calls:
        raise ValueError(f"unknown call {method!r}")
    return calls[method](*args)


def kv_blocks(core: EngineCore) -> dict[str, int]:
    """How many KV blocks there are, are used by requests, and are free but can be hit."""
    pools = [block_states(shard.state.kv.pool) for shard in core._shards]
    counts = sum(np.bincount(states, minlength=SHARED + 1) for states in pools)
    _, cached, owned, shared = np.asarray(counts).tolist()
    return {"total": sum(map(len, pools)), "used": owned + shared, "cached": cached}


def reset_prefix_cache(core: EngineCore, reset_running: bool = False) -> bool:
    """Forget cached prefixes; with `reset_running` running requests start over for it."""
    done = core.scheduler.reset_prefix_cache(reset_running)
    core._publish_events()
    return done


def pause(core: EngineCore, mode: str = "wait") -> None:
    """abort: running requests end now; wait: they finish first; keep: they stand still."""
    for request in core.scheduler.pause(mode):
        core._collected.drop(request.request_id)
        core._outputs.append(EngineOutput(request.request_id, [], finish_reason="abort"))


def resume(core: EngineCore) -> None:
    """Undo a pause. A sleeping engine has nothing to run with: it goes on at `wake_up`."""
    if not core._asleep:
        core.scheduler.resume()


def sleep(core: EngineCore, level: int = 1, mode: str = "abort") -> None:
    """Give the device's memory back. What runs is ended ("abort"), or goes on after `wake_up` from
    the beginning of its KV ("keep"). Raises ValueError for the level or the mode."""
    if level not in (1, 2):
        raise ValueError(f"sleep level must be 1 or 2, got {level}")
    if mode not in ("abort", "keep"):
        raise ValueError(f"sleep mode must be abort or keep, got {mode!r}")
    if core.lockstep is not None:
        raise ValueError("ranks that share experts cannot sleep")
    if core._asleep:
        return
    pause(core, mode)
    while core._inflight:  # nothing may use the memory that goes
        core._outputs += core._finish_oldest(time.perf_counter())
    core._transfers.settle()
    reset_prefix_cache(core, reset_running=True)
    core.executor.sleep(level)
    core._sleep_level, core._asleep = level, frozenset(PARTS)


PARTS = ("weights", "kv_cache")  # what can be woken alone


def wake_up(core: EngineCore, tags: list[str] | None = None) -> bool:
    """Bring weights and pool back, or those that `tags` name, and go on with what is queued once
    both are there. Returns whether they are. Raises ValueError for another tag."""
    wanted = frozenset(PARTS if tags is None else tags)
    unknown = sorted(wanted - set(PARTS))
    if unknown:
        raise ValueError(f"tags must be among {', '.join(PARTS)}, got {unknown[0]!r}")
    woken = wanted & core._asleep
    if woken:
        core.executor.wake_up("weights" in woken, "kv_cache" in woken)
        core._asleep -= woken
    if core._asleep:
        return False
    core._sleep_level = 0
    core.scheduler.resume()
    return True
