"""Stop strings over streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Finds the earliest-completing stop string and holds back text that may be part of one.

    Of several that complete at the same character the one that starts first wins. The result
    does not depend on how the text is cut into pieces. The last `max(len(stop)) - 1` characters
    are held back until `flush`, none with `include` (the match is then part of the output).
    """

    __slots__ = ("_held", "_hold", "_include", "_reach", "_stops", "_tail")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._reach = max(map(len, stops)) - 1
        self._hold = 0 if include else self._reach
        self._tail = ""  # the last `_reach` characters, where a match may begin
        self._held = 0  # how many of them are not given out yet

    def push(self, text: str, *, search: bool = True) -> tuple[str, str | None]:
        """Add text; returns (text to give out, the stop string that matched or None).

        After a match nothing more may be pushed. `search=False` (below min_tokens) gives the text
        out unsearched, and no later match begins inside it.
        """
        if not search:
            released = self.flush() + text
            self._tail = ""
            return released, None
        if not text:
            return "", None
        window = self._tail + text
        given = len(self._tail) - self._held
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop)
            if start >= 0:
                match = (start + len(stop), start, stop)
                best = match if best is None or match < best else best
        if best is not None:
            end, start, stop = best
            self._held = 0
            return window[given : end if self._include else start], stop
        self._tail = window[-self._reach :] if self._reach else ""
        self._held = min(len(self._tail), self._hold)
        return window[given : len(window) - self._held], None

    def flush(self) -> str:
        """The text held back."""
        held = self._tail[len(self._tail) - self._held :]
        self._held = 0
        return held
