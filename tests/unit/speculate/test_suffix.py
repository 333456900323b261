"""Suffix decoding against brute force, its bounds, and its speed."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.speculate.suffix import CountTrie
from jaxengine.speculate.suffix_proposer import SuffixProposer


def occurrences(texts: list[list[int]], pattern: list[int]) -> list[tuple[int, int]]:
    """(text, index of what follows) of every occurrence that is followed by something."""
    n = len(pattern)
    return [
        (t, i + n)
        for t, text in enumerate(texts)
        for i in range(len(text) - n)
        if text[i : i + n] == pattern
    ]


def brute_force(
    texts: list[list[int]], recent: list[int], k: int, depth: int, min_prob: float
) -> tuple[list[int], float, int]:
    """The definition: longest suffix, then the commonest continuation, token by token."""
    room = k
    match = max(
        (
            n
            for n in range(1, min(len(recent), depth - room) + 1)
            if occurrences(texts, recent[-n:])
        ),
        default=0,
    )
    if not match:
        return [], 0.0, 0
    pattern, drafts, prob, score = recent[-match:], [], 1.0, 0.0
    while len(drafts) < k:
        followers = Counter(texts[t][i] for t, i in occurrences(texts, pattern))
        if not followers:
            break
        total, best = sum(followers.values()), max(followers.values())
        # of equals, the one that was there first
        token = next(
            texts[t][i] for t, i in occurrences(texts, pattern) if followers[texts[t][i]] == best
        )
        prob *= best / total
        if prob < min_prob:
            break
        drafts.append(token)
        score += prob
        pattern = [*pattern, token]
    return drafts, score, match


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.1, 0.4]),
)
def test_own_text_matches_brute_force(text: list[int], k: int, min_prob: float) -> None:
    depth = 9
    trie = CountTrie(depth)
    for at in range(len(text)):
        trie.extend(text[at : at + 1])
        known = text[: at + 1]
        place, match = trie.longest(k)
        found = ([], 0.0, 0)
        if place is not None:
            drafts = trie.follow(place, match, k, min_prob)
            found = (drafts.tokens, drafts.score, match)
        expected = brute_force([known], known, k, depth, min_prob)
        assert found[0] == expected[0] and found[2] == expected[2]
        assert found[1] == pytest.approx(expected[1])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 4),
)
def test_shared_texts_match_brute_force(texts: list[list[int]], recent: list[int], k: int) -> None:
    depth = 9
    trie = CountTrie(depth)
    for text in texts:
        trie.extend(text)
        trie.end_text()
    place, match = trie.find(recent, k)
    drafts = [] if place is None else trie.follow(place, match, k, 0.0).tokens
    expected = brute_force(texts, recent, k, depth, 0.0)
    assert match == expected[2]
    assert drafts == expected[0]


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_proposer_copies_the_prompt_and_shares_outputs() -> None:
    proposer = SuffixProposer()
    assert proposer.propose("a", ids(1, 2, 3, 4, 5, 6, 9, 2, 3, 4), 3) == [5, 6, 9]
    assert proposer.propose("a", ids(1, 2, 3, 4, 5, 6, 9, 2, 3, 4, 5, 7, 7, 8), 3) == []
    assert proposer.propose("b", ids(30, 7, 7), 3) == []  # a's output is not shared while it runs
    proposer.forget("a")
    proposer.forget("unknown")
    assert proposer.propose("c", ids(40, 5, 7), 3) == [7, 8]
    assert proposer.propose("d", ids(50, 2, 3), 3) == []  # a's prompt is not shared
    assert proposer.propose("c", ids(40, 5, 7), 0) == []


def test_shorter_history_starts_again() -> None:
    proposer = SuffixProposer(shared_tokens=0)
    proposer.extend("a", ids(1, 2, 3, 1, 2))
    assert proposer.propose("a", ids(4, 5, 6, 4, 5)[:5], 2) == [3, 1]  # same length: not looked at
    assert proposer.propose("a", ids(4, 5, 4, 5)[:4], 2) == [4, 5]


def test_draft_length_follows_the_match() -> None:
    text = ids(1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2)
    assert len(SuffixProposer().propose("a", text, 7)) == 2
    assert len(SuffixProposer(max_spec_factor=0).propose("a", text, 7)) == 7


def test_shared_memory_is_bounded() -> None:
    proposer = SuffixProposer(shared_tokens=400)
    rng = np.random.default_rng(0)
    for i in range(50):
        prompt = rng.integers(0, 50, 5).astype(np.int32)
        proposer.propose(str(i), prompt, 2)
        proposer.extend(str(i), np.concatenate([prompt, rng.integers(0, 50, 60)]).astype(np.int32))
        proposer.forget(str(i))
    assert not proposer._own
    assert 0 < len(proposer._new.text) + len(proposer._old.text) <= 400


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"min_match": 0}, "min_match"),
        ({"min_token_prob": 2.0}, "min_token_prob"),
        ({"max_spec_factor": -1.0}, "max_spec_factor"),
        ({"max_tree_depth": 2}, "max_tree_depth"),
    ],
)
def test_bad_settings(settings: dict, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SuffixProposer(**settings)


@pytest.mark.slow
def test_speed_at_4k_context() -> None:
    """Prints the CPU time of a proposal, its share of keeping the trie included (goal 20 us)."""
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, 3000, 12) for _ in range(40)]
    text = np.concatenate([phrases[i] for i in rng.integers(0, 40, 400)]).astype(np.int32)
    proposer = SuffixProposer(shared_tokens=0)
    proposer.propose("a", text[:4000], 5)
    best = 1.0
    for start in range(4000, 4700, 100):
        began = time.thread_time()
        for n in range(start + 1, start + 101):
            proposer.propose("a", text[:n], 5)
        best = min(best, (time.thread_time() - began) / 100)
    print(f"suffix: {best * 1e6:.1f} us a proposal")
    assert best < 200e-6
