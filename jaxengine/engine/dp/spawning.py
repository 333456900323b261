"""Around an engine process: the environment it inherits, and what its last words were."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from jaxengine.engine import wire


@contextlib.contextmanager
def spawn_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set while a process is spawned, which inherits it. (Not for long: it is this process's.)"""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def error_class(failure: wire.EngineFailure) -> str:
    """The class of the exception: the last line of a traceback starts with it."""
    lines = failure.traceback.strip().splitlines() or [""]
    name = lines[-1].split(":")[0].strip().rsplit(".", 1)[-1]
    return name if name.isidentifier() else "EngineError"
