"""Independent reference outputs through the paged engine: all prompts at once, in small pieces."""

import json

import pytest
from testdata import GOLDENS

from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.sampling_params import SamplingParams
from jaxengine.wire.messages import EngineRequest, TokenLogprobs

FAMILIES = (
    "llama",
    "llama-gqa-tied-bias",
    "llama3-rope",
    "llama-yarn",
    "llama-linear-rope",
    "mistral-window",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "smollm3",
    "granite",
    "olmo2",
    "mixtral",
    "qwen3-moe",
    "olmoe",
    "deepseek-v2",
    "deepseek-v3",
    "gpt-oss",
)
# Few rows: each size of a batch is a program to compile, for every family.
SHAPES = {
    "chunks-of-8": {"block_size": 4, "max_num_batched_tokens": 8, "max_num_seqs": 2},
    "whole": {"block_size": 16, "max_num_seqs": 8},
}
# The rest is for the long suite: every run compiles its programs anew, and these are made of parts
# that others have too.
LONG = (
    "llama3-rope",
    "llama-yarn",
    "llama-linear-rope",
    "qwen2",
    "granite",
    "phi3",
    "qwen3-moe",
    "olmoe",
    "deepseek-v2",
)
BOTH = ("llama",)


def is_long(family: str, shape: str) -> bool:
    return family in LONG or (shape == "whole" and family not in BOTH)


CASES = [
    pytest.param(family, shape, marks=[pytest.mark.slow] if is_long(family, shape) else [])
    for family in FAMILIES
    for shape in SHAPES
]


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, dict[str, list]]:
    """Run to the end, checking the blocks after every step."""
    out: dict[str, dict[str, list]] = {
        r.request_id: {"ids": [], "logprobs": [], "prompt": []} for r in requests
    }
    for request in requests:
        core.add_request(request)
    while core.has_work():
        for output in core.step():
            assert output.error is None, output.error
            got = out[output.request_id]
            got["ids"] += output.new_token_ids
            got["logprobs"] += output.logprobs or []
            got["prompt"] += output.prompt_logprobs or []
        core.scheduler.check_integrity()
    assert core.scheduler.kv_usage == 0
    return out


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_golden(family: str, shape: str) -> None:
    check_golden(family, **SHAPES[shape])


def check_golden(family: str, **settings: object) -> dict[str, float]:
    """Run a family's cases all at once in an engine of these settings; the engine's figures."""
    golden = json.loads((GOLDENS / family / "golden.json").read_text())
    core = EngineCore(
        EngineConfig.of(
            model=str(GOLDENS / family),
            max_model_len=128,
            max_logprobs=8,
            warmup="lazy",
            **settings,
        )
    )
    try:
        requests = [
            EngineRequest(
                request_id=str(i),
                prompt_token_ids=case["prompt"],
                arrival_time=0.0,
                params=SamplingParams(
                    temperature=0,
                    max_tokens=len(case["greedy"]),
                    ignore_eos=True,
                    logprobs=0,
                    prompt_logprobs=8,
                ),
            )
            for i, case in enumerate(golden["cases"])
        ]
        out = run(core, requests)
        figures = core.stats().extra
    finally:
        core.shutdown()
    for i, case in enumerate(golden["cases"]):
        got = out[str(i)]
        assert got["ids"] == case["greedy"]
        values = [entry.logprobs[0] for entry in got["logprobs"]]
        assert values == pytest.approx(case["greedy_logprobs"], abs=1e-3)
        check_prompt(case, got["prompt"])
    return figures


def check_prompt(case: dict, entries: list[TokenLogprobs | None]) -> None:
    """The best 8 after every prompt position; the engine reports them with the next position."""
    assert len(entries) == len(case["prompt"]) and entries[0] is None
    for position, entry in enumerate(entries[1:]):
        assert entry is not None and entry.token_ids[0] == case["prompt"][position + 1]
        best = dict(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True))
        expected = dict(map(tuple, case["logprobs"][position]))
        for token, value in list(expected.items())[:7]:  # the eighth may tie with the ninth
            assert best[token] == pytest.approx(value, abs=1e-3)
