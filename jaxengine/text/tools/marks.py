"""Marks that models put around calls: tags and special tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Marks:
    """What may stand behind a call or begin the next one. `restart`: one that even inside of an
    open string can only be the next call, since its quotes are not escaped."""

    texts: tuple[str, ...] = ()
    restart: re.Pattern[str] | None = None

    def restarts(self, text: str, at: int, final: bool, window: int) -> bool | None:
        """Whether the mark there is such a one, by so many characters from it on at most."""
        if self.restart is None:
            return False
        seen = text[at : at + window]
        if self.restart.match(seen):
            return True
        behind = seen
        for mark in self.texts:
            behind = behind.replace(mark, "")
        behind = behind.lstrip()
        if behind and behind[0] not in "{[<" and not behind[0].isalnum():
            return False
        return False if final or len(seen) == window else None

    @cached_property
    def first(self) -> str:
        """The characters that one may begin with."""
        return "".join(sorted({mark[0] for mark in self.texts}))

    def at(self, text: str, at: int, final: bool) -> str | None:
        """The mark that stands there; "" for none, None when that is not known yet."""
        for mark in self.texts:
            if text.startswith(mark, at):
                return mark
        tail = text[at:] if len(text) - at < 64 else ""
        if tail and not final and any(mark.startswith(tail) for mark in self.texts):
            return None
        return ""


NO_MARKS = Marks()
