"""Grammar, allow lists, bans, bias, bad words, min_tokens and penalties, alone and together."""

from functools import partial

import jax
import numpy as np
import pytest
import sampling_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.sampling import (
    EDIT_ADD,
    EDIT_ALLOW,
    EDIT_BAN,
    EDIT_MIN_TOKENS,
    needs_full,
    neutral_inputs,
    sample,
)
from jaxengine.sampling.processors import apply_grammar, process

V, S, E, B, W, H = 320, 5, 24, 6, 3, 40
run = jax.jit(partial(sample, num_logprobs=3))
run_process = jax.jit(lambda x, i: process(x, i, V))
run_grammar = jax.jit(apply_grammar)


def with_edits(inputs, edits):
    """Add (row, token, kind, value) edits; the rest of the list stays padding."""
    arrays = [np.array(a) for a in inputs[inputs._fields.index("edit_row") :][:4]]
    for i, edit in enumerate(edits):
        for array, value in zip(arrays, edit, strict=True):
            array[i] = value
    names = ("edit_row", "edit_token", "edit_kind", "edit_value")
    return inputs._replace(**dict(zip(names, arrays, strict=True)))


def bitmask(legal):
    """[rows, ceil(V / 32)] int32 of bool [rows, V]."""
    rows, vocab = legal.shape
    padded = np.pad(legal, ((0, 0), (0, -vocab % 32)))
    return np.packbits(padded, axis=-1, bitorder="little").view(np.int32)


def random_inputs(rng, grammar):
    history = rng.integers(0, 8, (9, H)).astype(np.int32)  # few tokens, so that prefixes match
    inputs = neutral_inputs(S, num_edits=E, num_bad_words=B, prefix_width=W, history=history)
    num_tokens = rng.integers(0, H + 1, S).astype(np.int32)
    prefixes = np.full((B, W), -1, np.int32)
    rows = rng.integers(0, S + 1, B).astype(np.int32)  # S = padding
    for b, row in enumerate(rows):
        length = rng.integers(1, W + 1)
        prefixes[b, :length] = rng.integers(0, 8, length)
        if row < S and num_tokens[row] >= length and rng.random() < 0.7:
            row_history = history[(row * 2) % 9]
            prefixes[b, :length] = row_history[num_tokens[row] - length : num_tokens[row]]
    kinds = [0, EDIT_ADD, EDIT_BAN, EDIT_ALLOW, EDIT_MIN_TOKENS]
    pairs = rng.permutation(S * 30)[:E]  # distinct (row, token)
    edits = [
        (p // 30, p % 30, rng.choice(kinds), rng.choice([-100.0, -3.5, 2.0, 100.0])) for p in pairs
    ]
    inputs = with_edits(inputs, edits)
    legal = rng.random((S, V)) < 0.5
    legal[0] = True
    return inputs._replace(
        repetition_penalty=rng.choice([1.0, 1.3, 0.7], S).astype(np.float32),
        frequency_penalty=rng.choice([0.0, 0.5, -1.0], S).astype(np.float32),
        presence_penalty=rng.choice([0.0, 0.4, -2.0], S).astype(np.float32),
        num_tokens=num_tokens,
        num_prompt=(num_tokens * rng.random(S)).astype(np.int32),
        slot=(np.arange(S, dtype=np.int32) * 2) % 9,
        min_tokens_active=rng.random(S) < 0.5,
        allow_row=rng.random(S) < 0.3,
        bad_row=rows,
        bad_prefix=prefixes,
        bad_last=rng.integers(0, 30, B).astype(np.int32),
        grammar=bitmask(legal) if grammar else None,
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31 - 1), st.booleans())
def test_everything_together_equals_the_reference(seed, grammar):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(S, V)) * 3).astype(np.float32)
    inputs = random_inputs(rng, grammar)
    masked = run_grammar(logits, inputs.grammar) if grammar else logits
    changed = np.asarray(run_process(masked, inputs._replace(grammar=None)))
    out = run(logits, inputs)
    for row in range(S):
        want = oracle.processed(logits, inputs, row)
        np.testing.assert_allclose(changed[row], want, rtol=1e-5, atol=1e-4)
        if want.max() == -np.inf:
            assert out.bad_rows[row] and out.token_ids[row] == -1
        else:  # every constraint holds at temperature 0
            assert not out.bad_rows[row]
            assert want[out.token_ids[row]] >= want.max() - 1e-4


