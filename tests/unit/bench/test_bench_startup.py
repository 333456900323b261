"""Starts in processes of their own, with a tiny model."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxengine.bench import startup
from jaxengine.bench.startup_child import _build_phases

LLAMA = pathlib.Path(__file__).resolve().parents[4] / "shared" / "goldens" / "llama"


def test_phases_of_the_engines_account() -> None:
    assert _build_phases("1.2 load, 3.4 after") == {"load_s": 1.2, "compile_s": 3.4}
    assert _build_phases("") == {}


@pytest.mark.slow
def test_a_start_that_fails_is_told() -> None:
    with pytest.raises(ValueError, match="did not start"):
        startup.main(["--model", "/nowhere"])


@pytest.mark.slow
@pytest.mark.skipif(not LLAMA.is_dir(), reason="the shared models are not here")
def test_cold_and_warm(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s.json"
    argv = ["--model", str(LLAMA), "--max-model-len", "64", "--max-num-seqs", "2", "--server"]
    argv += ["--max-num-batched-tokens", "32", "--skip-tokenizer-init"]
    assert startup.main([*argv, "--output-json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(r["start"], r["of"]) for r in rows] == [
        ("cold", "engine"), ("warm", "engine"), ("cold", "server"), ("warm", "server"),
    ]  # fmt: skip
    for row in rows[:2]:
        assert 0 < row["import_s"] < row["ready_s"] < row["first_answer_s"] <= row["all_programs_s"]
    for row in rows[2:]:
        assert 0 < row["ready_s"] < row["first_answer_s"]
    assert all(row["peak_rss_mib"] > 100 for row in rows)
    # CPU time, as the machine may be busy: a warm start compiles nothing.
    assert rows[1]["first_answer_cpu_s"] < rows[0]["first_answer_cpu_s"]
