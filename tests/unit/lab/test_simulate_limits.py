"""What breaks first: each limit, in a cluster made for it."""

from __future__ import annotations

import pytest
from constant_device import Constant, cluster, requests_at

from jaxengine.lab.bench.datasets import arrivals, with_arrivals
from jaxengine.lab.simulate.cluster import Cluster, simulate
from jaxengine.lab.simulate.limits import Slo, diagnose, find_limit, lines, parse_slo
from jaxengine.lab.simulate.workload import fixed_requests

REQUESTS = with_arrivals(fixed_requests(24, 16, 8), arrivals(24, 0.04))
FEW = requests_at([0.0, 30.0, 60.0], 16, 2)

LIMITS = {
    "slots": cluster(max_num_seqs=2),
    "kv_pool": cluster(num_blocks=14, max_num_seqs=8),
    "compute": cluster(max_num_batched_tokens=8),
    "host": cluster(Constant(plan_s=4.0, device_s=1.0), depth=2, max_num_seqs=64),
}


@pytest.mark.parametrize("name", LIMITS)
def test_names_what_binds(name: str) -> None:
    slo = Slo({"ttft": 12_000, "tpot": 6_000})
    found = find_limit(LIMITS[name], REQUESTS, slo)
    assert found.limit is not None and found.limit.name == name
    assert found.best is not None
    rates = sorted((t.factor, bool(t.violated)) for t in found.tries)
    # Below the limit all is well, above it nothing is.
    assert [bad for _, bad in rates] == sorted(bad for _, bad in rates)
    assert "what breaks first: " + name in lines(found, slo)[-1]


def test_names_the_balancer() -> None:
    """All prompts begin alike and stay together, while other ranks have little to do."""
    made = cluster(ranks=4, max_num_seqs=1, affinity="prefix")
    requests = with_arrivals(fixed_requests(16, 4, 4, prefix_len=64), [2.0 * i for i in range(16)])
    found = find_limit(made, requests, Slo({"ttft": 10_000}))
    assert found.limit is not None and found.limit.name == "balancer"


def test_steps_that_are_too_long() -> None:
    slo = Slo({"tpot": 500})
    found = find_limit(cluster(), FEW, slo)
    assert found.best is None and found.limit is not None
    assert found.limit.name in ("compute", "bursts")


def test_nothing_breaks() -> None:
    found = find_limit(cluster(max_num_seqs=64), FEW, Slo({"tpot": 1e9}))
    assert found.limit is None and found.best is not None


def test_a_rate_is_needed() -> None:
    with pytest.raises(ValueError, match="request rate"):
        find_limit(cluster(), fixed_requests(3, 4, 2), Slo({"ttft": 1.0}))


def test_goodput_counts_who_keeps_every_level() -> None:
    outcome = simulate(cluster(max_num_seqs=1), fixed_requests(3, 4, 2))
    # First tokens after 1, 3 and 5 seconds, all over after 6.
    goodput = Slo({"ttft": 3000, "tpot": 1000}).goodput(outcome)
    assert goodput == {"request_goodput": pytest.approx(2 / 6), "good_share": pytest.approx(2 / 3)}
    assert Slo({"tpot": 999}).goodput(outcome)["good_share"] == 0.0


def test_rules_look_at_one_run() -> None:
    slo = Slo({"ttft": 100})
    made: Cluster = cluster(num_blocks=14)
    found = find_limit(made, requests_at([0.0, 1.0, 2.0, 3.0], 16, 8), slo)
    assert found.limit == diagnose(min(found.tries, key=lambda t: t.factor))


def test_levels_are_parsed() -> None:
    assert parse_slo(["ttft:200", "tpot:50.5"], 99) == Slo({"ttft": 200, "tpot": 50.5}, 99)
    for words in (["ttft"], ["ttft:x"], ["speed:3"], ["ttft:0"]):
        with pytest.raises(ValueError, match="slo"):
            parse_slo(words)
    with pytest.raises(ValueError, match="percentile"):
        parse_slo(["ttft:1"], 95)
