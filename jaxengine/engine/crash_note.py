"""A note of the last crash of an engine, for `jaxengine doctor --report`: where it happened, and
never the exception's message, which may hold what users sent."""

from __future__ import annotations

import logging
import time
import traceback
from pathlib import Path

import jaxengine
from jaxengine import platform

log = logging.getLogger(__name__)


def crash_file() -> Path:
    """The note's place, next to the compilation cache's default folder."""
    folder = platform.cache_dir(None)
    assert folder is not None  # only a setting switches it off
    return folder.parent / "last-crash.txt"


def note_crash(error: BaseException, where: str) -> None:
    """Write the class of `error` and its stack. A disk that takes nothing is only logged."""
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        at = "/".join(path.parts[-3:])  # not whose machine it is
        frames.append(f"  {at}:{frame.lineno} in {frame.name}")
    stamp = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    lines = [f"{stamp}, jaxengine {jaxengine.__version__}, {where}: {type(error).__name__}"]
    try:
        crash_file().parent.mkdir(parents=True, exist_ok=True)
        crash_file().write_text("\n".join(lines + frames) + "\n", encoding="utf-8")
    except OSError as failed:
        log.debug("the crash could not be noted: %s", failed)
