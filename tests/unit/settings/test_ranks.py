"""Which ranks run here, what they are told, and what several look like as one."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.config import DataParallelConfig, EngineConfig
from jaxengine.settings.ranks import local_ranks, rank_config, rank_environment
from jaxengine.wire.merge import merge_ready, merge_results, merge_stats
from jaxengine.wire.messages import EngineReady, EngineStats


@pytest.mark.parametrize(
    "flags,ranks",
    [
        ({}, [0]),
        ({"size": 4}, [0, 1, 2, 3]),
        ({"size": 4, "size_local": 4}, [0, 1, 2, 3]),
        ({"size": 4, "rank": 2, "external_lb": True}, [2]),
        ({"size": 4, "rank": 3}, [3]),
        ({"size": 8, "hybrid_lb": True, "size_local": 4, "start_rank": 4}, [4, 5, 6, 7]),
        ({"size": 8, "hybrid_lb": True, "start_rank": 6}, [6, 7]),
    ],
    ids=str,
)
def test_local_ranks(flags: dict[str, Any], ranks: list[int]) -> None:
    config = DataParallelConfig(**{f"data_parallel_{k}": v for k, v in flags.items()})
    assert list(local_ranks(config)) == ranks


@pytest.mark.parametrize(
    "flags,named",
    [
        ({"size": 0}, "--data-parallel-size "),
        ({"size": 2, "rank": 2}, "--data-parallel-rank"),
        ({"size": 2, "rank": -1}, "--data-parallel-rank"),
        ({"size": 2, "external_lb": True}, "--data-parallel-rank"),
        ({"size": 2, "rank": 0, "size_local": 2}, "--data-parallel-size-local"),
        ({"size": 2, "size_local": 1}, "--data-parallel-hybrid-lb"),
        ({"size": 2, "start_rank": 1}, "--data-parallel-hybrid-lb"),
        ({"size": 2, "hybrid_lb": True, "rank": 0}, "excludes"),
        ({"size": 2, "hybrid_lb": True, "external_lb": True}, "excludes"),
        ({"size": 4, "hybrid_lb": True, "size_local": 3, "start_rank": 2}, "does not lie within"),
        ({"size": 4, "hybrid_lb": True, "size_local": 0}, "does not lie within"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_named(flags: dict[str, Any], named: str) -> None:
    config = DataParallelConfig(**{f"data_parallel_{k}": v for k, v in flags.items()})
    with pytest.raises(ValueError, match=named):
        local_ranks(config)


def test_every_rank_gets_its_own_number_and_gpus() -> None:
    config = EngineConfig.of(data_parallel_size=2, tensor_parallel_size=2)
    assert rank_config(config, 1).data_parallel.data_parallel_rank == 1
    assert rank_config(EngineConfig(), 0) == EngineConfig()
    assert rank_environment(config, 1, None, 4) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert rank_environment(config, 0, "7,5,3,1", 8) == {"CUDA_VISIBLE_DEVICES": "7,5"}
    assert rank_environment(config, 1, None, 0) == {}
    assert rank_environment(EngineConfig(), 0, None, 8) == {}
    with pytest.raises(ValueError, match="4 GPUs, 3 are visible"):
        rank_environment(config, 0, None, 3)


@pytest.mark.parametrize(
    ("settings", "each"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2}, 2),
        ({"pipeline_parallel_size": 2}, 2),
        ({"attention_data_parallel_size": 2}, 2),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4),
        ({"attention_data_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
        ({"attention_data_parallel_size": 2, "tensor_parallel_size": 4}, 8),
        (
            {
                "attention_data_parallel_size": 2,
                "tensor_parallel_size": 2,
                "pipeline_parallel_size": 2,
            },
            8,
        ),
        ({"tensor_parallel_size": 4, "nnodes": 2}, 2),  # of this node; the others have theirs
        (
            {"attention_data_parallel_size": 2, "tensor_parallel_size": 4, "nnodes": 4},
            2,
        ),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_gpus_out(settings: dict[str, Any], each: int, ranks: int) -> None:
    """A rank has as many as its engine's mesh and stages need here, and no two have the same."""
    config = EngineConfig.of(data_parallel_size=ranks, **settings)
    given = [
        rank_environment(config, i, None, ranks * each)["CUDA_VISIBLE_DEVICES"].split(",")
        for i in range(ranks)
    ]
    assert [len(own) for own in given] == [each] * ranks
    assert sum(given, []) == [str(i) for i in range(ranks * each)]
    with pytest.raises(ValueError, match=f"of {each} devices each need {ranks * each} GPUs"):
        rank_environment(config, 0, None, ranks * each - 1)


@pytest.mark.parametrize(
    "flags",
    [
        {"size": 4},
        {"size": 4, "size_local": 4},
        {"size": 4, "hybrid_lb": True, "size_local": 2, "start_rank": 2},
        {"size": 4, "rank": 3, "external_lb": True, "size_local": 1},
    ],
    ids=str,
)
def test_an_engine_of_any_mode_is_one_rank(flags: dict[str, Any]) -> None:
    """Its settings are checked where they arrive, as all settings are."""
    config = EngineConfig.of(**{f"data_parallel_{k}": v for k, v in flags.items()})
    for rank in local_ranks(config.data_parallel):
        told = rank_config(config, rank)
        assert list(local_ranks(told.data_parallel)) == [rank]
        assert told.data_parallel.data_parallel_size == 4


def test_several_engines_seen_as_one() -> None:
    parts = [EngineReady(0, 512, 100, 16, 320), EngineReady(1, 256, 50, 16, 320)]
    merged = merge_ready(parts)
    assert (merged.max_model_len, merged.num_blocks, merged.block_size) == (256, 150, 16)
    with pytest.raises(ValueError, match="320, 5"):
        merge_ready([parts[0], EngineReady(vocab_size=5)])
    stats = merge_stats(
        [
            EngineStats(num_running=2, kv_usage=0.5, num_blocks=100, extra={"a": 1.0}),
            EngineStats(num_running=1, kv_usage=0.0, num_blocks=50, pipeline_depth=2),
        ]
    )
    assert stats.num_running == 3 and abs(stats.kv_usage - 1 / 3) < 1e-9
    assert stats.extra == {"a": 1.0} and stats.pipeline_depth == 1
    assert merge_results([True, False]) is False and merge_results([True, True]) is True
    assert merge_results([None, None]) is None and merge_results([1, 2]) == [1, 2]
