"""Standing in a core's calls for a while: how benches, the simulator and tests see every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


@contextmanager
def tapped(target: Any, **calls: Callable[..., Any]) -> Iterator[None]:
    """Until the end of the block `target.NAME(...)` is `calls[NAME](the method, ...)`.

    The executor's `submit` and `result` are the two ends of a step, the scheduler's `schedule` its
    beginning. Costs nothing outside of the block. Raises AttributeError for an unknown name.
    """
    before = {name: getattr(target, name) for name in calls}
    for name, call in calls.items():
        setattr(target, name, partial(call, before[name]))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(target, name, method)
