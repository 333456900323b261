"""n-gram lookup: the index on the host, the program on the device and the plain definition."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.runner.draft.lookup import Lookup, propose
from jaxengine.speculate.ngram import NgramProposer

WIDTH = 24
device = jax.jit(propose, static_argnums=(2, 3))


def plain(tokens: list[int], k: int, low: int, high: int) -> list[int]:
    """The longest n first, then the earliest occurrence."""
    for n in range(min(high, len(tokens) - 1), low - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=3, max_size=3),
    st.sampled_from([(1, 3), (2, 2), (3, 4)]),
)
def test_all_three_agree(texts: list[list[int]], lengths: tuple[int, int]) -> None:
    low, high = lengths
    want = [plain(text, 4, low, high) for text in texts]
    host = NgramProposer(low, high)
    for i, text in enumerate(texts):
        tokens = np.asarray(text, np.int32)
        for end in range(1, len(text) + 1):  # as it grows
            found = host.propose(f"{i}", tokens[:end], 4)
        assert found == want[i]
    history = np.full((3, WIDTH), 1, np.int32)  # what lies behind a row's end must not matter
    for i, text in enumerate(texts):
        history[i, : len(text)] = text
    length = np.asarray([len(text) for text in texts], np.int32)
    drafts = np.asarray(device(history, length, 4, Lookup(low, high)))
    for row, wanted in zip(drafts.tolist(), want, strict=True):
        assert row == wanted + [-1] * (4 - len(wanted))


def test_ids_that_come_again_start_afresh() -> None:
    host = NgramProposer(1, 2)
    assert host.propose("a", np.asarray([1, 2, 3, 1], np.int32), 2) == [2, 3]
    assert host.propose("a", np.asarray([1, 1], np.int32), 2) == [1]
    host.forget("a")
    host.forget("never seen")
    assert host.propose("a", np.asarray([4, 5], np.int32), 2) == []
