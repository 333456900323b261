"""What clients ask of an engine core beside requests: its cache, pauses, sleep, profiles.

The functions work on the core's own books; its loop's thread calls them, between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxengine.engine.messages import EngineOutput
from jaxengine.sched.block_map import SHARED, block_states

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
        "wake_up": lambda: wake_up(core),
        "is_sleeping": lambda: core._sleep_level > 0,
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
    if not core._sleep_level:
        core.scheduler.resume()


def sleep(core: EngineCore, level: int = 1) -> None:
    """Abort what runs and give the device's memory back. Raises ValueError for the level."""
    if level not in (1, 2):
        raise ValueError(f"sleep level must be 1 or 2, got {level}")
    if core.lockstep is not None:
        raise ValueError("ranks that share experts cannot sleep")
    if core._sleep_level:
        return
    pause(core, "abort")
    while core._inflight:  # nothing may use the memory that goes
        core._outputs += core._finish_oldest(time.perf_counter())
    core._transfers.settle()
    core.scheduler.reset_prefix_cache()
    core.executor.sleep(level)
    core._sleep_level = level


def wake_up(core: EngineCore) -> None:
    """Bring weights and pool back, and go on with what is queued."""
    if core._sleep_level:
        core.executor.wake_up()
        core._sleep_level = 0
    core.scheduler.resume()
