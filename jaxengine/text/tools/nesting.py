"""Where a JSON value ends, told character by character."""

from __future__ import annotations


class Nesting:
    """Inside of a string or container that began with the character `first`, if there is one."""

    def __init__(self, first: str) -> None:
        self.in_string = first == '"'
        self._escaped = False
        self._depth = 1 if first and first in "{[" else 0

    def take(self, char: str) -> bool:
        """Whether the value goes on after this character."""
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = False
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return self.in_string or self._depth > 0
