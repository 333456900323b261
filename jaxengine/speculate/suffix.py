"""A suffix trie with counts: what followed the last tokens before, and how often.

Suffix decoding (Oliaro et al., 2024) drafts the likeliest continuations of the longest suffix of
a text that occurred before. A path is expanded only as far as it was seen twice: below that it is
a pointer into the text. So a token costs one step for every suffix that is being repeated, at
most `depth`, and new text costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_BREAK = -1  # between two texts


class Node:
    """A token sequence that occurred at least twice. A child is a node, or the index in the text
    at which the only occurrence of that longer sequence goes on."""

    __slots__ = ("count", "children")

    def __init__(self, count: int) -> None:
        self.count = count
        self.children: dict[int, Node | int] = {}


Place = Node | int


@dataclass(frozen=True)
class Drafts:
    """`score` is the expected number of drafts that are right, if the text goes on as before."""

    tokens: list[int]
    score: float
    match: int  # tokens of the suffix that was found

    def __bool__(self) -> bool:
        return bool(self.tokens)


NOTHING = Drafts([], 0.0, 0)


class CountTrie:
    """Counts of all token sequences up to `depth` tokens of a growing text."""

    def __init__(self, depth: int) -> None:
        if depth < 2:
            raise ValueError(f"depth must be at least 2, got {depth}")
        self.depth = depth
        self.text: list[int] = []
        self._root = Node(0)
        # Nodes of the text's suffixes that occurred before, the longest first, of depths
        # len(_active) .. 1; those that could not have children are left out.
        self._active: list[Node] = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. Amortised time: one step a token and repeated suffix."""
        text, limit, root = self.text, self.depth, self._root
        active = self._active
        for token in tokens:
            text.append(token)
            here = len(text)  # where the text goes on
            depth = len(active) + 1  # of the child that is looked at
            repeated: list[Node] = []
            active.append(root)
            for node in active:
                child = node.children.get(token)
                if child is None:
                    node.children[token] = here
                elif type(child) is int:
                    follower = text[child]  # of the earlier occurrence
                    found = Node(2)
                    if depth < limit and follower != _BREAK:
                        found.children[follower] = child + 1
                    node.children[token] = found
                    repeated.append(found)
                else:
                    assert isinstance(child, Node)
                    child.count += 1
                    repeated.append(child)
                depth -= 1
            active = repeated[1:] if len(repeated) >= limit else repeated
        self._active = active

    def end_text(self) -> None:
        """What comes next is another text."""
        self.text.append(_BREAK)
        self._active = []

    def longest(self, room: int) -> tuple[Place | None, int]:
        """The longest suffix of this text that occurred before, and its length, at most
        depth - room."""
        length = min(len(self._active), self.depth - room)
        return (self._active[-length], length) if length > 0 else (None, 0)

    def find(self, recent: list[int], room: int) -> tuple[Place | None, int]:
        """The same for the suffixes of `recent`, another text's last tokens. If one is here, all
        shorter ones are: the length is found by bisection."""
        low, high = 0, min(len(recent), self.depth - room)
        best: Place | None = None
        while low < high:
            middle = (low + high + 1) // 2
            place = self._descend(recent, len(recent) - middle)
            if place is None:
                high = middle - 1
            else:
                best, low = place, middle
        return best, low

    def _descend(self, tokens: list[int], start: int) -> Place | None:
        """The place of tokens[start:]; None when it is not here, or nothing followed it."""
        place: Place = self._root
        text = self.text
        for i in range(start, len(tokens)):
            token = tokens[i]
            if isinstance(place, int):
                if place >= len(text) or text[place] != token:
                    return None
                place += 1
            else:
                child = place.children.get(token)
                if child is None:
                    return None
                place = child
        if isinstance(place, int):
            return place if place < len(text) and text[place] != _BREAK else None
        return place if place.children else None

    def follow(self, place: Place, match: int, k: int, min_prob: float) -> Drafts:
        """Up to k tokens from a place on, each the commonest one (of equals, the one that was
        there first), while all of them together have at least `min_prob`."""
        tokens: list[int] = []
        prob, score = 1.0, 0.0
        text = self.text
        while len(tokens) < k:
            if isinstance(place, int):
                # one occurrence: its text is certain
                end = min(place + k - len(tokens), len(text))
                for token in text[place:end]:
                    if token == _BREAK:
                        break
                    tokens.append(token)
                    score += prob
                break
            best, count, total = -1, 0, 0
            after: Place = place
            for token, child in place.children.items():
                times = child.count if isinstance(child, Node) else 1
                total += times
                if times > count:
                    best, count, after = token, times, child
            if not count:
                break
            prob *= count / total
            if prob < min_prob:
                break
            tokens.append(best)
            score += prob
            place = after
        return Drafts(tokens, score, match)
