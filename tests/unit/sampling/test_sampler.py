"""Bad rows, log-probabilities, and that a row's result depends on that row alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_oracle as oracle

from jaxengine.sampling import (
    EDIT_ADD,
    MIN_LOGPROB,
    neutral_inputs,
    prompt_logprobs,
    sample,
)

K = 5
run = jax.jit(partial(sample, num_logprobs=K))
run_greedy = jax.jit(partial(sample, num_logprobs=K, greedy_only=True))
PER_ROW = neutral_inputs(1)._fields[:17]


def mixed_rows(rng, rows, vocab):
    """Rows with every kind of setting, and their logits."""
    history = rng.integers(0, vocab, (rows, 300)).astype(np.int32)
    inputs = neutral_inputs(rows, num_edits=4 * rows, num_bad_words=rows, history=history)
    edits = np.arange(4 * rows)
    return (rng.normal(size=(rows, vocab)) * 2).astype(np.float32), inputs._replace(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5], rows).astype(np.float32),
        top_k=rng.choice([0, 0, 5, 50, 300], rows).astype(np.int32),
        top_p=rng.choice([1.0, 0.9, 0.5], rows).astype(np.float32),
        min_p=rng.choice([0.0, 0.0, 0.1], rows).astype(np.float32),
        seed_lo=rng.integers(-(2**31), 2**31, rows).astype(np.int32),
        seed_hi=rng.integers(-(2**31), 2**31, rows).astype(np.int32),
        position=rng.integers(0, 4000, rows).astype(np.int32),
        repetition_penalty=rng.choice([1.0, 1.2], rows).astype(np.float32),
        frequency_penalty=rng.choice([0.0, 0.3], rows).astype(np.float32),
        num_prompt=rng.integers(0, 150, rows).astype(np.int32),
        num_tokens=rng.integers(150, 300, rows).astype(np.int32),
        slot=np.arange(rows, dtype=np.int32),
        want_logprobs=rng.random(rows) < 0.5,
        edit_row=(edits % rows).astype(np.int32),
        edit_token=edits.astype(np.int32),
        edit_kind=np.where(edits % 3 == 0, EDIT_ADD, 0).astype(np.int32),
        edit_value=np.full(4 * rows, 2.5, np.float32),
    )


def take(inputs, order, rows):
    """`inputs` with its rows reordered or cut to `order`, padded to `rows` invalid rows."""
    padded = list(order) + [order[0]] * (rows - len(order))
    cut = {name: np.asarray(getattr(inputs, name))[padded] for name in PER_ROW}
    cut["valid"] = np.arange(rows) < len(order)
    new_row = {old: new for new, old in enumerate(order)}
    cut["edit_row"] = np.array([new_row.get(r, rows) for r in inputs.edit_row], np.int32)
    cut["bad_row"] = np.full_like(inputs.bad_row, rows)
    return inputs._replace(**cut), padded


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [320, 4160])
def test_a_row_is_the_same_alone_and_in_any_batch_and_bucket(vocab):
    """Tokens to the bit; log-probabilities up to the order of a sum, which XLA chooses by shape."""
    rng = np.random.default_rng(5)
    logits, inputs = mixed_rows(rng, 16, vocab)
    whole = run(logits, inputs)
    groups = [[r] for r in range(16)]
    for bucket, size in ((2, 2), (8, 5), (32, 16)):
        order = rng.permutation(16).tolist()
        groups += [order[i : i + size] for i in range(0, 16, size)]
        for group in [g for g in groups if len(g) <= bucket][-8:]:
            part, padded = take(inputs, group, bucket)
            got = run(logits[padded], part)
            for new, old in enumerate(group):
                for field in ("token_ids", "logprob_ids", "logprobs", "ranks"):
                    a, b = np.asarray(getattr(got, field))[new], np.asarray(getattr(whole, field))
                    same = np.allclose(a, b[old], rtol=1e-5) if field == "logprobs" else a == b[old]
                    assert np.all(same), (bucket, old, field)
            assert (np.asarray(got.token_ids)[len(group) :] == -1).all()
            assert not np.asarray(got.bad_rows)[len(group) :].any()
    for row in range(16):  # alone, in the bucket of one
        part, padded = take(inputs, [row], 1)
        got = run(logits[padded], part)
        assert int(got.token_ids[0]) == int(whole.token_ids[row])
        assert np.allclose(got.logprobs[0], whole.logprobs[row], rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 100}])
def test_nan_inf_and_empty_rows_end_alone(temperature, filters):
    rng = np.random.default_rng(6)
    logits = rng.normal(size=(6, 320)).astype(np.float32)
    inputs = neutral_inputs(6)._replace(
        temperature=np.full(6, temperature, np.float32),
        seed_lo=np.arange(6, dtype=np.int32),
        want_logprobs=np.ones(6, bool),
        **{k: np.full(6, v, getattr(neutral_inputs(1), k).dtype) for k, v in filters.items()},
    )
    clean = run(logits, inputs)
    broken = logits.copy()
    broken[1, 100] = np.nan
    broken[2, 3] = np.inf
    broken[3] = -np.inf
    broken[4] = np.nan
    out = run(broken, inputs)
    assert out.bad_rows.tolist() == [False, True, True, True, True, False]
    assert out.token_ids[1:5].tolist() == [-1] * 4
    for row in (0, 5):
        assert out.token_ids[row] == clean.token_ids[row]
        assert np.allclose(out.logprobs[row], clean.logprobs[row], rtol=1e-5)
    assert np.isfinite(np.asarray(out.logprobs)).all()


def test_logprobs_are_raw_finite_and_ranked():
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(8, 320)).astype(np.float32)
    inputs = neutral_inputs(8)._replace(
        temperature=np.full(8, 1.7, np.float32),
        top_k=np.full(8, 10, np.int32),
        seed_lo=np.arange(8, dtype=np.int32),
        want_logprobs=np.arange(8) < 6,
    )
    out = run(logits, inputs)
    for row in range(6):
        want = oracle.logprobs(logits[row])
        token = int(out.token_ids[row])
        best = np.argsort(-logits[row], kind="stable")[:K]
        assert out.logprob_ids[row].tolist() == [token, *best]
        np.testing.assert_allclose(out.logprobs[row], want[[token, *best]], atol=1e-5)
        assert out.ranks[row] == (logits[row] >= logits[row][token]).sum()
    assert not np.asarray(out.logprobs)[6:].any() and not np.asarray(out.ranks)[6:].any()


def test_impossible_alternatives_have_the_finite_floor():
    legal = np.zeros((2, 320), bool)
    legal[:, 17] = True
    mask = np.packbits(legal, axis=-1, bitorder="little").view(np.int32)
    inputs = neutral_inputs(2)._replace(
        temperature=np.array([0, 1], np.float32), want_logprobs=np.ones(2, bool), grammar=mask
    )
    out = run(np.random.default_rng(8).normal(size=(2, 320)).astype(np.float32), inputs)
    for row in range(2):
        assert out.token_ids[row] == 17 and out.ranks[row] == 1
        np.testing.assert_allclose(out.logprobs[row], [0, 0] + [MIN_LOGPROB] * (K - 1), atol=1e-6)
        assert all(i < 320 for i in out.logprob_ids[row])


def test_greedy_only_equals_the_full_program():
    logits = np.random.default_rng(9).normal(size=(4, 1000)).astype(np.float32)
    logits[2, 5] = np.nan
    inputs = neutral_inputs(4)._replace(want_logprobs=np.array([True, True, True, False]))
    for a, b in zip(run(logits, inputs), run_greedy(logits, inputs), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("vocab", [5, 33, 1000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_odd_vocabularies(vocab, temperature):
    logits = np.random.default_rng(10).normal(size=(3, vocab)).astype(np.float32)
    inputs = neutral_inputs(3)._replace(
        temperature=np.full(3, temperature, np.float32),
        want_logprobs=np.ones(3, bool),
        seed_lo=np.arange(3, dtype=np.int32),
    )
    out = run(logits, inputs)
    assert out.logprobs.shape == (3, 1 + min(K, vocab))
    assert all(0 <= t < vocab for t in out.token_ids.tolist())
    if temperature == 0:
        assert out.token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("length", [1, 7, 32, 45])
def test_prompt_logprobs(length):
    rng = np.random.default_rng(11)
    hidden = rng.normal(size=(length, 24)).astype(np.float32)
    head = rng.normal(size=(330, 24)).astype(np.float32)
    targets = rng.integers(0, 330, length).astype(np.int32)
    largest = []

    def head_fn(x):
        largest.append(x.shape[0])
        return x @ head.T

    fn = jax.jit(lambda h, t: prompt_logprobs(h, t, head_fn, 4, chunk=16))
    ids, values, ranks = map(np.asarray, fn(jnp.asarray(hidden), jnp.asarray(targets)))
    assert ids.shape == values.shape == (length, 5) and max(largest) <= 16
    for t in range(length):
        logits = head.astype(np.float64) @ hidden[t]
        want = oracle.logprobs(logits)
        assert ids[t, 0] == targets[t]
        np.testing.assert_allclose(values[t], want[ids[t]], atol=1e-4)
        np.testing.assert_allclose(values[t, 1:], np.sort(want)[::-1][:4], atol=1e-4)
        assert abs(ranks[t] - (logits >= logits[targets[t]]).sum()) <= 1


def test_prompt_logprobs_survives_nan():
    ids, values, _ = prompt_logprobs(
        jnp.full((3, 4), jnp.nan), jnp.zeros(3, jnp.int32), lambda h: h @ jnp.ones((4, 70)), 2
    )
    assert (np.asarray(values) == MIN_LOGPROB).all() and ids.shape == (3, 3)
