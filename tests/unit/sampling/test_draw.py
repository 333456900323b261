"""Random rows against a float64 reference: kept sets, cumulative choice, distribution, seeds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.sampling import keys, neutral_inputs, sample

run = jax.jit(partial(sample, num_logprobs=0))


def columns(rows, **fields):
    """Inputs of the rows, each field one value or a list by row."""
    inputs = neutral_inputs(rows)
    for name, value in fields.items():
        like = getattr(inputs, name)
        inputs = inputs._replace(**{name: np.broadcast_to(value, (rows,)).astype(like.dtype)})
    return inputs


def uniforms_of(inputs):
    lo, hi, position = map(jnp.asarray, (inputs.seed_lo, inputs.seed_hi, inputs.position))
    return np.asarray(keys.uniforms(lo, hi, position), np.float64)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    vocab=st.sampled_from([40, 320, 1000]),
    spread=st.sampled_from([0.01, 0.5, 2.0, 8.0]),
    ties=st.booleans(),
)
def test_choice_equals_the_float64_reference(seed, vocab, spread, ties):
    rng = np.random.default_rng(seed)
    rows = 6
    logits = (rng.normal(size=(rows, vocab)) * spread).astype(np.float32)
    if ties:
        logits = np.round(logits, 1) + np.float32(0)  # no -0.0, which top_k orders below 0.0
    logits[rng.random((rows, vocab)) < 0.1] = -np.inf
    inputs = columns(
        rows,
        temperature=rng.choice([0.01, 0.3, 1.0, 2.0], rows),
        top_k=rng.choice([0, -1, 1, 3, 50, 64, 65, 200, 100000], rows),
        top_p=rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 0.01], rows),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0], rows),
        seed_lo=rng.integers(-(2**31), 2**31, rows),
        seed_hi=rng.integers(-(2**31), 2**31, rows),
        position=rng.integers(0, 5000, rows),
    )
    out = run(logits, inputs)
    uniforms = uniforms_of(inputs)
    for r in range(rows):
        settings_ = (inputs.temperature[r], inputs.top_k[r], inputs.top_p[r], inputs.min_p[r])
        allowed = oracle.may_draw(logits[r], *settings_, uniforms[r])
        assert int(out.token_ids[r]) in allowed, (r, settings_)


CASES = {
    "plain": {},
    "top_k within the candidates": {"top_k": 12},
    "top_k beyond the candidates": {"top_k": 150},
    "top_p narrow": {"top_p": 0.6, "temperature": 0.5},
    "top_p wide": {"top_p": 0.95, "temperature": 2.0},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 100, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
}


@pytest.mark.parametrize("name", CASES)
def test_chi_square_of_20k_draws(name):
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | CASES[name]
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=320) * 1.5).astype(np.float32)
    rows, steps = 500, 40
    tiled = np.tile(logits, (rows, 1))
    counts = np.zeros(320)
    for step in range(steps):
        seeds = np.arange(rows) + 1000 * step
        inputs = columns(rows, **options, seed_lo=seeds, position=17)
        counts += np.bincount(np.asarray(run(tiled, inputs).token_ids), minlength=320)
    keep = oracle.kept(logits, **options)
    weight = np.where(keep, np.exp(logits.astype(np.float64) / options["temperature"]), 0.0)
    expected = weight / weight.sum() * rows * steps
    assert counts[~keep].sum() == 0
    rare = keep & (expected < 5)  # pool what is too rare for the statistic
    common = keep & ~rare
    seen = np.append(counts[common], counts[rare].sum())
    want = np.append(expected[common], expected[rare].sum())
    seen, want = seen[want > 0], want[want > 0]
    freedom = len(want) - 1
    statistic = ((seen - want) ** 2 / want).sum()
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom) + 10


def test_seeds_reproduce_and_differ():
    logits = np.zeros((64, 320), np.float32)
    seeds = np.arange(64)
    a, b = (run(logits, columns(64, temperature=1.0, seed_lo=seeds)) for _ in range(2))
    assert a.token_ids.tolist() == b.token_ids.tolist()
    assert len(set(a.token_ids.tolist())) > 40
    later = run(logits, columns(64, temperature=1.0, seed_lo=seeds, position=1))
    high = run(logits, columns(64, temperature=1.0, seed_lo=seeds, seed_hi=1))
    assert sum(x == y for x, y in zip(a.token_ids, later.token_ids, strict=True)) < 8
    assert sum(x == y for x, y in zip(a.token_ids, high.token_ids, strict=True)) < 8


def test_ties_at_the_kth_value_all_stay():
    logits = np.full((500, 320), -5.0, np.float32)
    logits[:, 100:200] = 1.0  # 100 equal values, more than the candidates
    inputs = columns(500, temperature=1.0, top_k=10, seed_lo=np.arange(500))
    seen = set(run(logits, inputs).token_ids.tolist())
    assert seen <= set(range(100, 200)) and len(seen) > 90


def test_top_p_tiny_keeps_the_best_token():
    logits = np.random.default_rng(0).normal(size=(6, 320)).astype(np.float32)
    out = run(logits, columns(6, temperature=2.0, top_p=1e-6, seed_lo=np.arange(6)))
    assert out.token_ids.tolist() == logits.argmax(-1).tolist()


def test_greedy_rows_of_a_mixed_batch_stay_greedy():
    logits = np.random.default_rng(0).normal(size=(6, 320)).astype(np.float32)
    temperature = [0, 1, 1e-9, 1, 0, 1]
    out = run(logits, columns(6, temperature=temperature, top_p=0.9, seed_lo=np.arange(6)))
    assert out.token_ids[0] == logits[0].argmax()
    assert out.token_ids[2] == logits[2].argmax()
    assert out.token_ids[4] == logits[4].argmax()


@pytest.mark.slow
def test_search_over_all_rows_at_once_equals_row_by_row(monkeypatch):
    """The form for accelerators picks what the CPU form picks."""
    rng = np.random.default_rng(9)
    logits = rng.normal(size=(12, 1000)).astype(np.float32)
    inputs = columns(
        12,
        temperature=rng.choice([0.0, 1.0, 1.5], 12),
        top_k=rng.choice([0, 20, 300], 12),
        top_p=rng.choice([1.0, 0.9], 12),
        seed_lo=np.arange(12),
    )
    want = run(logits, inputs).token_ids.tolist()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    got = jax.jit(lambda x, i: sample(x, i, 0))(logits, inputs).token_ids.tolist()
    assert got == want
