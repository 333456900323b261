"""Virtual time: numbers worked out by hand, and what must hold for every run."""

from __future__ import annotations

import dataclasses

import pytest
from constant_device import Constant, cluster, requests_at, token_times

from jaxengine.lab.bench.datasets import arrivals, with_arrivals
from jaxengine.lab.simulate.cluster import simulate
from jaxengine.lab.simulate.results import queue_lengths, summarize
from jaxengine.lab.simulate.tiers import TierConfig
from jaxengine.lab.simulate.workload import fixed_requests, random_requests


def test_synchronous_steps_add_up_host_and_device() -> None:
    slow = Constant(plan_s=0.1, device_s=1.0, finish_s=0.2)
    outcome = simulate(cluster(slow), fixed_requests(1, 10, 3))
    assert token_times(outcome) == [[1.3, 2.6, 3.9]]
    assert outcome.seconds == pytest.approx(3.9)


def test_two_steps_in_flight_hide_the_host() -> None:
    """Planned at 0.1, 0.2 and 1.4; on the device until 1.1, 2.1 and 3.1; 0.2 to finish."""
    slow = Constant(plan_s=0.1, device_s=1.0, finish_s=0.2)
    outcome = simulate(cluster(slow, depth=2), fixed_requests(1, 10, 3))
    assert token_times(outcome) == [[1.3, 2.3, 3.3]]
    assert outcome.ranks[0].starved_s == pytest.approx(0.0)


def test_a_slow_host_starves_the_device() -> None:
    slow = Constant(plan_s=3.0, device_s=1.0)
    outcome = simulate(cluster(slow, depth=2), fixed_requests(1, 10, 4))
    # The device works a second in three.
    assert outcome.ranks[0].starved_s == pytest.approx(3 * 2.0)


def test_who_comes_during_a_step_waits_for_its_end() -> None:
    outcome = simulate(cluster(), requests_at([0.0, 0.5], 10, 2))
    assert token_times(outcome) == [[1.0, 2.0], [2.0, 3.0]]
    figures = summarize(outcome)
    assert figures["mean_ttft_ms"] == pytest.approx(1250)  # 1.0 and 1.5 s
    assert figures["p99_itl_ms"] == pytest.approx(1000)
    assert figures["mean_e2el_ms"] == pytest.approx(2250)
    assert figures["output_throughput"] == pytest.approx(4 / 3)
    assert figures["engine"]["waiting_mean"] == pytest.approx(0.5 / 1.0)
    assert figures["engine"]["device_utilisation"] == pytest.approx(1.0)


def test_a_prompt_is_cut_to_the_budget() -> None:
    outcome = simulate(cluster(max_num_batched_tokens=8), fixed_requests(1, 20, 1))
    assert token_times(outcome) == [[3.0]]


def test_requests_for_one_slot_come_one_after_the_other() -> None:
    outcome = simulate(cluster(max_num_seqs=1), fixed_requests(3, 4, 2))
    assert token_times(outcome) == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert outcome.ranks[0].obstacles == {"slots": 4}


def test_ranks_share_the_work() -> None:
    outcome = simulate(cluster(max_num_seqs=1, ranks=3), fixed_requests(3, 4, 2))
    assert token_times(outcome) == [[1.0, 2.0]] * 3
    assert [rank.requests for rank in outcome.ranks] == [1, 1, 1]


def test_equal_prefixes_are_found() -> None:
    """The second prompt comes when the first one's 16 shared tokens are there: 4 are left."""
    requests = requests_at([0.0, 2.0], 4, 1, prefix_len=16)
    run = simulate(cluster(max_num_batched_tokens=10), requests)
    assert token_times(run) == [[2.0], [3.0]]
    assert [record.cached for record in run.records] == [0, 16]
    off = cluster(max_num_batched_tokens=10, enable_prefix_caching=False)
    assert token_times(simulate(off, requests)) == [[2.0], [4.0]]


def test_a_client_sends_no_more_than_its_concurrency() -> None:
    outcome = simulate(cluster(), fixed_requests(3, 4, 2), max_concurrency=1)
    assert [record.arrival for record in outcome.records] == [0.0, 2.0, 4.0]


def test_a_session_goes_on_when_it_was_answered() -> None:
    talk = [dataclasses.replace(r, session="a") for r in requests_at([0.0, 0.5], 4, 2)]
    outcome = simulate(cluster(), talk)
    assert [record.arrival for record in outcome.records] == [0.0, 2.0]


