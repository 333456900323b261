"""Requests in: tokenizing, fan-out, bad words, defaults (B60), refusals (B03, B15, B48)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from toys import BYTE_VOCAB, byte_tokenizer, sp_tokenizer

from jaxengine.sampling_params import SamplingParams
from jaxengine.settings.generation import default_params
from jaxengine.text.processor import InputProcessor
from jaxengine.validation import Limits, RequestError
from jaxengine.wire.messages import EngineRequest

TOY = byte_tokenizer(merges=(("a", "b"),))
LIMITS = Limits(max_model_len=64, vocab_size=BYTE_VOCAB)


def _inputs(**generation: Any) -> InputProcessor:
    return InputProcessor(TOY, LIMITS, generation)  # type: ignore[arg-type]


def test_text_and_ids_and_both() -> None:
    inputs = _inputs()
    plain = inputs.process("r", "hi")
    assert plain.prompt_token_ids == TOY.encode("hi")
    assert plain.prompt_token_ids[0] == TOY.bos_id
    assert inputs.process("r", {"prompt": "hi"}).prompt_token_ids == plain.prompt_token_ids
    bare = inputs.process("r", {"prompt": "hi", "add_special_tokens": False})
    assert bare.prompt_token_ids == TOY.encode("hi", add_special_tokens=False)
    ids = inputs.process("r", {"prompt": "shown", "prompt_token_ids": [1, 2]})
    assert (ids.prompt, ids.prompt_token_ids) == ("shown", [1, 2])
    assert inputs.process("r", [299]).prompt_token_ids == [299]  # in the logits, not the tokenizer


def test_request_carries_everything_over_the_wire() -> None:
    params = SamplingParams(max_tokens=5, seed=7, bad_words=["ab"])
    done = _inputs().process("r", "hi", params, priority=3, cache_salt="s", arrival_time=12.5)
    [request] = done.requests
    assert request.eos_token_ids == list(TOY.eos_ids)
    assert (request.priority, request.cache_salt, request.arrival_time) == (3, "s", 12.5)
    assert (request.params.seed, request.params.max_tokens) == (7, 5)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest)
    assert again == request


def test_n_fans_out_with_seeds_of_their_own() -> None:
    params = SamplingParams(n=3, seed=2**64 - 2, prompt_logprobs=1)
    done = _inputs().process("r", "hi", params)
    assert [r.request_id for r in done.requests] == ["0_r", "1_r", "2_r"]
    assert [r.params.seed for r in done.requests] == [2**64 - 2, 2**64 - 1, 0]
    assert [r.params.n for r in done.requests] == [1, 1, 1]
    assert [r.params.prompt_logprobs for r in done.requests] == [1, None, None]
    assert [r.params.skip_reading_prefix_cache for r in done.requests] == [True, False, False]
    assert done.params.n == 3
    msgspec.msgpack.encode(done.requests)


def test_bad_words_plain_and_after_a_space() -> None:
    [request] = _inputs().process("r", "x", SamplingParams(bad_words=["ab"])).requests
    # byte-level: " ab" has one token more, so only the plain form
    assert request.bad_words_token_ids == [TOY.encode("ab", add_special_tokens=False)]
    toy = byte_tokenizer(merges=(("Ġ", "q"),))
    inputs = InputProcessor(toy, LIMITS)  # type: ignore[arg-type]
    [request] = inputs.process("r", "x", SamplingParams(bad_words=["q"])).requests
    assert request.bad_words_token_ids == [
        [toy.tk.token_to_id("q")],
        [toy.tk.token_to_id("Ġq")],
    ]
    sp = InputProcessor(sp_tokenizer(), LIMITS)  # type: ignore[arg-type]
    assert sp.process("r", "x", SamplingParams(bad_words=["x"])).requests[0].bad_words_token_ids


def test_b15_bad_words_that_ban_all_allowed_ids() -> None:
    [token] = TOY.encode("ab", add_special_tokens=False)
    other = token - 1
    with pytest.raises(RequestError) as caught:
        _inputs().process("r", "x", SamplingParams(allowed_token_ids=[token], bad_words=["ab"]))
    assert caught.value.field == "bad_words"
    ok = SamplingParams(allowed_token_ids=[token, other], bad_words=["ab"])
    assert _inputs().process("r", "x", ok).requests


@pytest.mark.parametrize(
    "prompt", ["", [], {}, {"prompt": 5}, "\ud800", [BYTE_VOCAB], [-1], "x" * 64, None, 5, [[1]]]
)
def test_prompts_that_are_refused(prompt: Any) -> None:
    inputs = InputProcessor(byte_no_bos(), LIMITS)
    with pytest.raises(RequestError) as caught:
        inputs.process("r", prompt)
    assert caught.value.field == "prompt"


def byte_no_bos() -> Any:
    toy = byte_tokenizer()
    toy.bos_id = None
    return toy


def test_huge_text_is_refused_without_tokenizing() -> None:
    with pytest.raises(RequestError, match="at least"):  # counted from the length, not exactly
        _inputs().process("r", "word " * 4_000_000)


def test_truncation_keeps_the_end() -> None:
    params = SamplingParams(truncate_prompt_tokens=3)
    assert _inputs().process("r", "abcdefgh", params).prompt_token_ids == TOY.encode("fgh")[-3:]
    assert _inputs().process("r", [1, 2, 3, 4], params).prompt_token_ids == [2, 3, 4]
    whole = SamplingParams(truncate_prompt_tokens=-1)
    assert len(_inputs().process("r", "x" * 500, whole).prompt_token_ids) == 63


def test_max_tokens_fills_the_context() -> None:
    done = _inputs().process("r", [1] * 10, SamplingParams(max_tokens=None))
    assert done.requests[0].params.max_tokens == 54


@pytest.mark.parametrize(
    ("field", "params"),
    [("bad_words", SamplingParams(bad_words=["a"])), ("stop", SamplingParams(stop="a"))],
)
def test_without_a_tokenizer(field: str, params: SamplingParams) -> None:
    inputs = InputProcessor(None, LIMITS)
    assert inputs.process("r", [1, 2]).requests[0].eos_token_ids == []
    with pytest.raises(RequestError, match="token ids"):
        inputs.process("r", "text")
    with pytest.raises(RequestError) as caught:
        inputs.process("r", [1], params)
    assert caught.value.field == field


def test_b60_request_over_generation_config_over_built_in() -> None:
    generation = {
        "temperature": 0.6,
        "top_k": 1,
        "repetition_penalty": 1.3,
        "top_p": None,
        "eos_token_id": [3, 4],
        "do_sample": True,
        "max_new_tokens": 99,
    }
    defaults = default_params(generation)
    assert defaults == SamplingParams(
        temperature=0.6, top_k=1, repetition_penalty=1.3, max_tokens=99
    )
    inputs = _inputs(**generation)
    assert inputs.process("r", [1]).params.repetition_penalty == 1.3
    asked = {"temperature": 1.0, "repetition_penalty": 1.0, "top_k": 0}
    mixed = inputs.process("r", [1], msgspec.structs.replace(defaults, **asked)).params
    assert (mixed.temperature, mixed.repetition_penalty, mixed.top_k) == (1.0, 1.0, 0)
    own = inputs.process("r", [1], SamplingParams(temperature=1.5, top_k=50)).params
    assert (own.temperature, own.top_k, own.repetition_penalty) == (1.5, 50, 1.0)
    assert inputs.process("r", [1]).requests[0].eos_token_ids == list(TOY.eos_ids)
    assert default_params({}) == SamplingParams()
