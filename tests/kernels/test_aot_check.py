"""The aot-check command: sizes from config.json, and its words."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from jaxengine.cli import aot_check
from jaxengine.pallas_kernels import aot_cases

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "../shared/realdata/configs"


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Llama-3.1-8B", 8.03),
        ("Qwen3-8B", 8.19),
        ("Qwen3-30B-A3B", 30.5),
        ("Mixtral-8x7B-v0.1", 46.7),
        ("DeepSeek-V2-Lite", 15.7),
        ("gpt-oss-20b", 20.9),
    ],
)
def test_sizes_of_real_models(model: str, billions: float) -> None:
    s = aot_check.sizes(aot_check.read_config(str(CONFIGS / model)))
    assert s.parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_bad_configs_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        aot_check.read_config(str(tmp_path))
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        aot_check.read_config(str(tmp_path))
    with pytest.raises(ValueError, match="num_hidden_layers must be a positive integer"):
        aot_check.sizes({})


def figures(case: dict[str, Any], spills: int = 0) -> dict[str, Any]:
    kernel = {"registers": 128, "spill_bytes": spills, "shared": 1024}
    return {**case, "kernels": [kernel], "temp": 1 << 30, "copies": 0}


def test_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(aot_cases, "compile_all", lambda cases: (figures(c) for c in cases))
    model = str(CONFIGS / "Llama-3.1-8B")
    assert aot_check.run_aot_check(model) == 0
    text = capsys.readouterr().out
    assert "step of 256 tokens in 256 rows" in text and "KV blocks" in text
    assert aot_check.run_aot_check(model, json_output=True) == 0
    said = json.loads(capsys.readouterr().out)
    # 141 GiB * 0.92 less 15 GiB of weights and 1 GiB of temporaries, in blocks of 8 MiB.
    assert said["block_bytes"] == 8 << 20 and said["blocks"] == pytest.approx(14_541, abs=50)


def test_spills_and_lack_of_memory_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(CONFIGS / "Llama-3.1-8B")
    monkeypatch.setattr(aot_cases, "compile_all", lambda cases: (figures(c, 8) for c in cases))
    assert aot_check.run_aot_check(model) == 1
    monkeypatch.setattr(aot_cases, "compile_all", lambda cases: (figures(c) for c in cases))
    big = str(CONFIGS / "Llama-3.3-70B-Instruct")
    assert aot_check.run_aot_check(big, "a100") == 1
    assert "does not fit" in capsys.readouterr().out
    assert aot_check.run_aot_check(model, "v100") == 2
    assert "target must be one of" in capsys.readouterr().err
