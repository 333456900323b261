"""What is joined reads as if it had come in one step."""

from __future__ import annotations

from jaxengine.front.messages_in import join_outputs
from jaxengine.wire.messages import EngineOutput, EngineOutputs, EngineStats, TokenLogprobs


def _scores(*tokens: int) -> list[TokenLogprobs]:
    return [TokenLogprobs([t], [-0.5], 1) for t in tokens]


def test_tokens_scores_and_ends_are_joined() -> None:
    first = EngineOutputs(
        3,
        [
            EngineOutput("a", [1], _scores(1), times=(1.0, 2.0), num_cached_tokens=16),
            EngineOutput("b", [5]),
        ],
        EngineStats(num_running=2),
    )
    second = EngineOutputs(
        3,
        [
            EngineOutput("a", [2, 3], _scores(2, 3), finish_reason="stop", stop_reason=7),
            EngineOutput("c", [9], prompt_logprobs=[None]),
        ],
    )
    both = join_outputs(first, second)
    a, b, c = both.outputs
    assert (a.new_token_ids, a.logprobs) == ([1, 2, 3], _scores(1, 2, 3))
    assert (a.finish_reason, a.stop_reason) == ("stop", 7)
    assert (a.times, a.num_cached_tokens) == ((1.0, 2.0), 16)
    assert (b.new_token_ids, b.finish_reason) == ([5], None)
    assert (c.new_token_ids, c.prompt_logprobs) == ([9], [None])
    assert both.engine_index == 3 and both.stats == EngineStats(num_running=2)
    assert join_outputs(both, EngineOutputs(3, [], EngineStats())).stats == EngineStats()


def test_an_id_that_is_used_again_is_another_request() -> None:
    ended = EngineOutputs(0, [EngineOutput("a", [1], finish_reason="stop")])
    both = join_outputs(ended, EngineOutputs(0, [EngineOutput("a", [2])]))
    both = join_outputs(both, EngineOutputs(0, [EngineOutput("a", [3])]))
    assert [(o.new_token_ids, o.finish_reason) for o in both.outputs] == [
        ([1], "stop"),
        ([2, 3], None),
    ]


def test_an_error_after_tokens_keeps_the_tokens() -> None:
    both = join_outputs(
        EngineOutputs(0, [EngineOutput("a", [1])]),
        EngineOutputs(0, [EngineOutput("a", [], finish_reason="error", error="why")]),
    )
    (a,) = both.outputs
    assert (a.new_token_ids, a.finish_reason, a.error) == ([1], "error", "why")


def test_no_field_is_forgotten() -> None:
    """Every field of a later output survives behind an earlier, empty one."""
    later = EngineOutput(
        "a", [2], _scores(2), [None], "stop", 7, 3, "why", (1.0, 2.0), 4, 5, embedding=b"x"
    )
    assert all(getattr(later, name) for name in EngineOutput.__struct_fields__)
    both = join_outputs(EngineOutputs(0, [EngineOutput("a", [])]), EngineOutputs(0, [later]))
    assert both.outputs == [later]


def test_stays_of_blocks_are_all_kept() -> None:
    def stats(*seconds: float) -> EngineStats:
        return EngineStats(num_steps=len(seconds), block_seconds={"idle": list(seconds)})

    both = join_outputs(EngineOutputs(0, [], stats(1.0)), EngineOutputs(0, [], stats(2.0, 3.0)))
    assert both.stats is not None and both.stats.num_steps == 2
    assert both.stats.block_seconds == {"idle": [1.0, 2.0, 3.0]}
