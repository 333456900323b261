"""B51: the tokens kept are drawn from the target, whatever the drafts are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from jaxengine.runner.draft.verify import accepted_tokens
from jaxengine.sampling.inputs import neutral_inputs
from jaxengine.sampling.sampler import sample

VOCAB, ROWS, PLACES = 8, 20_000, 4
TOP_K, TOP_P = 6, 0.95
LOGITS = np.random.default_rng(0).normal(0, 1.2, (PLACES, VOCAB)).astype(np.float32)


def target(temperature: float) -> NDArray[np.float64]:
    """[PLACES, VOCAB] after temperature, top-k and top-p, in float64."""
    out = np.zeros((PLACES, VOCAB))
    for place, logits in enumerate(LOGITS.astype(np.float64) / temperature):
        order = np.argsort(-logits)[:TOP_K]
        p = np.exp(logits[order] - logits[order[0]])
        p /= p.sum()
        kept = np.cumsum(p) - p < TOP_P
        out[place, order[kept]] = p[kept] / p[kept].sum()
    return out


@jax.jit
def _chosen(seeds: jax.Array, temperature: jax.Array) -> jax.Array:
    """Every place of every row as the engine samples it: own logits, own position."""
    count = ROWS * PLACES
    neutral = jax.tree.map(jnp.asarray, neutral_inputs(count))
    inputs = neutral._replace(
        temperature=jnp.full(count, temperature),
        top_k=jnp.full(count, TOP_K, jnp.int32),
        top_p=jnp.full(count, TOP_P, jnp.float32),
        seed_lo=jnp.repeat(seeds, PLACES),
        position=jnp.tile(jnp.arange(10, 10 + PLACES, dtype=jnp.int32), ROWS),
    )
    logits = jnp.tile(jnp.asarray(LOGITS), (ROWS, 1))
    return sample(logits, inputs, 0).token_ids.reshape(ROWS, PLACES)


def kept_tokens(drafter: str, temperature: float, seed: int) -> NDArray[np.int32]:
    """[ROWS, PLACES]; -1 behind the first refused draft."""
    rng = np.random.default_rng(seed)
    seeds = np.asarray(rng.permutation(2**20)[:ROWS], np.int32)
    chosen = _chosen(jnp.asarray(seeds), jnp.float32(temperature))
    shape = (ROWS, PLACES - 1)
    if drafter == "best":
        drafts = np.broadcast_to(LOGITS[:-1].argmax(1), shape)
    elif drafter == "bad":
        drafts = np.broadcast_to(LOGITS[:-1].argmin(1), shape)
    else:
        drafts = rng.integers(0, VOCAB, shape)
    bad = jnp.zeros((ROWS, PLACES), bool)
    return np.asarray(accepted_tokens(chosen, bad, jnp.asarray(drafts, jnp.int32))[0])


def check(seed: int, temperature: float) -> None:
    want = target(temperature)
    for drafter in ("best", "random", "bad"):
        kept = kept_tokens(drafter, temperature, seed)
        for place in range(PLACES):
            tokens = kept[:, place][kept[:, place] >= 0]
            counts = np.bincount(tokens, minlength=VOCAB)
            legal = want[place] > 0
            assert not counts[~legal].any(), "a token of probability 0"
            if len(tokens) > 300:  # few rows come far with bad drafts
                p = chisquare(counts[legal], want[place][legal] * len(tokens)).pvalue
                assert p > 1e-4, (drafter, place, p)
            else:
                assert drafter != "best" and place > 0
    assert np.array_equal(kept_tokens("best", temperature, seed), kept_tokens(
        "best", temperature, seed))  # fmt: skip


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_the_distribution_is_the_targets(temperature: float) -> None:
    check(0, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_the_distribution_is_the_targets_for_more_seeds(seed: int, temperature: float) -> None:
    check(seed, temperature)


def test_a_bad_position_behind_good_ones_waits_for_the_next_step() -> None:
    chosen = jnp.asarray([[5, -1, 7], [-1, 6, 7], [5, 6, -1], [5, 9, 7]])
    drafts = jnp.asarray([[5, 6], [5, 6], [5, 6], [-1, -1]])
    kept, ended = accepted_tokens(chosen, chosen < 0, drafts)
    assert kept.tolist() == [[5, -1, -1], [-1, -1, -1], [5, 6, -1], [5, -1, -1]]
    assert ended.tolist() == [0, 1, 0, 0]
