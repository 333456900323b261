"""The end of a thought is forced where its budget is spent, and nowhere else."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from jaxengine.sampling_params import ThinkingBudget
from jaxengine.structured.matcher import fill_draft_bitmasks
from jaxengine.structured.thinking import ThoughtLimit

# A token a word; "</" + "thi" + "nk>" spell the end too.
WORDS = [
    "<think>",
    "</think>",
    "a",
    "b",
    "</",
    "thi",
    "nk>",
    "\n",
    "<thi",
    "|m|",
    "|e|",
    "|s|",
    "|c|",
]
WORDS += ["analysis", "final", "commentary", "to=functions.f"]
ID = {word: i for i, word in enumerate(WORDS)}
EVERY = np.int32((1 << len(WORDS)) - 1)


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def ids(*words: str) -> list[int]:
    return [ID[word] for word in words]


def limit(tokens: int, inside: bool = True, end: tuple[str, ...] = ("</think>",)) -> ThoughtLimit:
    budget = ThinkingBudget(tokens, inside, ids("<think>"), ids(*end), "<think>", "</think>")
    return ThoughtLimit(budget, decode)


def forced(thought: ThoughtLimit) -> str | None:
    """The one word that may come next; None when all may."""
    row = np.zeros(1, np.int32)
    thought.fill_bitmask(row)
    legal = [word for word, i in ID.items() if int(row[0]) >> i & 1]
    return legal[0] if len(legal) == 1 else None


def said(thought: ThoughtLimit, *words: str) -> ThoughtLimit:
    assert thought.ready and thought.accept(ids(*words))
    return thought


def test_the_end_comes_after_the_budget() -> None:
    thought = limit(3)
    assert thought.first == 3 and thought.failure is None and not thought.terminated
    for word in ("a", "b", "a"):
        assert forced(thought) is None
        said(thought, word)
    assert forced(thought) == "</think>" and not thought.over
    said(thought, "</think>")
    assert thought.over and forced(thought) is None


def test_nothing_is_forced_when_the_thought_ends_by_itself() -> None:
    thought = said(limit(5), "a", "</think>")
    assert thought.over
    assert forced(said(thought, *["b"] * 9)) is None


def test_a_budget_of_nothing() -> None:
    assert forced(limit(0)) == "</think>"
    assert forced(limit(0, inside=False)) is None
    assert forced(said(limit(0, inside=False), "<think>")) == "</think>"


@pytest.mark.parametrize("opening", [["<think>"], ["\n", "<think>"], ["<thi", "nk>"]])
def test_an_answer_that_may_think(opening: list[str]) -> None:
    thought = said(limit(2, inside=False), *opening)
    assert not thought.over and forced(thought) is None
    assert forced(said(thought, "a", "b")) == "</think>"


def test_an_answer_that_does_not_think() -> None:
    assert said(limit(2, inside=False), "a").over


def test_an_end_of_several_tokens() -> None:
    thought = said(limit(2, end=("</", "thi", "nk>")), "a", "b")
    for word in ("</", "thi", "nk>"):
        assert forced(thought) == word and not thought.over
        assert not thought.accept(ids("a"))
        said(thought, word)
    assert thought.over


def test_an_end_that_had_begun_is_completed() -> None:
    thought = said(limit(3, end=("</", "thi", "nk>")), "a", "</", "thi")
    assert forced(thought) == "nk>"
    assert said(thought, "nk>").over
    other = said(limit(9, end=("</", "thi", "nk>")), "a", "</", "thi", "nk>")
    assert other.over
    spelled = said(limit(9, end=("</", "thi", "nk>")), "a", "</think>")
    assert spelled.over


def test_undoing_and_looking_ahead() -> None:
    """Any walk with steps back is in the state of the walk alone."""
    rng = random.Random(3)
    words = ["a", "b", "</", "thi", "nk>", "</think>"]
    for _ in range(200):
        tokens = rng.randrange(5)
        thought = limit(tokens, end=("</", "thi", "nk>"))
        walk: list[str] = []
        for _ in range(12):
            word = forced(thought) or rng.choice(words)
            assert thought.validate(ids(word)) == 1
            said(thought, word)
            walk.append(word)
            if rng.random() < 0.3:
                back = rng.randint(0, len(walk))
                thought.rollback(back)
                del walk[len(walk) - back :]
        fresh = said(limit(tokens, end=("</", "thi", "nk>")), *walk)
        assert (fresh.over, forced(fresh)) == (thought.over, forced(thought))
    with pytest.raises(ValueError, match="cannot undo"):
        thought.rollback(99)


def test_drafts_are_held_to_it() -> None:
    thought = said(limit(2), "a")
    drafts = ids("b", "</think>", "a")
    assert thought.validate(drafts) == 3
    assert thought.validate(ids("b", "b", "a")) == 1
    out = np.zeros((4, 1), np.int32)
    assert fill_draft_bitmasks(thought, ids("b", "b", "a"), out) == 1
    assert out[1:, 0].tolist() == [1 << ID["</think>"]] * 3 and out[0, 0] == -1
    assert forced(thought) is None


class Inner:
    """Allows "a" and the end of a thought."""

    ready, terminated, over = True, False, False

    def __init__(self) -> None:
        self.seen: list[int] = []

    def accept(self, token_ids: Sequence[int]) -> bool:
        self.seen += token_ids
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        del self.seen[len(self.seen) - num_tokens :]

    def fill_bitmask(self, row: np.ndarray) -> None:  # type: ignore[type-arg]
        row[:] = (1 << ID["a"]) | (1 << ID["</think>"])


def test_beside_another_grammar() -> None:
    inner = Inner()
    budget = ThinkingBudget(1, True, ids("<think>"), ids("</think>"), "<think>", "</think>")
    thought = ThoughtLimit(budget, decode, inner)
    assert thought.first == 0 and forced(thought) is None
    assert forced(said(thought, "a")) == "</think>"
    said(thought, "</think>")
    assert not thought.over and inner.seen == ids("a", "</think>")
    row = np.zeros(1, np.int32)
    thought.fill_bitmask(row)
    assert int(row[0]) == (1 << ID["a"]) | (1 << ID["</think>"])


def channels(tokens: int) -> ThoughtLimit:
    end = ids("|e|", "|s|", "|c|", "final", "|m|")
    budget = ThinkingBudget(tokens, False, ids("|m|"), end, "|m|", "", channels=True)
    return ThoughtLimit(budget, decode)


def test_messages_in_channels() -> None:
    """The thoughts of all messages count together; headers do not."""
    thought = said(channels(4), "|c|", "analysis", "|m|", "a", "b", "a", "|e|")
    assert forced(thought) is None
    said(thought, "|s|", "|c|", "analysis", "|m|")
    assert forced(thought) is None
    said(thought, "b")
    for word in ("|e|", "|s|", "|c|", "final", "|m|"):
        assert forced(thought) == word
        said(thought, word)
    assert thought.over


def test_a_header_is_finished_first() -> None:
    thought = said(channels(0), "|c|", "analysis")
    assert forced(thought) is None
    assert forced(said(thought, "|m|")) == "|e|"


@pytest.mark.parametrize("header", [["|c|", "final"], ["|c|", "commentary", "to=functions.f"]])
def test_an_answer_or_a_call_ends_the_thought(header: list[str]) -> None:
    assert said(channels(4), "|c|", "analysis", "|m|", "a", "|e|", "|s|", *header, "|m|").over


def test_text_beside_the_thought() -> None:
    thought = said(channels(1), "|c|", "commentary", "|m|", "a", "b", "a", "|e|")
    assert forced(thought) is None and not thought.over
    assert forced(said(thought, "|s|", "|c|", "analysis", "|m|", "a")) == "|e|"
