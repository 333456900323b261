"""How long another process has owed a sign of life. No clock and no socket in here.

Time is counted in looks, one every `TICK` seconds by a task of this process's event loop, and a
look counts as `TICK` however late it comes. So time in which this process stood still itself, or
its loop was busy, is never held against the other one.
"""

from __future__ import annotations

from collections.abc import Callable

TICK = 1.0  # seconds between looks
SILENT = "EngineSilent"  # what a rank's status calls it


class Silence:
    """Of one process, which is asked for a sign of life again and again. Any word will do."""

    def __init__(self) -> None:
        self._asked = False
        self.seconds = 0.0  # since it was asked, without a word

    def heard(self) -> None:
        """It said something."""
        self._asked, self.seconds = False, 0.0

    def look(self, ask: Callable[[], object]) -> float:
        """Asks, unless an answer is owed already; for how long one has been owed by now."""
        if self._asked:
            self.seconds += TICK
        else:
            self._asked = True
            ask()
        return self.seconds
