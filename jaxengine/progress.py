"""Progress bars of long steps: what is done, and why it is waited for.

A bar is drawn only on a terminal, and not with `--log-level warning` (or JAXENGINE_PROGRESS=off,
which processes started from this one inherit). Log lines that come meanwhile stand above the bar.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

_VARIABLE = "JAXENGINE_PROGRESS"

# Its default is a semaphore between processes, which a killed one leaves behind.
tqdm.set_lock(threading.RLock())


def quiet_below(log_level: str) -> None:
    """No bars where the user wants warnings only, in this process and those it starts."""
    if log_level in ("warning", "error"):
        os.environ.setdefault(_VARIABLE, "off")


def shown() -> bool:
    """True when bars are drawn."""
    return os.environ.get(_VARIABLE, "on") != "off" and sys.stderr.isatty()


@contextlib.contextmanager
def progress_bar(
    what: str, total: int | None, unit: str, *, why: str = "", show: bool = True
) -> Iterator[Any]:
    """A bar to `update()`; `why` is said behind `what`. `show` False: none, wherever it runs."""
    title = f"{what} ({why})" if why else what
    drawn = show and shown()
    with contextlib.ExitStack() as stack:
        bar: Any = tqdm(desc=title, total=total, unit=unit, disable=not drawn, dynamic_ncols=True)
        stack.callback(bar.close)
        if drawn:
            stack.enter_context(logging_redirect_tqdm())
        yield bar
