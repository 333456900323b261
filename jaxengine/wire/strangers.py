"""Messages from a peer that is not of the group: they change nothing, and one line a minute says
so, whatever comes."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

_EVERY = 60.0  # seconds between lines
_LONGEST_SHOWN = 60  # bytes of a name


class Strangers:
    """Counts what one socket ignores. One thread uses it."""

    def __init__(self, where: str) -> None:
        """`where`: what the socket is for, in the log."""
        self._where = where
        self._count = 0  # since the last line
        self._told = -_EVERY
        self.num_ignored = 0

    def ignore(self, name: bytes, why: str) -> None:
        """Take note of one message. `name` is the peer's own word."""
        self.num_ignored += 1
        self._count += 1
        if time.monotonic() - self._told < _EVERY:
            return
        log.warning(
            "%s: %d message(s) ignored, the last from %s: %s",
            self._where, self._count, shown(name), why,
        )  # fmt: skip
        self._told, self._count = time.monotonic(), 0


def shown(name: bytes) -> str:
    """A peer's name for the log: nothing in it reaches a terminal as it is."""
    return repr(name[:_LONGEST_SHOWN])[1:] + ("..." if len(name) > _LONGEST_SHOWN else "")
