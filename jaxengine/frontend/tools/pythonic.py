"""pythonic: [f(a=1, b="x"), g()], a Python list of calls with literal arguments."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection
from typing import Any

from jaxengine.frontend.tools.base import Event, Parser
from jaxengine.frontend.tools.leading import LeadingCalls

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_WORDS = {"true": True, "false": False, "null": None}  # JSON's, which models mix in


def pythonic(names: Collection[str]) -> Parser:
    """`names` of the request's functions; a list that begins with anything else is plain text."""
    return LeadingCalls("[", lambda: PythonCalls(names))


class PythonCalls:
    """An argument is passed on once it is complete."""

    def __init__(self, names: Collection[str]) -> None:
        self.started = False
        self.done = False
        self.failed = False
        self._names = names
        self._buffer = ""
        self._state = "open"
        self._count = 0  # arguments of this call
        self._scanned = 0  # characters of the buffer whose nesting is known
        self._nest: list[str] = []
        self._quote = ""

    def feed(self, text: str, out: list[Event]) -> str:
        self._buffer += text
        while not (self.done or self.failed) and self._step(out):
            continue
        return self._buffer if self.done or self.failed else ""

    def _step(self, out: list[Event]) -> bool:
        if self._state == "argument":
            return self._argument(out)
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        char = self._buffer[0]
        if self._state == "open":
            self._state = "first"  # the bracket; LeadingCalls saw it
        elif self._state == "next" and char == ",":
            self._state = "again"
        elif self._state == "next" and char == "]":
            self.done = True
        elif self._state in ("first", "again"):
            return self._call(out)
        else:
            self.failed = True
            return False
        self._buffer = self._buffer[1:]
        return not self.done

    def _call(self, out: list[Event]) -> bool:
        match = _NAME.match(self._buffer)
        if match is None:
            self.failed = True
            return False
        rest = self._buffer[match.end() :].lstrip()
        if not rest:
            return False
        if rest[0] != "(" or match.group() not in self._names:
            self.failed = True
            return False
        out.append(Event("call", match.group()))
        self.started = True
        self._buffer, self._state = rest[1:], "argument"
        self._count = self._scanned = 0
        return True

    def _argument(self, out: list[Event]) -> bool:
        end = self._end_of_argument()
        if end < 0:
            return False
        text, closing = self._buffer[:end].strip(), self._buffer[end]
        self._buffer, self._scanned = self._buffer[end + 1 :], 0
        if text:
            pair = _pair(text)
            if pair is None:
                out.append(Event("arguments", "}" if self._count else "{}"))
                self.failed = True
                return False
            lead = ", " if self._count else "{"
            key, value = pair
            out.append(Event("arguments", f"{lead}{json.dumps(key)}: {value}"))
            self._count += 1
        if closing == ")":
            out.append(Event("arguments", "}" if self._count else "{}"))
            self._state = "next"
        return True

    def _end_of_argument(self) -> int:
        """Where the comma or parenthesis behind this argument is; -1 when it is not there yet."""
        text = self._buffer
        at = self._scanned
        while at < len(text):
            char = text[at]
            if self._quote:
                if char == "\\":
                    if at + 1 == len(text):
                        break  # what is escaped is not here yet
                    at += 1
                elif char == self._quote:
                    self._quote = ""
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._nest.append(char)
            elif self._nest and char in ")]}":
                self._nest.pop()
            elif char in ",)" and not self._nest:
                return at
            at += 1
        self._scanned = at
        return -1


def _pair(text: str) -> tuple[str, str] | None:
    """Name and JSON text of one keyword argument; None if it is none."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key.isidentifier():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes; they are kept as they are
            tree = ast.parse(value.strip(), mode="eval")
        literal = _literal(tree.body)
        return key, json.dumps(literal, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """Raises ValueError for what is no literal."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("a dictionary is unpacked")
        return {
            str(_literal(key)): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)
