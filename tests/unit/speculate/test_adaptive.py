"""The controller in simulated engines: it finds the best K, and never loses much to K = 0."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from jaxengine.speculate.adaptive import AdaptiveK

ALLOWED = (0, 1, 2, 3, 5, 7)
Cost = Callable[[int, int], float]  # (batch size, K) -> seconds


def flat(batch: int, k: int) -> float:
    """Memory-bound: drafts cost little."""
    return 0.010 * (1 + 0.03 * k)


def steep(batch: int, k: int) -> float:
    """Compute-bound: a draft costs as much as a token."""
    return 0.010 * (1 + 0.8 * k)


class Run:
    """Accepts each draft with probability `chance`, given those before it."""

    def __init__(self, seed: int) -> None:
        self.control = AdaptiveK(ALLOWED)
        self.rng = np.random.default_rng(seed)
        self.seconds = self.tokens = self.plain = 0.0
        self.chosen: list[int] = []

    def steps(self, count: int, batch: int, chance: float, cost: Cost, drafted: float = 1.0) -> Run:
        for _ in range(count):
            k = self.control.choose(batch)
            has = self.rng.random(batch) < drafted
            right = self.rng.random((batch, k)) < chance
            accepted = (np.cumprod(right, 1) * has[:, None]).sum(0).astype(int).tolist()
            noise = float(self.rng.lognormal(0, 0.05)) * (20.0 if self.rng.random() < 0.002 else 1)
            seconds = cost(batch, k if has.any() else 0) * noise
            self.control.observe(batch, k, seconds, int(has.sum()) * k, accepted)
            self.seconds += seconds
            self.tokens += batch + sum(accepted)
            self.plain += (batch + sum(accepted)) / batch * cost(batch, 0) * noise
            self.chosen.append(k)
        return self

    @property
    def against_plain(self) -> float:
        """Speed over that of K = 0 with the same noise."""
        return self.plain / self.seconds


def best_k(chance: float, batch: int, cost: Cost) -> int:
    return max(ALLOWED, key=lambda k: sum(chance**j for j in range(k + 1)) / cost(batch, k))


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize(("chance", "cost"), [(0.9, flat), (0.5, flat), (0.95, steep)])
def test_finds_nearly_the_best(batch: int, chance: float, cost: Cost) -> None:
    run = Run(1).steps(1000, batch, chance, cost)
    best = best_k(chance, batch, cost)
    late = run.chosen[-500:]
    reached = sum(sum(chance**j for j in range(k + 1)) for k in late) / sum(
        cost(batch, k) for k in late
    )
    possible = sum(chance**j for j in range(best + 1)) / cost(batch, best)
    assert reached > 0.93 * possible


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6])
def test_never_loses_more_than_three_percent(batch: int, chance: float, seed: int) -> None:
    run = Run(seed).steps(1000, batch, chance, steep)
    assert run.against_plain > 0.97
    assert set(run.chosen) != {0}  # it did look


def test_drift_both_ways() -> None:
    run = Run(3).steps(800, 8, 0.9, flat)
    assert np.mean(run.chosen[-200:]) > 4
    tokens, plain, seconds = run.tokens, run.plain, run.seconds
    run.steps(1500, 8, 0.05, steep)
    assert (run.plain - plain) / (run.seconds - seconds) > 0.97
    assert np.mean(run.chosen[-200:]) < 0.3
    assert run.tokens > tokens
    run.steps(2500, 8, 0.9, flat)
    assert np.mean(run.chosen[-200:]) > 4


def test_batch_sizes_are_apart() -> None:
    """Cheap drafts at one request, dear ones at 64: each gets its own K."""

    def cost(batch: int, k: int) -> float:
        return flat(batch, k) if batch == 1 else steep(batch, k)

    run = Run(4)
    for _ in range(60):
        run.steps(20, 1, 0.7, cost).steps(20, 64, 0.7, cost)
    ones = [k for i in range(40, 60) for k in run.chosen[i * 40 : i * 40 + 20]]
    many = [k for i in range(40, 60) for k in run.chosen[i * 40 + 20 : i * 40 + 40]]
    assert np.mean(ones) > 3 and np.mean(many) < 0.5


def test_rows_without_drafts_count() -> None:
    """A lookup that seldom finds anything is worth little, however good its drafts are."""
    run = Run(5).steps(1500, 16, 0.95, lambda b, k: 0.01 * (1 + 0.2 * k), drafted=0.05)
    assert run.against_plain > 0.97
    assert np.mean(run.chosen[-300:]) < 0.5


def test_what_is_found_after_long_is_used_at_once() -> None:
    """A look-up that finds nothing for long says nothing about what it will find."""
    run = Run(6).steps(300, 1, 0.95, flat)
    run.steps(2000, 1, 0.95, flat, drafted=0.0)
    assert np.mean(run.steps(60, 1, 0.95, flat).chosen[-60:]) > 4


def test_looking_in_vain_is_paid_for() -> None:
    """A drafter on the host that keeps the device waiting, and finds nothing."""
    run = Run(7)
    for _ in range(2000):
        k = run.control.choose(8)
        seconds = 0.013 if k else 0.010
        run.control.observe(8, k, seconds, 0, [])
        run.seconds += seconds
    assert 2000 * 0.010 / run.seconds > 0.97


def test_batches_of_one_program_take_as_long() -> None:
    """17 to 32 rows run in the same shape; a batch that shrinks or grows hides no loss."""
    rng = np.random.default_rng(8)
    run = Run(8)
    for batch in rng.integers(17, 33, 150):
        run.steps(20, int(batch), 0.25, steep)
    assert run.against_plain > 0.97


def test_the_step_behind_drafts_is_no_reference() -> None:
    """Between a step with drafts and one without the device waits for the host."""
    control, before = AdaptiveK((0, 1)), 0
    lost = total = 0.0
    for _ in range(4000):
        k = control.choose(4)
        seconds = (0.0115 if k else 0.010) + (0.004 if before and not k else 0.0)
        accepted = [1] if k else []  # 1.25 tokens a row would do: 0.0115 < 0.0125
        control.observe(4, k, seconds, 4 * k, accepted)
        lost += seconds - 0.010 * (1 + sum(accepted) / 4)
        total += seconds
        before = k
    assert abs((control.rate(4, 0) or 0) * 0.010 / 4 - 1) < 0.01
    assert lost < 0.0


def test_exploring_outlives_a_wait() -> None:
    """A drafter on the host must wait for the step in flight, and is asked again behind it."""
    control, tried = AdaptiveK((0, 3)), 0
    for step in range(1200):
        k = control.choose(1)
        if k and control.choose(1) == k:  # what is in flight ends first, without drafts
            control.observe(1, 0, 0.010, 0, [])
            k = control.choose(1)
        good = step > 400
        control.observe(1, k, 0.012 if k else 0.010, k, [int(good)] * k)
        tried += step > 900 and k > 0
    assert tried > 200


def test_first_steps_and_bad_input() -> None:
    control = AdaptiveK((3, 1))
    assert control.allowed == (0, 1, 3)
    assert control.choose(4) == 0  # the reference first
    assert control.rate(4, 1) is None
    only = AdaptiveK((0,))
    for _ in range(60):
        assert only.choose(2) == 0
        only.observe(2, 0, 0.01, 0, [])
    with pytest.raises(ValueError, match="batch_size"):
        control.choose(0)
    with pytest.raises(ValueError, match="allowed"):
        AdaptiveK((-1, 2))
    with pytest.raises(ValueError, match="budget"):
        AdaptiveK((0, 1), budget=0)
