"""The cost model orders choices as the hardware's rates do."""

from __future__ import annotations

import pytest

from jaxengine.parallel import cost


@pytest.mark.parametrize("decode", [True, False])
def test_gain_grows_to_a_threshold(decode: bool) -> None:
    table = cost.gain_table(8, decode=decode)
    assert table[0].gain < 1 < table[-1].gain < 2  # two halves cannot more than double
    limit = cost.threshold(8, decode=decode)
    assert limit is not None and 32 <= limit <= 2048
    below = cost.overlap_gain(limit // 2, 8, decode=decode)
    assert below.gain <= 1 < cost.overlap_gain(limit, 8, decode=decode).gain


def test_the_table_names_thresholds() -> None:
    text = cost.describe(8)
    assert f"from {cost.threshold(8, decode=True)} tokens; the default threshold is 32" in text
    assert f"from {cost.threshold(8, decode=False)} tokens; the default threshold is 512" in text


def test_prefill_gains_most_where_the_link_is_slow() -> None:
    slow = cost.Machine(link=50e9)
    fast = cost.overlap_gain(4096, 8, decode=False)
    assert cost.overlap_gain(4096, 8, decode=False, machine=slow).halves > fast.halves
    # A link without cost leaves nothing to hide.
    free = cost.Machine(link=1e18, latency=0.0, conditional=0.0)
    assert cost.overlap_gain(4096, 8, decode=False, machine=free).gain < 1.05


def test_exchange_by_size() -> None:
    shape = (8, 7168, 2, 256, 64)  # DeepSeek-V3 over 64 devices
    assert cost.choose_exchange(1, *shape) == ("allgather", 1)
    backend, rows = cost.choose_exchange(4096, *shape)
    assert backend == "all_to_all" and rows < 1024
    assert cost.choose_exchange(4, 2, 512, 2, 8, 8)[0] == "allgather"
    assert not cost.sliced_is_faster(1, *shape)
    assert cost.sliced_is_faster(65536, *shape)
    with pytest.raises(ValueError, match="allgather, all_to_all or ragged"):
        cost.exchange_seconds(
            cost.H200, "smoke", tokens=1, top_k=1, width=1, itemsize=2, num_experts=8, devices=8
        )
