"""The models command: which families run, how they are tested, and with what limits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from jaxengine.models.families import FAMILIES
from jaxengine.models.families.gguf import ARCHITECTURES

REFUSED = "GPTQ, AWQ, fp8 and bitsandbytes checkpoints; .bin files; encoders; images and audio"
# Greedy tokens of random weights only; all others' log-probabilities are compared with an
# independent implementation's at every position of five prompts.
_TOKENS_ONLY = frozenset({"qwen2_moe"})


class Row(NamedTuple):
    family: str
    architectures: str
    formats: str
    tested: str
    limits: str


def rows() -> list[Row]:
    """One row a family, in the registry's order."""
    in_gguf = {architecture: name for name, architecture in ARCHITECTURES.items()}
    found: dict[str, Row] = {}
    for architecture, family in FAMILIES.items():
        gguf = "safetensors, GGUF" if architecture in in_gguf else "safetensors"
        tested = "tokens" if family.name in _TOKENS_ONLY else "logits and tokens"
        old = found.get(family.name)
        names = architecture if old is None else f"{old.architectures}, {architecture}"
        formats = gguf if old is None else old.formats
        found[family.name] = Row(family.name, names, formats, tested, family.limits)
    return list(found.values())


def run_models(*, json_output: bool = False) -> int:
    """Print the table, or JSON."""
    table = rows()
    if json_output:
        print(json.dumps([row._asdict() for row in table], indent=1))
        return 0
    head = Row("family", "architecture", "weights", "tested by", "limits")
    widths = [max(len(row[i]) for row in (head, *table)) for i in range(4)]
    for row in (head, *table):
        print(_line(row, widths))
    print(f"\nsafetensors: float32, bfloat16, float16. Refused: {REFUSED}.")
    print("tested by: logits and tokens = log-probabilities at every position of five prompts, and")
    print("greedy tokens, of random weights against another implementation in float32; tokens =")
    print("greedy tokens of random weights against a decoder in float64.")
    return 0


def _line(row: Iterable[str], widths: list[int]) -> str:
    *cells, last = row
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join([*padded, last]).rstrip()