def test_what_never_fits_fails_alone() -> None:
    outcome = simulate(cluster(max_model_len=16), fixed_requests(1, 20, 1))
    assert "max_model_len 16" in str(outcome.records[0].error)
    assert summarize(outcome)["failed"] == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_ends_once_and_gives_its_blocks_back(depth: int) -> None:
    """In a pool so small that requests are preempted."""
    requests = with_arrivals(random_requests(40, 20, 12, 0.5, seed=3), arrivals(40, 4.0))
    outcome = simulate(cluster(depth=depth, num_blocks=20), requests)
    assert [len(r.times) for r in outcome.records] == [r.output_len for r in requests]
    assert all(r.times[0] > r.arrival for r in outcome.records)
    assert all(list(r.times) == sorted(r.times) for r in outcome.records)
    assert outcome.ranks[0].kv_end == 0.0
    assert outcome.ranks[0].preemptions == sum(r.preemptions for r in outcome.records) > 0
    assert "blocks" in outcome.ranks[0].obstacles


def test_the_same_run_twice() -> None:
    requests = with_arrivals(random_requests(60, 20, 8, 0.5), arrivals(60, 5.0, 0.5))
    made = cluster(depth=2, ranks=3, affinity="prefix")
    assert summarize(simulate(made, requests)) == summarize(simulate(made, requests))


def test_more_ranks_are_never_slower() -> None:
    requests = random_requests(64, 20, 8, 0.5, seed=1)
    ends = [simulate(cluster(ranks=n, max_num_seqs=2), requests).seconds for n in (1, 2, 4, 8, 16)]
    assert ends == sorted(ends, reverse=True) and ends[0] > 4 * ends[-1]


def test_host_memory_brings_back_what_the_pool_forgot() -> None:
    """Two talkers take turns in a pool that holds one of them."""
    page = 64
    tier = TierConfig(gib=64 * page / 2**30, page_bytes=(page,))
    turns = requests_at([10.0 * i for i in range(6)], 4, 1, prefix_len=32, prefixes=2)
    sizes = {"num_blocks": 9, "max_num_batched_tokens": 12}
    without = simulate(cluster(**sizes), turns)
    with_tier = simulate(cluster(Constant(byte_s=0.5 / (8 * page)), tier=tier, **sizes), turns)
    assert without.ranks[0].prefix_hits == 0
    figures = with_tier.ranks[0]
    assert figures.host_hits == 4 * 32 and figures.loaded_bytes == 4 * 8 * page
    # Three steps of 12 tokens, against half a second of loading and one step.
    assert [r.times[0] - r.arrival for r in without.records] == pytest.approx([3.0] * 6)
    late = [r.times[0] - r.arrival for r in with_tier.records[2:]]
    assert late == pytest.approx([1.5] * 4, abs=0.01)


def test_policies_differ_where_they_should() -> None:
    """A talk that came twice returns among prompts seen once: ARC keeps it, LRU does not."""
    page = 64

    def hits(policy: str) -> int:
        tier = TierConfig(gib=24 * page / 2**30, page_bytes=(page,), policy=policy)
        talk = requests_at([0.0, *(5.0 + 100 * i for i in range(8))], 4, 1, prefix_len=16)
        scan = requests_at([100.0 * i + 10 + 5 * j for i in range(8) for j in range(4)], 24, 1)
        both = sorted([*talk, *scan], key=lambda r: r.arrival)
        return simulate(cluster(num_blocks=8, tier=tier), both).ranks[0].host_hits

    assert hits("arc") > hits("lru")


def test_thousands_of_ranks() -> None:
    outcome = simulate(cluster(ranks=4096, num_blocks=16), fixed_requests(64, 4, 2))
    assert max(rank.requests for rank in outcome.ranks) == 1
    assert token_times(outcome) == [[1.0, 2.0]] * 64


def test_queue_lengths() -> None:
    outcome = simulate(cluster(max_num_seqs=1), requests_at([0.0, 0.0, 0.0, 4.0], 4, 1))
    # Three came at once: two wait until 1, one until 2; the last finds nobody.
    assert queue_lengths(outcome.records) == {
        "mean": pytest.approx(3 / 4), "peak": 3.0, "last_arrival": 0.0, "half_time": 0.0
    }  # fmt: skip


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="ranks"):
        simulate(cluster(ranks=0), [])
    with pytest.raises(ValueError, match="affinity"):
        simulate(cluster(affinity="rank"), [])
    with pytest.raises(ValueError, match="cpu_offload_gib"):
        simulate(cluster(tier=TierConfig(1e-9, (64,))), fixed_requests(1, 4, 1))
