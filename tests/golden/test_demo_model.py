"""The demo model against llama.cpp's ids and transformers' float32 logits."""

import json

import pytest
from testdata import GOLDENS

from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.sampling_params import SamplingParams
from jaxengine.text.chat_template import render_messages
from jaxengine.text.tokenizer import load_tokenizer
from jaxengine.weights.resolve import resolve_model
from jaxengine.wire.messages import EngineRequest

GOLDEN = json.loads((GOLDENS / "smollm2-135m-instruct-q4_1.json").read_text())
SURE = 0.01  # margin above which another float32 implementation must agree


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model("demo"))


def test_tokenization(tokenizer) -> None:
    for row in GOLDEN["tokenization"]:
        assert tokenizer.encode(row["text"]) == row["ids"], row["text"]


def test_prompts(tokenizer) -> None:
    for case in GOLDEN["cases"]:
        if "messages" in case:
            text = render_messages(
                tokenizer.chat_template,
                case["messages"],
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                add_generation_prompt=True,
            )
            assert text == case["prompt_text"]
            assert tokenizer.encode(text, add_special_tokens=False) == case["prompt"]
        else:
            assert tokenizer.encode(case["text"]) == case["prompt"]


@pytest.mark.slow
def test_float32_matches_the_reference() -> None:
    core = EngineCore(
        EngineConfig.of(
            model="demo",
            dtype="float32",
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            warmup="lazy",
        )
    )
    got: dict[str, dict[str, list]] = {}
    try:
        for i, case in enumerate(GOLDEN["cases"]):
            params = SamplingParams(
                temperature=0,
                max_tokens=len(case["greedy"]),
                logprobs=5,
                prompt_logprobs=0,
                ignore_eos=True,
            )
            got[str(i)] = {"ids": [], "logprobs": [], "prompt": []}
            core.add_request(
                EngineRequest(
                    request_id=str(i),
                    prompt_token_ids=case["prompt"],
                    params=params,
                    arrival_time=0.0,
                )
            )
        while core.has_work():
            for output in core.step():
                assert output.error is None, output.error
                got[output.request_id]["ids"] += output.new_token_ids
                got[output.request_id]["logprobs"] += output.logprobs or []
                got[output.request_id]["prompt"] += output.prompt_logprobs or []
            core.scheduler.check_integrity()
    finally:
        core.shutdown()
    for i, case in enumerate(GOLDEN["cases"]):
        check_case(case, got[str(i)])


def check_case(case: dict, got: dict[str, list]) -> None:
    prompt = [entry.logprobs[0] for entry in got["prompt"][1:]]
    assert prompt == pytest.approx(case["prompt_logprobs"][1:], abs=5e-3)
    # Up to the first uncertain choice both must go the same way.
    sure = 0
    while sure < len(case["greedy"]) and case["margins"][sure] > SURE:
        sure += 1
    assert got["ids"][:sure] == case["greedy"][:sure]
    same = 0
    while same < len(case["greedy"]) and got["ids"][same] == case["greedy"][same]:
        same += 1
    values = [entry.logprobs[0] for entry in got["logprobs"][:same]]
    assert values == pytest.approx(case["greedy_logprobs"][:same], abs=5e-3)
