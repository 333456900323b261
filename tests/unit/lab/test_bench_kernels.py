"""The kernel bench: counts by hand and by XLA, and every implementation of an operation agrees."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest

from jaxengine.lab.bench import kernels
from jaxengine.lab.bench.kernel_cases import OPS, Sizes, cases
from jaxengine.lab.bench.kernels import roofline, timed

SMALL = Sizes(rows=2, context=32, tokens=32, heads=2, kv_heads=1, head_dim=16, hidden=128, ffn=64,
              experts=4, dtype="float32")  # fmt: skip


def test_names_are_those_of_the_flag() -> None:
    assert tuple(OPS) == kernels.OP_NAMES


def test_counts_by_hand() -> None:
    found = {(c.op, c.implementation): c for c in cases(SMALL)}
    decode = found["decode", "xla, token-major"]
    assert decode.flops == 2 * (2 * 32 * 2 * 16) * 2  # two products of rows x context x head
    assert decode.nbytes == 4 * (2 * 2 * 32 * 16 + 2 * 2 * 2 * 16)
    assert found["prefill", "xla, token-major"].flops == 4 * 2 * 16 * (32 * 33 // 2)
    assert found["gather", "xla"].nbytes == 2 * 2 * (2 * 16 * 16) * 4  # two blocks of K and V
    assert found["experts", "xla"].flops == 2 * 2 * 3 * (2 * 128 * 64)
    int4, int8 = found["matmul", "xla, int4"], found["matmul", "xla, int8"]
    assert int8.nbytes - int4.nbytes == 64 * 128 / 2


def test_product_flops_are_xlas() -> None:
    case = next(c for c in OPS["matmul"](SMALL) if c.implementation == "xla, float32")
    analysis = jax.jit(case.run).lower(*case.args).compile().cost_analysis()
    assert analysis["flops"] == pytest.approx(case.flops, rel=0.1)


def test_roofline() -> None:
    row = roofline(flops=2e9, nbytes=1e9, seconds=2.0, gflops=1.0, gbytes=4.0)
    assert row["floor_us"] == 2e6 and row["share"] == 1 and row["bound"] == "compute"
    assert roofline(2e9, 1e9, 2.0, 100.0, 1.0)["bound"] == "memory"


def test_donated_arguments_are_replaced() -> None:
    x = jax.numpy.zeros(3)
    assert timed(lambda x: x + 1, (x,), (0,), 3) > 0
    assert x.is_deleted()


def test_bench(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "k.json"
    argv = ["--ops", "copy", "--context", "32", "--repeat", "1", "--output-json", str(path)]
    assert kernels.main(argv) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["op"] for row in rows] == ["gather", "scatter"]
    assert all(np.isfinite(row["share"]) and row["us"] > 0 for row in rows)
    assert "gather" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--heads", "4", "--kv-heads", "3"], ["--top-k", "9"]])
def test_impossible_sizes(argv: list[str]) -> None:
    with pytest.raises(ValueError, match=argv[0]):
        kernels.main(argv)
