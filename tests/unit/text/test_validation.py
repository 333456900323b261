"""B03, B26, B29: every bad value is refused with the field's name, every odd legal one works."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from jaxengine.sampling_params import SamplingParams, StructuredOutputsParams
from jaxengine.text.grammars import check_structured_outputs
from jaxengine.validation import (
    Limits,
    RequestError,
    check_cache_salt,
    check_params,
    check_priority,
    check_prompt_ids,
    fit_to_context,
)

V = 1000
LIMITS = Limits(max_model_len=64, vocab_size=V, max_logprobs=20)
NAN, INF = math.nan, math.inf

BAD: list[tuple[str, Any]] = [
    *[("temperature", x) for x in (NAN, INF, -INF, "nan", "1", -1, 100, 2.01, True, None)],
    *[("top_p", x) for x in (0, -0.1, 1.1, NAN, "0.5", INF)],
    *[("top_k", x) for x in (-2, 0.5, NAN, INF, "3", True)],
    *[("min_p", x) for x in (2, -0.1, NAN)],
    *[("presence_penalty", x) for x in (1e9, NAN, -2.1, INF, 10**400)],
    *[("frequency_penalty", x) for x in (1e9, NAN, 2.1)],
    *[("repetition_penalty", x) for x in (0, -1, NAN, INF, 1e-50, 1e300)],
    *[("seed", x) for x in (2**64, -(2**63) - 1, 1.5, "7", True)],
    *[("n", x) for x in (0, -1, 10**6, 1.5, None, True)],
    *[("logprobs", x) for x in (-2, 10**6, 21, -1, 1.5, "5")],
    *[("prompt_logprobs", x) for x in (-2, 10**6, 21, True)],
    *[("max_tokens", x) for x in (0, -1, 2.5, "5", NAN, True)],
    *[("min_tokens", x) for x in (-1, 17, 1.5)],
    *[("stop_token_ids", x) for x in ([V + 5], [-1], [2**40], [1.0], ["1"], "1", 5, [10**50])],
    *[("logit_bias", x) for x in ({V + 5: 5}, {"1005": 5}, {"-1": 5}, {"abc": 1}, {-1: 1})],
    *[("logit_bias", x) for x in ({1: NAN}, {1: INF}, {1: "5"}, [1], {2.0: 1}, {"": 1})],
    *[("allowed_token_ids", x) for x in ([V], [], [-1], [True], 3)],
    *[("bad_words", x) for x in ([""], [1], 3, ["x"] * 2000, ["\ud800"])],
    *[("stop", x) for x in ("", [""], [1], 7, "\udfff")],
    *[("truncate_prompt_tokens", x) for x in (0, -2, 64, 1.5)],
    *[("ignore_eos", x) for x in (1, "yes", None)],
    ("skip_special_tokens", 0),
    ("detokenize", "no"),
    ("skip_reading_prefix_cache", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_values_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_params(SamplingParams(**{field: value}), LIMITS)
    assert caught.value.field.split(".")[0] == field
    assert field in caught.value.message
    assert len(caught.value.message) < 300
    caught.value.message.encode()  # an error must be able to leave as JSON


GOOD: list[tuple[str, Any, Any]] = [
    ("temperature", 2, 2.0),
    ("temperature", 0.001, 0.001),
    ("top_k", -1, 0),
    ("top_k", 0, 0),
    ("top_k", 1e12, 0),
    ("top_k", V, 0),
    ("top_k", V - 1, V - 1),
    ("seed", -1, None),
    ("seed", 2**31, 2**31),
    ("seed", 2**63 - 1, 2**63 - 1),
    ("seed", 2**63, 2**63),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("seed", -(2**63), 2**63),
    ("max_tokens", 1e9, 10**9),
    ("max_tokens", None, None),
    ("logprobs", 0, 0),
    ("logprobs", 20, 20),
    ("logit_bias", {"5": 300, 6: -1000}, {5: 100.0, 6: -100.0}),
    ("stop", "END", ["END"]),
    ("truncate_prompt_tokens", -1, 63),
    ("repetition_penalty", 1e9, 1e9),
    ("stop_token_ids", [V - 1], [V - 1]),
    ("stop_token_ids", [], []),
]


@pytest.mark.parametrize(("field", "value", "expected"), GOOD)
def test_odd_legal_values(field: str, value: Any, expected: Any) -> None:
    checked = check_params(SamplingParams(**{field: value}), LIMITS)
    assert getattr(checked, field) == expected
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(checked), type=SamplingParams) == checked


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-4, 1e-5, 1e-9])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9, top_k=5, min_p=0.1)
    checked = check_params(params, LIMITS)
    assert checked.greedy
    assert checked == check_params(SamplingParams(temperature=0), LIMITS)


def test_greedy_refuses_n() -> None:
    with pytest.raises(RequestError, match="n must be 1") as caught:
        check_params(SamplingParams(temperature=0, n=2), LIMITS)
    assert caught.value.field == "n"


def test_min_tokens_within_max_tokens() -> None:
    assert check_params(SamplingParams(min_tokens=16), LIMITS).min_tokens == 16
    with pytest.raises(RequestError, match="min_tokens is 6, above max_tokens 5"):
        check_params(SamplingParams(min_tokens=6, max_tokens=5), LIMITS)
    with pytest.raises(RequestError, match="min_tokens"):
        check_params(SamplingParams(min_tokens=64, max_tokens=None), LIMITS)


def test_stop_needs_detokenize() -> None:
    with pytest.raises(RequestError) as caught:
        check_params(SamplingParams(stop="a", detokenize=False), LIMITS)
    assert caught.value.field == "stop"


def test_whole_vocabulary_logprobs_where_configured() -> None:
    limits = Limits(64, V, max_logprobs=-1)
    assert check_params(SamplingParams(logprobs=-1), limits).logprobs == V
    assert check_params(SamplingParams(prompt_logprobs=5 * V), limits).prompt_logprobs == V
    assert check_params(SamplingParams(logprobs=10), Limits(64, 10, 20)).logprobs == 10


def test_prompt_logprobs_bypass_the_prefix_cache() -> None:
    assert check_params(SamplingParams(prompt_logprobs=1), LIMITS).skip_reading_prefix_cache is True
    assert check_params(SamplingParams(), LIMITS).skip_reading_prefix_cache is False
    explicit = SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)
    assert check_params(explicit, LIMITS).skip_reading_prefix_cache is False


@pytest.mark.parametrize(
    "ids", [[1, V + 1], [V], [-3], [2**63], [1.0], [True], ["1"], "x", [], [1] * 64, None]
)
def test_bad_prompts(ids: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_prompt_ids(ids, LIMITS)
    assert caught.value.field == "prompt"


def test_prompt_length_message_has_the_numbers() -> None:
    assert len(check_prompt_ids([1] * 63, LIMITS)) == 63
    with pytest.raises(RequestError, match="64 tokens.*63.*max_model_len is 64"):
        check_prompt_ids([1] * 64, LIMITS)


def test_max_tokens_fits_the_context() -> None:
    for asked, got in ((None, 44), (10**9, 44), (44, 44), (5, 5)):
        checked = check_params(SamplingParams(max_tokens=asked), LIMITS)
        assert fit_to_context(checked, 20, LIMITS).max_tokens == got
    clipped = fit_to_context(SamplingParams(max_tokens=60, min_tokens=60), 20, LIMITS)
    assert (clipped.max_tokens, clipped.min_tokens) == (44, 44)


def test_priority_and_cache_salt() -> None:
    assert check_priority(-5) == -5
    for value in (2**70, -(2**70), 1.5, "1"):
        with pytest.raises(RequestError, match="priority"):
            check_priority(value)
    assert check_cache_salt(None) is None
    assert check_cache_salt("tenant") == "tenant"
    for salt in ("", 5):
        with pytest.raises(RequestError, match="cache_salt"):
            check_cache_salt(salt)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (StructuredOutputsParams(choice=[]), "structured_outputs.choice"),
        (StructuredOutputsParams(regex=""), "structured_outputs.regex"),
        (StructuredOutputsParams(json="{"), "structured_outputs.json"),
        (StructuredOutputsParams(json='{"extends": {}}'), "structured_outputs.json"),
        ({"regex": "a"}, "structured_outputs"),
    ],
)
def test_bad_constraints_are_named(asked: Any, named: str) -> None:
    with pytest.raises(RequestError, match=f"^{named} ") as caught:
        check_structured_outputs(SamplingParams(structured_outputs=asked))
    assert caught.value.field == "structured_outputs"


@pytest.mark.parametrize(
    ("given", "got"),
    [({}, "none"), ({"regex": "a", "json": "{}"}, "json, regex"), ({"json_object": False}, "none")],
)
def test_a_constraint_is_one(given: dict[str, Any], got: str) -> None:
    with pytest.raises(
        ValueError, match=f"^structured_outputs needs exactly one of .*; got {got}$"
    ):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1},
        {"max_tokens": 2**63},
        {"max_tokens": 10**400},
        {"max_tokens": 1e30},
        {"n": 0},
        {"top_p": 2},
        {"stop": 5},
        {"stop": "x" * 1025},
        {"logit_bias": {-1: 1}},
        {"truncation_side": "middle"},
    ],
    ids=str,
)
def test_parameters_are_checked_when_they_are_made(given: dict[str, Any]) -> None:
    [name] = given
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**given)
    assert caught.value.field == name and len(str(caught.value)) < 200


def test_constraints() -> None:
    assert check_structured_outputs(SamplingParams()) is None
    spec = check_structured_outputs(
        SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "string"}))
    )
    assert spec is not None and spec.key == ("json", '{"type":"string"}')
    pair = SamplingParams(
        allowed_token_ids=[5], structured_outputs=StructuredOutputsParams(regex="a")
    )
    with pytest.raises(RequestError, match="structured_outputs.regex") as caught:
        check_structured_outputs(pair)
    assert caught.value.field == "allowed_token_ids"
