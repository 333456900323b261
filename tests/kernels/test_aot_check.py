"""The aot-check command's words and verdicts, over figures as the compiler would give them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from testdata import CONFIGS

from jaxengine.cli import aot_check
from jaxengine.lab.aot import aot_step

LLAMA = str(CONFIGS / "Llama-3.1-8B")


def test_bad_configs_are_named(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        aot_check.read_config(str(tmp_path))
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        aot_check.read_config(str(tmp_path))
    file.write_text("[]")
    assert aot_check.run_aot_check(str(tmp_path)) == 2
    assert "holds list instead of a JSON object" in capsys.readouterr().err
    file.write_text('{"model_type": "llama"}', encoding="utf-8-sig")  # as some editors save it
    assert aot_check.read_config(str(tmp_path)) == {"model_type": "llama"}


def figures(case: dict[str, Any], spills: int = 0, weights: int = 15 << 30) -> dict[str, Any]:
    """Of a llama of 8B in blocks of 8 MiB."""
    kernel = {"registers": 128, "spill_bytes": spills, "shared": 1024}
    more = {"kernels": [kernel], "temp": 1 << 30, "copies": 0, "weights": weights, "pairs": []}
    return {**case, **more, "cache_bytes": aot_check.STEP_BLOCKS * (8 << 20), "layers": 32}


def compiled(monkeypatch: pytest.MonkeyPatch, **more: int) -> None:
    monkeypatch.setattr(
        aot_step, "compile_steps", lambda cases: (figures(c, **more) for c in cases)
    )


def test_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(monkeypatch)
    assert aot_check.run_aot_check(LLAMA) == 0
    text = capsys.readouterr().out
    assert "decode step of 256 tokens" in text and "KV blocks" in text
    assert aot_check.run_aot_check(LLAMA, json_output=True) == 0
    said = json.loads(capsys.readouterr().out)
    # 141 GiB * 0.92 less 15 GiB of weights and 1 GiB of temporaries, in blocks of 8 MiB.
    assert said["block_bytes"] == 8 << 20 and said["blocks"] == pytest.approx(14_541, abs=50)
    assert len(said["cases"]) == len(aot_check.DECODE_ROWS) + 1


def test_spills_and_lack_of_memory_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled(monkeypatch, spills=8)
    assert aot_check.run_aot_check(LLAMA) == 1
    compiled(monkeypatch, weights=140 << 30)
    assert aot_check.run_aot_check(LLAMA, "a100") == 1
    assert "does not fit" in capsys.readouterr().out
    assert aot_check.run_aot_check(LLAMA, "v100") == 2
    assert "target must be one of" in capsys.readouterr().err


def test_two_halves_are_compiled_where_asked_for() -> None:
    mesh = aot_check.Mesh(tensor_parallel_size=2, enable_dbo=True)
    config = aot_check.read_config(LLAMA)
    found = aot_check.cases(config, "h200", 64, mesh)
    assert [c["dbo"] for c in found] == [False, True] * 2
    assert all(c["layers"] == aot_check.MESH_LAYERS for c in found)
