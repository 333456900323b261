"""The choice of a rank."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from jaxengine.front.ranks.balancer import Balancer, Load, prefix_key, score

LOADS = st.lists(
    st.builds(
        Load,
        waiting=st.integers(0, 50),
        running=st.integers(0, 300),
        kv_usage=st.floats(0, 1),
        own=st.integers(0, 300),
    ),
    min_size=1,
    max_size=8,
)


def _balancer(loads: list[Load], clients: int = 1) -> Balancer:
    balancer = Balancer(range(len(loads)), clients)
    for rank, load in enumerate(loads):
        balancer.update(rank, load.waiting, load.running, load.kv_usage)
        balancer.loads[rank].own = load.own
    return balancer


def test_the_worked_trace() -> None:
    a, b = Load(3, 10, 0.9, 2), Load(0, 12, 0.3, 7)
    assert abs(score(a, 2) - 20.2) < 1e-9 and score(b, 2) == 14
    balancer = _balancer([a, b], clients=2)
    assert balancer.choose([0, 1]) == 1
    assert balancer.loads[1].waiting == 2 and balancer.loads[0].waiting == 3


@given(LOADS, st.data())
def test_only_the_offered_and_never_a_worse_one(loads: list[Load], data: st.DataObject) -> None:
    among = data.draw(st.sets(st.sampled_from(range(len(loads))), min_size=1))
    balancer = _balancer(loads)
    chosen = balancer.choose(among)
    assert chosen in among
    assert score(loads[chosen]) == min(score(loads[r]) for r in among)


@given(LOADS, st.text(max_size=5), st.data())
def test_a_home_is_kept_until_it_is_much_worse(
    loads: list[Load], key: str, data: st.DataObject
) -> None:
    among = sorted(data.draw(st.sets(st.sampled_from(range(len(loads))), min_size=1)))
    home = Balancer(range(len(loads))).choose(among, key)  # nobody has a load: the home
    chosen = _balancer(loads).choose(among, key)
    best = min(score(loads[r]) for r in among)
    assert (chosen == home) or score(loads[chosen]) == best
    assert (chosen == home) or score(loads[home]) > 2 * best


@given(st.integers(1, 8), st.integers(1, 100))
def test_without_stats_the_choices_spread_evenly(ranks: int, count: int) -> None:
    balancer = Balancer(range(ranks))
    chosen = Counter(balancer.choose(range(ranks)) for _ in range(count))
    assert max(chosen.values()) - (min(chosen.values()) if len(chosen) == ranks else 0) <= 1


def test_ties_go_round() -> None:
    balancer = Balancer(range(3))
    first = []
    for _ in range(3):
        first.append(balancer.choose([0, 1, 2]))
        balancer.update(first[-1], 0, 0, 0.0)
    assert sorted(first) == [0, 1, 2]


def test_when_a_rank_goes_only_its_keys_move() -> None:
    keys = [f"session {i}" for i in range(200)]
    before = {k: Balancer(range(4)).choose(range(4), k) for k in keys}
    after = {k: Balancer(range(4)).choose([0, 1, 3], k) for k in keys}
    assert all(after[k] == before[k] for k in keys if before[k] != 2)
    assert min(Counter(before.values()).values()) > 25


def test_equal_beginnings_have_equal_keys() -> None:
    rng = random.Random(0)
    start = [rng.randrange(50_000) for _ in range(64)]
    assert prefix_key([*start, 1, 2]) == prefix_key([*start, 3])
    assert prefix_key(start) != prefix_key([*start[:-1], start[-1] + 1])
