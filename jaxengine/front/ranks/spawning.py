"""Around an engine process: the environment it inherits, and what its last words were."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator, Mapping

from jaxengine.wire import frames as wire


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


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """While a process is spawned: it does not import this program's main module. Nothing that it
    runs is defined there, the command line's imports would take half a second, and scripts need
    no `if __name__ == "__main__"`."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def error_class(failure: wire.EngineFailure) -> str:
    """The class of the exception: the last line of a traceback starts with it."""
    lines = failure.traceback.strip().splitlines() or [""]
    name = lines[-1].split(":")[0].strip().rsplit(".", 1)[-1]
    return name if name.isidentifier() else "EngineError"
