"""Likelihoods of the demo model against independent ones, and what cheaper formats lose."""

from __future__ import annotations

import functools
import json
import math

import pytest
from testdata import GOLDENS

from jaxengine.lab.bench.perplexity import SETTINGS, log_likelihoods, read_rows

FILE = GOLDENS / "smollm2-loglikelihood.json"
NUM_ROWS = 6
# Most that a setting may add to the perplexity of these texts; over all 24 texts of the file they
# add 0.0003, 0.021, 0.010 and 0.035.
MOST = {"bfloat16": 0.01, "int8": 0.08, "fp8-kv": 0.04, "int8-fp8-kv": 0.12}


@functools.cache
def scores(name: str) -> list[float]:
    rows = read_rows(FILE)[:NUM_ROWS]
    return log_likelihoods("demo", [row["ids"] for row in rows], SETTINGS[name])


def perplexity(name: str) -> float:
    rows = json.loads(FILE.read_text())["rows"][:NUM_ROWS]
    return math.exp(-sum(scores(name)) / sum(len(row["ids"]) - 1 for row in rows))


@pytest.mark.slow
def test_float32_is_the_reference() -> None:
    for row, score in zip(read_rows(FILE), scores("float32"), strict=False):
        assert score == pytest.approx(row["loglikelihood"], rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MOST))
def test_a_cheaper_format_loses_little(name: str) -> None:
    loss = perplexity(name) / perplexity("float32") - 1
    print(f"{name}: {loss:+.2%}")
    assert -0.02 < loss < MOST[name]