def greedy(inputs, logits=None):
    logits = np.arange(V, dtype=np.float32)[None].repeat(len(inputs.valid), 0) / 100
    return run(logits, inputs).token_ids.tolist()


BEST = V - 1


def test_each_constraint_holds_at_temperature_zero():
    rows = 4
    base = neutral_inputs(rows, num_edits=4)
    assert greedy(base) == [BEST] * rows
    assert greedy(with_edits(base, [(1, 7, EDIT_ADD, 100.0)])) == [BEST, 7, BEST, BEST]
    assert greedy(with_edits(base, [(1, BEST, EDIT_BAN, 0)])) == [BEST, BEST - 1, BEST, BEST]
    allow = base._replace(allow_row=np.array([False, True, False, False]))
    assert greedy(with_edits(allow, [(1, 9, EDIT_ALLOW, 0), (1, 4, EDIT_ALLOW, 0)])) == [
        BEST,
        9,
        BEST,
        BEST,
    ]


@pytest.mark.parametrize("row, token", [(4, 5), (1, V), (1, V + 5), (1, -1), (-1, 5), (2**30, 5)])
@pytest.mark.parametrize("kind", [EDIT_ADD, EDIT_BAN, EDIT_ALLOW, EDIT_MIN_TOKENS])
def test_edits_out_of_range_touch_nothing(row, token, kind):
    inputs = neutral_inputs(4, num_edits=4)._replace(min_tokens_active=np.ones(4, bool))
    assert greedy(with_edits(inputs, [(row, token, kind, 1e9)])) == [BEST] * 4


def test_min_tokens_bans_only_while_active_and_yields_to_the_grammar():
    active = np.array([True, False, True, True])
    legal = np.ones((4, V), bool)
    legal[2] = False
    legal[2, BEST] = True  # a finished grammar: only the stop token is legal
    inputs = neutral_inputs(4, num_edits=4)._replace(
        min_tokens_active=active, grammar=bitmask(legal)
    )
    stops = with_edits(inputs, [(r, BEST, EDIT_MIN_TOKENS, 0) for r in range(4)])
    assert greedy(stops) == [BEST - 1, BEST, BEST, BEST - 1]


def test_bad_word_needs_its_whole_prefix():
    history = np.array([[1, 2, 3, 0], [9, 2, 3, 0], [2, 3, 0, 0], [3, 1, 2, 3]], np.int32)
    inputs = neutral_inputs(4, num_bad_words=4, prefix_width=4, history=history)._replace(
        slot=np.arange(4, dtype=np.int32),
        num_tokens=np.array([3, 3, 2, 4], np.int32),
        bad_row=np.arange(4, dtype=np.int32),
        bad_prefix=np.array([[1, 2, 3, -1]] * 4, np.int32),
        bad_last=np.full(4, BEST, np.int32),
    )
    assert greedy(inputs) == [BEST - 1, BEST, BEST, BEST - 1]


def test_no_legal_token_is_a_bad_row_for_greedy_and_random_rows():
    inputs = neutral_inputs(4, num_edits=4)._replace(
        allow_row=np.array([False, True, True, False]),
        temperature=np.array([0, 0, 1, 1], np.float32),
    )
    edits = [(1, 5, EDIT_ALLOW, 0), (1, 5, EDIT_BAN, 0), (2, 5, EDIT_ALLOW, 0), (2, 5, EDIT_BAN, 0)]
    out = run(np.zeros((4, V), np.float32), with_edits(inputs, edits))
    assert out.bad_rows.tolist() == [False, True, True, False]
    assert out.token_ids[1] == out.token_ids[2] == -1 and out.token_ids[0] == 0


def test_needs_full_on_the_host():
    base = neutral_inputs(4, num_edits=4)
    assert not needs_full(base)
    warm = base._replace(temperature=np.array([0, 1, 0, 0], np.float32))
    assert needs_full(warm)
    assert not needs_full(warm._replace(valid=np.array([True, False, True, True])))
    assert needs_full(with_edits(base, [(0, 1, EDIT_BAN, 0)]))
    assert needs_full(base._replace(repetition_penalty=np.full(4, 1.1, np.float32)))


def test_penalties_ignore_history_beyond_num_tokens():
    history = np.full((2, 600), BEST, np.int32)
    history[:, :300] = 1
    inputs = neutral_inputs(2, history=history)._replace(
        slot=np.array([0, 1], np.int32),
        num_tokens=np.array([300, 301], np.int32),
        presence_penalty=np.full(2, 2.0, np.float32),
    )
    assert greedy(inputs) == [BEST, BEST - 1]
