"""Lookup in tables of configurations."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from jaxengine.lab.aot import tune
from jaxengine.pallas_kernels import tuning

ENTRIES: list[dict[str, Any]] = [
    {"key": {"dim": 64, "rows_bucket": 1}, "config": {"stages": 2}, "us": 5.0},
    {"key": {"dim": 64, "rows_bucket": 512}, "config": {"stages": 4}, "us": 9.0},
    {"key": {"dim": 64, "rows_bucket": 512}, "config": {"stages": 3}, "us": 10.0},
]


def test_nearest_bucket_and_fastest() -> None:
    assert tuning.nearest(ENTRIES, {"dim": 64, "rows_bucket": 3}) == {"stages": 2}
    assert tuning.nearest(ENTRIES, {"dim": 64, "rows_bucket": 300}) == {"stages": 4}
    assert tuning.nearest(ENTRIES, {"dim": 128, "rows_bucket": 1}) is None


def test_unmeasured_entries_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    key = {"dim": 64, "rows_bucket": 1}
    untimed = ({**ENTRIES[0], "us": None},)
    monkeypatch.setattr(tuning, "load", lambda folder, op: untimed)
    assert tuning.measured("moe", key) is None
    monkeypatch.setattr(tuning, "load", lambda folder, op: tuple(ENTRIES))
    assert tuning.measured("moe", key) == {"stages": 2}


def test_broken_table_is_named(tmp_path: pathlib.Path) -> None:
    assert tuning.load(str(tmp_path), "none") == ()
    (tmp_path / "moe.json").write_text(json.dumps({"op": "moe"}))
    with pytest.raises(ValueError, match=r"moe\.json is no table"):
        tuning.load(str(tmp_path), "moe")


def test_candidates_are_of_known_ops() -> None:
    for op in ("paged_attention", "moe", "quant_matmul"):
        assert len(tune.candidates(op)) > 4
    with pytest.raises(ValueError, match="no candidates"):
        tune.candidates("rope")
