"""The whole engine with drafts draws from the distribution that it draws from without (B51)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from engine_runs import engine, request
from scipy.stats import chi2_contingency

from jaxengine.engine.core import EngineCore

SAMPLES, LENGTH = 20_000, 5
TOKENS = [40, 77, 123, 200, 251, 300]
RARE = TOKENS[-1]
SPECULATION = (
    '{"method": "ngram", "num_speculative_tokens": 3,'
    ' "prompt_lookup_min": 1, "prompt_lookup_max": 2}'
)
# Every token stands before another one: there are always drafts. The bad ones are all of a token
# that is hardly ever drawn.
PROMPTS = {
    "fair": [40, 77, 123, 200, 251, 300, 77, 40],
    "bad": [n for token in TOKENS[:-1] for n in (token, RARE)] + [RARE, 40],
}


def samples(drafter: str, temperature: float, seed: int, *, drafts: bool) -> np.ndarray:
    """[SAMPLES, LENGTH] places in TOKENS, every row of a request of its own."""
    core = engine(
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=32,
        block_size=16,
        num_gpu_blocks_override=160,
        speculative_config=SPECULATION,
    )
    core.use_speculation(SPECULATION if drafts else None)
    params: dict[str, Any] = {
        "temperature": temperature,
        "top_k": 5,
        "top_p": 0.95,
        "max_tokens": LENGTH,
        "allowed_token_ids": TOKENS,
        "logit_bias": {RARE: -2.0 if drafter == "bad" else 0.0},
    }
    if drafter == "bad":
        params |= {"top_k": 6, "top_p": 1.0}  # so that the rare token is possible at all
    found: dict[str, list[int]] = {}
    before = accepted(core)
    for i in range(SAMPLES):
        one = dict(params, seed=seed * SAMPLES + i)
        core.add_request(request(f"{i}", PROMPTS[drafter], **one))
    while core.has_work():
        for output in core.step():
            assert output.error is None
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    if drafts:
        assert accepted(core) > before  # it did speculate
    place = {token: i for i, token in enumerate(TOKENS)}
    return np.array([[place[t] for t in found[f"{i}"]] for i in range(SAMPLES)])


def accepted(core: EngineCore) -> float:
    return core.stats().extra.get("spec_num_accepted_tokens", 0.0)


@functools.cache
def plain(drafter: str, temperature: float) -> np.ndarray:
    return samples(drafter, temperature, 1000, drafts=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("drafter", "temperature"), [("fair", 0.7), ("fair", 1.5), ("bad", 1.5)])
def test_pairs_of_tokens_are_as_likely_as_without_drafts(
    drafter: str, temperature: float, seed: int
) -> None:
    """A token after the one before it, at every place: 20,000 of each kind, other seeds."""
    ours, theirs = samples(drafter, temperature, seed, drafts=True), plain(drafter, temperature)
    lowest = 1.0
    for place in range(1, LENGTH):
        tables = [
            np.bincount(x[:, place - 1] * len(TOKENS) + x[:, place], minlength=len(TOKENS) ** 2)
            for x in (ours, theirs)
        ]
        both = np.stack(tables)
        common = both.sum(0) >= 20
        both = np.concatenate([both[:, common], both[:, ~common].sum(1, keepdims=True)], 1)
        both = both[:, both.sum(0) > 0]
        lowest = min(lowest, chi2_contingency(both).pvalue)
    print(f"{drafter} drafts, temperature {temperature}, seed {seed}: lowest p {lowest:.4f}")
    assert lowest > 0.001


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_seed_gives_the_same_tokens_with_and_without_drafts() -> None:
    ours = samples("fair", 0.7, 7, drafts=True)
    assert np.array_equal(ours, samples("fair", 0.7, 7, drafts=False))
