"""Reasoning between <think> and </think>, before the answer."""

from __future__ import annotations

from jaxengine.text.reasoning.thoughts import BEGIN, END, Start, Thoughts
from jaxengine.text.tools.base import Event, Parser, held
from jaxengine.text.tools.calls import Calls

__all__ = ["BEGIN", "END", "Start", "Think"]


class Think:
    """What follows the reasoning goes to `rest`. Blanks around the tags are left out. For `start`
    and for where reasoning ends see `Thoughts`.

    Where a call interrupts the reasoning, `rest` reads on from there. If the closing tag comes
    later after all, the text between is reasoning; without it, that text is content.
    """

    def __init__(self, start: Start, rest: Parser) -> None:
        self._thoughts = Thoughts(start, rest.form if isinstance(rest, Calls) else None)
        self._rest = rest
        self._blanks = ""
        self._fresh = True  # nothing of these thoughts was given out
        self._any = False  # something of other ones was
        self._held: list[str] | None = []  # content since an interruption; None: thoughts are over
        self._tail = ""  # its end, where a closing tag may begin
        self._trim = False  # line breaks behind the closing tag are still to be left out

    def feed(self, text: str) -> list[Event]:
        out: list[Event] = []
        for kind, piece in self._thoughts.push(text):
            self._take(kind, piece, out)
        return out

    def finish(self) -> list[Event]:
        out: list[Event] = []
        for kind, piece in self._thoughts.finish():
            self._take(kind, piece, out)
        self._answer(self._rest.finish(), out)
        self._release("content", out)
        return out

    def _take(self, kind: str, text: str, out: list[Event]) -> None:
        if kind == "thought":
            self._reasoning(text, out)
        elif kind == "answer":
            self._answer(self._rest.feed(text), out)
        else:
            self._blanks, self._fresh = "", True

    def _reasoning(self, text: str, out: list[Event]) -> None:
        text = self._blanks + text
        if self._fresh:
            text = text.lstrip()
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if kept:
            lead = "\n" if self._fresh and self._any else ""
            self._fresh, self._any = False, True
            out.append(Event("reasoning", lead + kept))

    def _answer(self, events: list[Event], out: list[Event]) -> None:
        if not self._thoughts.interrupted:
            out += events
            return
        for event in events:
            if event.kind == "content":
                self._after_call(event.text, out)
                continue
            if event.kind == "call":
                self._release("content", out)
            out.append(event)

    def _after_call(self, text: str, out: list[Event]) -> None:
        """Content behind a call that interrupted the reasoning."""
        if self._held is not None:
            seen = self._tail + text
            at = seen.find(END)
            if at < 0:
                keep = held(seen, (END,))
                self._held.append(seen[: len(seen) - keep])
                self._tail = seen[len(seen) - keep :]
                return
            self._held.append(seen[:at])
            self._tail = ""
            self._fresh = True
            self._release("reasoning", out)
            self._held, self._trim = None, True
            text = seen[at + len(END) :]
        if self._trim:
            text = text.lstrip("\n")
        if text:
            self._trim = False
            out.append(Event("content", text))

    def _release(self, kind: str, out: list[Event]) -> None:
        if self._held is None:
            return
        text = "".join(self._held) + self._tail
        self._held, self._tail = [], ""
        if kind == "reasoning":
            self._reasoning(text, out)
        elif text:
            out.append(Event("content", text))
