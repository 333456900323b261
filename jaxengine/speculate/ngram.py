"""Prompt lookup (Saxena 2023): what followed the last few tokens when they occurred before.

The longest n-gram counts, of equal ones the earliest occurrence. `verify.propose` does the same
on the device, where the newest tokens are known first.
"""

from __future__ import annotations

from jaxengine.sched.plan import Int32

Gram = tuple[int, ...]


class _Index:
    """Where every n-gram of a growing sequence first ended, by n."""

    def __init__(self, low: int, high: int) -> None:
        self._sizes = range(high, low - 1, -1)
        self._first: list[dict[Gram, int]] = [{} for _ in self._sizes]
        self._tail: list[int] = []  # the last tokens, up to the longest n-gram
        self._high = high
        self.length = 0

    def extend(self, tokens: Int32) -> None:
        """`tokens` is the whole sequence; what lies beyond `length` is new."""
        for token in tokens[self.length :].tolist():
            # An n-gram is entered once a token follows it: it can be looked up from then on.
            for size, first in zip(self._sizes, self._first, strict=True):
                if len(self._tail) >= size:
                    first.setdefault(tuple(self._tail[-size:]), self.length)
            self._tail = [*self._tail[1 - self._high :], token] if self._high > 1 else [token]
            self.length += 1

    def find(self) -> int | None:
        """Where the sequence goes on after the best earlier occurrence of its end."""
        for size, first in zip(self._sizes, self._first, strict=True):
            if len(self._tail) >= size:
                at = first.get(tuple(self._tail[-size:]))
                if at is not None:
                    return at
        return None


class NgramProposer:
    """n-gram drafts of any number of requests; time per new token, not per length."""

    def __init__(self, low: int, high: int) -> None:
        """n-grams of `low` to `high` tokens."""
        self._low, self._high = low, high
        self._indexes: dict[str, _Index] = {}

    def propose(self, request_id: str, tokens: Int32, k: int) -> list[int]:
        """See `Proposer`."""
        index = self._indexes.get(request_id)
        if index is None or index.length > len(tokens):
            index = self._indexes[request_id] = _Index(self._low, self._high)
        index.extend(tokens)
        at = index.find()
        if at is None:
            return []
        found: list[int] = tokens[at : at + k].tolist()
        return found

    def forget(self, request_id: str) -> None:
        """See `Proposer`."""
        self._indexes.pop(request_id, None)
