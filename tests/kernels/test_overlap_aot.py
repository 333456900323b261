"""Overlap of dual-batch steps, read from programs compiled for 8 H200s on a machine without one.

Skipped where JAX's CUDA plugin is not installed (`sh scripts/install_aot.sh`).
"""

from __future__ import annotations

import pytest

from jaxengine.lab.aot import aot, overlap_check
from jaxengine.parallel.cost import QWEN3_30B_A3B

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.aot,
    pytest.mark.skipif(bool(aot.missing()), reason=aot.missing()),
]
SHAPE = QWEN3_30B_A3B


def test_halves_compute_while_the_other_travels() -> None:
    cases = [overlap_check.Case(1024, dbo, layers=2) for dbo in (True, False)]
    on, off = overlap_check.compile_cases(cases)
    print(
        f"{on['overlapped']} of {on['pairs']} exchanges overlap, {on['hidden']:.0%} of their time"
    )
    assert on["pairs"] == 8 and off["pairs"] == 4
    assert on["share"] >= 0.8
    assert off["overlapped"] == 0
    assert {c["op"] for c in on["collectives"]} == {"all-to-all"}


def test_overlap_survives_the_dot_merger_by_construction() -> None:
    merging = tuple(f for f in overlap_check.FLAGS if "dot_merger" not in f)
    case = overlap_check.Case(1024, True, layers=2)
    report = overlap_check.compile_cases([case], flags=merging)[0]
    assert report["share"] >= 0.8


@pytest.mark.parametrize("backend", ["allgather", "ragged"])
def test_other_exchanges_compile(backend: str) -> None:
    case = overlap_check.Case(256, True, layers=1, backend=backend)
    report = overlap_check.compile_cases([case])[0]
    want = {"allgather": {"all-gather", "reduce-scatter"}, "ragged": {"ragged-all-to-all"}}
    assert want[backend] <= {c["op"] for c in report["collectives"]}


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="128 over 7"):
        overlap_check.report(SHAPE, True, 1024, 7)
