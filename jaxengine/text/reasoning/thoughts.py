"""Text with thoughts between <think> and </think> before the answer, cut where these change."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jaxengine.text.tools.base import Event, first_of, held, pieces
from jaxengine.text.tools.calls import Calls, Candidate, Format, Where

BEGIN, END = "<think>", "</think>"
Start = Literal["inside", "maybe", "outside"]
Kind = Literal["thought", "answer", "tag"]

_QUOTES = {"`": "`", '"': '"', "'": "'", "“": "”", "‘": "’"}
_CLOSERS = ("}", "]", "```")  # of calls without tags
_LINE_BEGIN = 64
_MAX_TRIED = 1 << 20  # characters that may be read again after they turned out to be no call


class Piece(NamedTuple):
    kind: Kind  # "tag": a tag, and the blanks that belong to it
    text: str


class Thoughts:
    """Pieces that make up the whole text. What is not certain yet is held back.

    `start`: the thoughts have begun already ("inside"; further <think> are passed over), begin with
    a tag or not at all ("maybe"), or are over ("outside").

    A </think> between quotes or backticks is a part of the thoughts. Thoughts may begin again
    directly behind others.

    With the `form` of calls, thoughts also end where an unmistakable call of one of the request's
    functions begins (then `interrupted`): behind its tag, or, in a format that works without tags,
    as the last thing of the whole text (no </think> comes any more). Between quotes or in a code
    block it is only talked about.
    """

    def __init__(self, start: Start, form: Format | None = None) -> None:
        self.interrupted = False
        self._form = form
        self._state = {"inside": "open", "maybe": "maybe", "outside": "answer"}[start]
        self._buffer = ""
        self._waiting: list[str] = []  # text behind it, the next piece last
        self._final = False
        self._out: list[Piece] = []
        # of the thoughts so far: the last two characters, the beginning of the last line, in a
        # code block or not, and whether the line before opened that
        self._last = ""
        self._line = ""
        self._block = self._opened = False
        self._candidate: Candidate | None = None  # for the text in `_held`
        self._trial: Calls | None = None  # likewise, of what must be the last thing
        self._events: list[Event] = []  # of the trial
        self._tail = ""  # of its text
        self._bare = ""  # what it begins with
        self._held: list[str] = []
        self._plain = 0  # so much of the buffer does not begin a last thing
        self._budget = _MAX_TRIED

    def push(self, text: str) -> list[Piece]:
        if self._state == "answer" and not self._buffer:
            return [Piece("answer", text)] if text else []
        self._waiting += pieces(text)[::-1]
        self._run()
        return self._taken()

    def finish(self) -> list[Piece]:
        """The text has ended."""
        self._final = True
        self._run()
        while self._candidate is not None or self._trial is not None:
            if self._trial is None:
                self._no_call("")
            elif self._is_last(self._trial):
                self._interrupt()
            else:
                self._no_last("")
            self._run()
        left, self._buffer = self._buffer, ""
        if left:
            kind: Kind = "answer" if self._state in ("maybe", "answer") else "thought"
            self._out.append(Piece(kind, left))
        return self._taken()

    def _run(self) -> None:
        final = self._final
        while True:
            self._final = final and not self._waiting
            while self._step():
                continue
            if not self._waiting:
                if self._final == final:
                    return
                continue
            self._buffer += self._waiting.pop()

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return out

    def _give(self, kind: Kind, size: int) -> None:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._plain = max(0, self._plain - size)
        if text:
            self._out.append(Piece(kind, text))
        if kind == "thought" and text:
            first, *others = text.split("\n")
            self._line = (self._line + first)[:_LINE_BEGIN]
            for line in others:
                self._opened = self._line.strip().startswith("```")
                self._block ^= self._opened
                self._line = line[:_LINE_BEGIN]
            self._last = (self._last + text)[-2:]

    @property
    def _quote(self) -> str:
        """The quote that closes the one that opens right here; "" without one."""
        before, last = self._last[:-1], self._last[-1:]
        opens = not before or before.isspace() or before in "([{:=,"
        return _QUOTES.get(last, "") if opens else ""

    def _step(self) -> bool:
        """Go on as far as one state does; False when more text is needed."""
        if self._state == "maybe":
            return self._maybe()
        if self._state == "open":
            return self._open()
        if self._state == "inside":
            return self._inside()
        if self._state == "after":
            return self._after()
        if self._buffer:
            self._give("answer", len(self._buffer))
        return False

    def _blanks(self) -> int:
        return len(self._buffer) - len(self._buffer.lstrip())

    def _maybe(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(BEGIN):
            self._state = "open"
            return True
        if BEGIN.startswith(text) and not self._final:
            return False
        self._state = "answer"
        return bool(text)

    def _open(self) -> bool:
        """Pass over blanks and opening tags."""
        self._give("tag", self._blanks())
        if self._buffer.startswith(BEGIN):
            self._give("tag", len(BEGIN))
            return True
        if BEGIN.startswith(self._buffer) and not self._final:
            return False
        self._state, self._line, self._last = "inside", "", ""
        self._block = self._opened = False
        return True

    def _after(self) -> bool:
        """Behind the thoughts: another closing tag, or more thoughts."""
        blanks = self._blanks()
        text = self._buffer[blanks:]
        if text.startswith((BEGIN, END)):
            self._state = "open" if text.startswith(BEGIN) else "after"
            self._give("tag", blanks + (0 if text.startswith(BEGIN) else len(END)))
            return True
        if not self._final and (BEGIN.startswith(text) or END.startswith(text)):
            return False
        self._state = "answer"
        if not text:
            self._give("tag", blanks)
        self._give("tag", len(self._buffer) - len(self._buffer.lstrip("\n")))
        return True

    def _inside(self) -> bool:
        if self._candidate is not None:
            return self._try_call(self._candidate)
        if self._trial is not None:
            return self._try_last(self._trial)
        marks = self._marks()
        at, mark = first_of(self._buffer, marks)
        if at < 0:
            self._give("thought", len(self._buffer) - held(self._buffer, marks) * (not self._final))
            return False
        self._give("thought", at)
        if mark == END:
            return self._end()
        form = self._form
        assert form is not None
        if mark in form.tags:
            if self._quote or (self._block and self._opened):
                self._give("thought", len(mark))
                return True
            self._candidate = Candidate(form, Where(thoughts=True))
        elif self._plain or self._line.strip():
            self._give("thought", len(mark))
            return True
        else:
            self._trial, self._events, self._tail = Calls(form, thoughts=True), [], ""
            self._bare = mark
        self._held = []
        return True

    def _marks(self) -> tuple[str, ...]:
        form = self._form
        if form is None or self._budget < 0:
            return (END,)
        return (END, *form.tags, *form.last)

    def _end(self) -> bool:
        """At a closing tag."""
        quote = self._quote
        if quote:
            if len(self._buffer) == len(END) and not self._final:
                return False
            if self._buffer.startswith(quote, len(END)):
                self._give("thought", len(END))
                return True
        self._give("tag", len(END))
        self._state = "after"
        return True

    def _try_call(self, candidate: Candidate) -> bool:
        if not self._buffer:
            return False
        self._held.append(self._buffer)
        rest = candidate.feed(self._buffer, [])
        self._buffer = ""
        if candidate.started:
            self._interrupt()
            return True
        if candidate.failed:
            self._no_call(rest)
        return candidate.failed

    def _no_call(self, rest: str) -> None:
        """The tag is a part of the thoughts. What was read is looked at again, but for `rest`."""
        self._buffer, self._candidate = "".join(self._held), None
        self._budget -= len(self._buffer) - len(rest)
        assert self._form is not None
        mark = next(tag for tag in self._form.tags if self._buffer.startswith(tag))
        self._give("thought", len(mark))

    def _try_last(self, trial: Calls) -> bool:
        if not self._buffer:
            return False
        for at, char in enumerate(self._buffer):  # the place where it fails must be exact
            events = trial.feed(char)
            self._events += events
            self._tail = (self._tail + char)[-len(END) :]
            over = self._tail == END and self._bare.startswith("<")
            if over or any(event.kind == "content" for event in events):
                self._held.append(self._buffer[: at + 1])
                self._no_last(self._buffer[at + 1 :])
                return True
        self._held.append(self._buffer)
        self._buffer = ""
        return False

    def _is_last(self, trial: Calls) -> bool:
        kinds = {event.kind for event in self._events + trial.finish()}
        text = "".join(self._held).rstrip()
        closed = END not in text or text.endswith(_CLOSERS)
        return "call" in kinds and "content" not in kinds and closed

    def _no_last(self, behind: str) -> None:
        """What was tried is a part of the thoughts; more text is behind it."""
        tried, self._trial = "".join(self._held), None
        self._buffer = ""
        self._plain = len(tried)
        self._budget -= len(tried)
        self._waiting += [*([behind] if behind else []), *pieces(tried)[::-1]]

    def _interrupt(self) -> None:
        self._buffer = "".join(self._held)
        self._candidate = self._trial = None
        self._state, self.interrupted = "answer", True
        self._give("answer", len(self._buffer))
