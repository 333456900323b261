"""What cannot draft for a model is refused in one sentence, before anything is loaded."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest
import tokenizers
from testdata import GOLDENS

from jaxengine.config import EngineConfig
from jaxengine.parallel.layout import StepLayout
from jaxengine.runner.draft import draft_store
from jaxengine.runner.draft.draft_head import DraftConfig, init_params
from jaxengine.runner.draft.draft_store import Draft
from jaxengine.runner.draft.eagle import is_recurrent
from jaxengine.runner.draft.open_drafter import Target, find_drafter
from jaxengine.runner.draft.second_model import check_fits
from jaxengine.weights.load import load_spec
from jaxengine.weights.resolve import resolve_model


def target(model: pathlib.Path) -> Target:
    files = resolve_model(str(model))
    return Target(files, load_spec(files), "float32", StepLayout(), 16)


def refusal(model: pathlib.Path, setting: dict[str, Any], **settings: Any) -> str:
    config = EngineConfig.of(
        model=str(model), speculative_config={"num_speculative_tokens": 2, **setting}, **settings
    )
    with pytest.raises(ValueError) as error:
        find_drafter(config, target(model))
    text = str(error.value)
    assert text.startswith("speculative_config.m") and "\n" not in text
    return text


def head_of_another_model(folder: pathlib.Path, width: int) -> str:
    config = DraftConfig(320, width, 8, 1, 320, 3, target="other", fingerprint="0")
    draft_store.save(folder, Draft(config, init_params(config, 0), np.arange(320, dtype=np.int32)))
    return str(folder)


def test_heads_of_other_models(tmp_path: pathlib.Path) -> None:
    llama = GOLDENS / "llama"
    text = refusal(llama, {"method": "eagle", "model": str(tmp_path / "none")})
    assert "none/config.json cannot be read" in text
    folder = head_of_another_model(tmp_path / "width", 32)
    assert "width 32" in refusal(llama, {"method": "eagle", "model": folder})
    config = tmp_path / "width" / "config.json"
    config.write_text(config.read_text(), encoding="utf-8-sig")  # as some editors save it
    assert "width 32" in refusal(llama, {"method": "eagle", "model": folder})
    folder = head_of_another_model(tmp_path / "weights", 64)
    assert "other weights" in refusal(llama, {"method": "eagle", "model": folder})


def test_a_published_head_is_told_from_ours_whatever_saved_it(tmp_path: pathlib.Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["LlamaForCausalLMEagle3"]}', encoding="utf-8-sig")
    assert not is_recurrent(str(tmp_path))
    ours = head_of_another_model(tmp_path / "ours", 32)
    assert is_recurrent(ours)


def copy_of(model: str, folder: pathlib.Path, words: list[str]) -> pathlib.Path:
    shutil.copytree(GOLDENS / model, folder)
    vocab = {word: i for i, word in enumerate(words)}
    tk = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=words[0]))
    tk.save(str(folder / "tokenizer.json"))
    return folder


def test_models_of_other_vocabularies(tmp_path: pathlib.Path) -> None:
    one = copy_of("llama", tmp_path / "one", ["a", "b", "c"])
    two = copy_of("qwen2", tmp_path / "two", ["a", "c", "b"])
    same = copy_of("qwen2", tmp_path / "same", ["a", "b", "c"])
    text = refusal(one, {"method": "draft_model", "model": str(two)})
    assert "2 tokens differ, the first is 'b'" in text
    assert "no hub id" in refusal(one, {"method": "draft_model", "model": str(tmp_path / "x.gguf")})
    config = EngineConfig.of(
        model=str(one),
        speculative_config={
            "method": "draft_model",
            "model": str(same),
            **{"num_speculative_tokens": 2},
        },
    )
    prospect = find_drafter(config, target(one))
    assert prospect is not None
    config_json = json.loads((same / "config.json").read_text())
    heads, layers = config_json["num_key_value_heads"], config_json["num_hidden_layers"]
    assert (
        prospect.token_bytes
        == 2 * 4 * heads * load_spec(resolve_model(str(same))).head_dim * layers
    )


def test_models_that_do_not_fit_under_the_targets_blocks() -> None:
    llama, window = (
        load_spec(resolve_model(str(GOLDENS / m))) for m in ("llama", "mistral-window")
    )
    with pytest.raises(ValueError, match=r"x has \d+ positions, fewer than max_model_len 9999"):
        check_fits(llama, llama, 9999, "x")
    with pytest.raises(ValueError, match="cannot lie under the target's block tables"):
        check_fits(llama, window, 64, "x")
    check_fits(window, window, 64, "x")
    gemma = load_spec(resolve_model(str(GOLDENS / "gemma3")))  # full attention and windows
    check_fits(llama, gemma, 64, "x")


def test_extra_layers_that_are_not_there() -> None:
    text = refusal(GOLDENS / "llama", {"method": "mtp"})
    assert "num_nextn_predict_layers 1; llama is llama with 0" in text


@pytest.mark.parametrize("name", ["tensor_parallel_size", "kv_offloading_size"])
def test_settings_that_do_not_go_together(name: str) -> None:
    text = refusal(GOLDENS / "deepseek-v3", {"method": "mtp"}, **{name: 2})
    assert text.endswith(f"mtp does not work with {name}; leave one of them out")


def test_nothing_to_open() -> None:
    llama = GOLDENS / "llama"
    for setting in (None, {"method": "ngram", "num_speculative_tokens": 2},
                    {"method": "mtp", "num_speculative_tokens": 0}):  # fmt: skip
        config = EngineConfig.of(model=str(llama), speculative_config=setting)
        assert find_drafter(config, target(llama)) is None
