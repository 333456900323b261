"""`--speculative-config` and the schedule made of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.speculate.config import parse_speculative_config
from jaxengine.speculate.schedule import choices, compile_schedule, reachable_shapes, width_of

TABLE = "num_speculative_tokens_per_batch_size"
K2 = {"num_speculative_tokens": 2}


def table(*ranges: list[Any], **more: Any) -> dict[str, Any]:
    return {"method": "ngram", TABLE: list(ranges), **more}


def test_the_example_compiles_to_a_dense_list() -> None:
    text = f'{{"method": "ngram", "{TABLE}": [[17, 64, 3], [1, 16, 5], [65, 256, 1]]}}'
    config = parse_speculative_config(text)
    assert config.num_speculative_tokens == 5
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (5, 5)
    dense = compile_schedule(config, 300)
    assert [dense[n] for n in (1, 16, 17, 64, 65, 256, 300)] == [5, 5, 3, 3, 1, 1, 1]
    assert compile_schedule(config, 20) == dense[:21]
    static = parse_speculative_config({"method": "ngram", "num_speculative_tokens": 3})
    assert compile_schedule(static, 4) == [0, 3, 3, 3, 3]


@pytest.mark.slow
def test_cost_of_the_lookup() -> None:
    """Prints the time of one lookup (goal 1 us)."""
    dense = compile_schedule(parse_speculative_config(table([1, 9, 5], [10, 256, 2])), 256)
    began = time.perf_counter()
    total = sum(dense[n] for n in range(1, 257) for _ in range(100))
    assert total == 100 * (9 * 5 + 247 * 2)
    seconds = (time.perf_counter() - began) / 25_600
    print(f"lookup: {seconds * 1e9:.0f} ns")
    assert seconds < 10e-6


BAD = {
    "overlap": (table([1, 4, 3], [4, 9, 1]), "overlap at batch size 4"),
    "gap": (table([1, 4, 3], [6, 9, 1]), "sizes 5 to 5 are in no range"),
    "inverted": (table([4, 1, 3]), "4 to 1 is inverted"),
    "start": (table([2, 4, 3]), "start at batch size 1"),
    "negative": (table([1, 4, -1]), "at least 0, got -1"),
    "fraction": (table([1, 4, 1.5]), "got 1.5"),
    "form": (table([1, 4]), r"\[1, 4\] is not of the form"),
    "empty": (table(), "not empty"),
    "above": (table([1, 4, 3], num_speculative_tokens=2), "asks for 3 drafts"),
    "field": (table([1, 4, 3], lookup=2), "no field 'lookup'"),
    "method": ({"method": "magic", "num_speculative_tokens": 2}, "method must be one of"),
    "nothing": ({"method": "ngram"}, "needs num_speculative_tokens"),
    "many": ({"method": "ngram", "num_speculative_tokens": 129}, "more than the 128"),
    "lookup": (table([1, 1, 1], prompt_lookup_min=3, prompt_lookup_max=2), "min 3 is more"),
    "zero": (table([1, 1, 1], prompt_lookup_min=0), "prompt_lookup_min .* at least 1"),
    "adaptive": (table([1, 1, 1], adaptive="yes"), "adaptive must be true or false"),
    "model": ({"method": "eagle", "num_speculative_tokens": 2}, "model must name the drafter"),
    "no name": (
        {"method": "draft_model", "model": 3, "num_speculative_tokens": 2},
        "model .* got 3",
    ),
    "own layers": ({"method": "mtp", "model": "x"}, "model is for methods eagle, draft_model"),
    "one device": (table([1, 1, 1], draft_tensor_parallel_size=2), "takes 1 or null, got 2"),
    "quantized": (table([1, 1, 1], quantization="fp8"), "quantization takes null, got 'fp8'"),
    "parallel": (table([1, 1, 1], parallel_drafting=True), "parallel_drafting takes false or null"),
    "one is true": (table([1, 1, 1], enforce_eager=1), "enforce_eager takes false or null, got 1"),
    "both": (table([1, 9, 2], disable_by_batch_size=4), "has disable_by_batch_size and num_spec"),
    "batch": ({"method": "ngram", "disable_by_batch_size": 0, **K2}, "disable_by_batch_size takes"),
    "revision": (table([1, 1, 1], revision="main"), "revision is the hub revision of the drafter"),
    "length": (table([1, 1, 1], max_model_len=0), "max_model_len takes whole numbers"),
    "depth": (table([1, 1, 1], suffix_decoding_max_tree_depth=2), "max_tree_depth .* at least 3"),
    "prob": (table([1, 1, 1], suffix_decoding_min_token_prob=2), "min_token_prob .* from 0 to 1"),
    "medusa": ({"method": "medusa", "model": "x", **K2}, "method must be one of"),
    "text": ("{", "is not JSON"),
    "list": ("[1]", "must be a JSON object"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(case: str) -> None:
    setting, message = BAD[case]
    with pytest.raises(ValueError, match=message) as error:
        parse_speculative_config(setting)
    assert str(error.value).startswith("speculative_config") and "\n" not in str(error.value)


def test_one_lookup_length_is_both() -> None:
    for name in ("prompt_lookup_min", "prompt_lookup_max"):
        config = parse_speculative_config(table([1, 1, 1], **{name: 3}))
        assert (config.prompt_lookup_min, config.prompt_lookup_max) == (3, 3)


def test_a_drafter_with_a_model() -> None:
    config = parse_speculative_config({"method": "eagle", "model": "x", **K2})
    assert config.has_model and config.model == "x"
    assert not parse_speculative_config({"method": "ngram", **K2}).has_model
    assert parse_speculative_config({"method": "mtp"}).num_speculative_tokens == 1


def test_what_users_of_vllm_send() -> None:
    """Fields that say what happens anyway are taken; names mean what they mean there."""
    config = parse_speculative_config(
        {"model": "some/EAGLE3-head", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1,
         "quantization": None, "parallel_drafting": False, "revision": "v2", "max_model_len": 99,
         "disable_by_batch_size": 8, "draft_sample_method": "greedy"}
    )  # fmt: skip
    assert (config.method, config.revision, config.max_model_len) == ("eagle", "v2", 99)
    assert compile_schedule(config, 10) == [0] + [3] * 8 + [0, 0]
    assert parse_speculative_config({"model": "some/small-model", **K2}).method == "draft_model"
    assert parse_speculative_config({"model": "ngram", **K2}).method == "ngram"
    assert parse_speculative_config({"model": "ngram", "method": "ngram", **K2}).model == ""
    assert parse_speculative_config({"model": "x", "method": "eagle3", **K2}).method == "eagle"
    assert parse_speculative_config({"method": "ngram_gpu", **K2}).method == "ngram"
    suffix = parse_speculative_config(
        {"method": "suffix", "suffix_decoding_max_tree_depth": 9, "suffix_decoding_min_token_prob":
         0.5, "suffix_decoding_max_cached_requests": 0}
    )  # fmt: skip
    assert suffix.num_speculative_tokens == 7 and not suffix.suffix.shares
    assert (suffix.suffix.max_tree_depth, suffix.suffix.min_token_prob) == (9, 0.5)


def test_few_programs() -> None:
    assert [width_of(k) for k in (1, 2, 3, 4, 5, 6, 7, 9)] == [1, 2, 3, 5, 5, 7, 7, 9]
    assert choices(4) == (0, 1, 2, 3, 4) and choices(0) == (0,)
    dense = compile_schedule(parse_speculative_config(table([1, 2, 5], [3, 4, 0], [5, 8, 1])), 8)
    shapes = reachable_shapes(dense, (1, 2, 4, 8), adaptive=False)
    assert shapes[0] == (1, 5) and set(shapes) == {(1, 5), (2, 5), (8, 1)}
    assert {(1, 1), (1, 2), (1, 3), (1, 5)} <= set(reachable_shapes(dense, (1, 2, 4, 8), True))


def test_settings_that_cannot_work_together_are_refused_before_anything_is_loaded() -> None:
    spec = {"method": "ngram", "num_speculative_tokens": 2}
    for clash in ({"pipeline_parallel_size": 2}, {"attention_data_parallel_size": 2}):
        config = EngineConfig.of(model="nowhere", speculative_config=spec, **clash)
        with pytest.raises(ValueError, match=f"does not work with {next(iter(clash))}"):
            EngineCore(config)
