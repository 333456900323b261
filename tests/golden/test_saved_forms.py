"""Models saved in another form than the plain one, through the engine: the same tokens."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_goldens import run
from testdata import GOLDENS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.front.llm import LLM
from jaxengine.sampling_params import SamplingParams
from jaxengine.wire.messages import EngineRequest

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(name: str, folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    own = json.loads((GOLDENS / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, **config}), encoding="utf-8-sig")
    have = load_file(GOLDENS / name / "model.safetensors")
    save_file(
        {k: v for k, v in {**have, **tensors}.items() if v is not None},
        folder / "model.safetensors",
    )


def answers(folder: pathlib.Path, name: str) -> tuple[list[list[int]], list[list[int]]]:
    """(tokens of the model in `folder`, the golden's)."""
    cases = json.loads((GOLDENS / name / "golden.json").read_text())["cases"][:2]
    core = EngineCore(
        EngineConfig.of(
            model=str(folder), max_model_len=128, max_num_seqs=2, block_size=16, warmup="lazy"
        )
    )
    try:
        requests = [
            EngineRequest(
                request_id=str(i),
                prompt_token_ids=case["prompt"],
                arrival_time=0.0,
                params=SamplingParams(
                    temperature=0, max_tokens=len(case["greedy"]), ignore_eos=True
                ),
            )
            for i, case in enumerate(cases)
        ]
        out = run(core, requests)
    finally:
        core.shutdown()
    return [out[str(i)]["ids"] for i in range(len(cases))], [case["greedy"] for case in cases]


CASES: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray | None]]] = {
    "tied, the file holds another head": ("llama", {"tie_word_embeddings": True}, {}),
    "untied, the file holds none": ("llama-gqa-tied-bias", {"tie_word_embeddings": False}, {}),
    "other legal spellings": (
        "mistral-window",
        {
            "architectures": None,
            "hidden_size": 64.0,
            "num_key_value_heads": [2, 2, 2],
            "sliding_window": [24, 24, 24],
            "rope_theta": None,
            "rope_scaling": {"type": "default"},
            "hidden_act": "swish",
            "torch_dtype": None,
            "quantization_config": None,
        },
        {},
    ),
}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.replace(" ", "-"))
def test_same_tokens(case: str, tmp_path: pathlib.Path) -> None:
    name, config, tensors = CASES[case]
    save(name, tmp_path, config, tensors)
    got, want = answers(tmp_path, name)
    assert got == want


def test_tied_by_the_name_of_the_head(tmp_path: pathlib.Path) -> None:
    name = "llama-gqa-tied-bias"
    embed = load_file(GOLDENS / name / "model.safetensors")[EMBED]
    save(name, tmp_path, {}, {EMBED: None, HEAD: embed})
    got, want = answers(tmp_path, name)
    assert got == want


def test_end_token_that_only_config_names(tmp_path: pathlib.Path) -> None:
    """The answer ends where the model's own configuration says; defaults that cannot be are no
    reason not to start."""
    case = json.loads((GOLDENS / "llama" / "golden.json").read_text())["cases"][0]
    end = case["greedy"][2]
    save("llama", tmp_path, {"eos_token_id": [end, 2]}, {})
    Tokenizer(WordLevel({f"t{i}": i for i in range(320)}, "t0")).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": "hot", "top_k": 1, "eos_token_id": null}'
    )
    with LLM(str(tmp_path), max_model_len=128, max_num_seqs=2, block_size=16, warmup="lazy") as llm:
        [out] = llm.generate([{"prompt_token_ids": case["prompt"]}], use_tqdm=False)
    assert list(out.outputs[0].token_ids) == case["greedy"][:3]
    assert out.outputs[0].finish_reason == "stop"
