"""Bugs planted in the kernels' sources, each to be noticed by the interpreter's checks or by the
comparison with float64.

Not to be noticed this way: an operand of a tensor-core product released before the product is
done. The interpreter computes products at once, so nothing can overwrite the operand in between.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent))
import test_attention_mosaic as attention  # noqa: E402
import test_mla as mla  # noqa: E402
import test_moe as moe  # noqa: E402
import test_quant_matmul as quant  # noqa: E402

from jaxengine.pallas_kernels import _mgpu as mg  # noqa: E402
from jaxengine.pallas_kernels.moe import grouped_matmul  # noqa: E402
from jaxengine.pallas_kernels.quant_matmul import quant_matmul, quantise  # noqa: E402
from jaxengine.pallas_kernels.quant_matmul.config import QuantConfig  # noqa: E402
from jaxengine.pallas_kernels.quant_matmul.reference import dequantise  # noqa: E402

K_WAIT = ("mg.barrier_wait(k_full.at(slot))", "pass")
FULL_WAIT = ("mg.barrier_wait(full.at[slot])", "pass")
EMPTY_WAIT = ("mg.barrier_wait(empty.at[slot])", "pass")
NO_COMMIT = ("mg.commit_smem()\n", "\n")
CAUSAL = ("(at <= of)", "(at <= of + 1)")
QUERY_WAIT = ("mg.barrier_wait(q_full)", "pass")
# Module under pallas_kernels: {bug: (source taken out, source put in)}.
MUTANTS: dict[str, dict[str, tuple[str, str]]] = {
    "paged_attention.mosaic": {
        "no K wait": K_WAIT,
        "no consumed wait": ("mg.barrier_wait(empty.at(slot))", "pass"),
        "causal off by one": CAUSAL,
        "tail not cleared": ("clear_tail(value, block)", "pass"),
        "no V wait": (
            "mg.barrier_wait(v_full.at(slot))\n                    if not",
            "if not",
        ),
        "no query wait": QUERY_WAIT,
        "no commit": (
            "o_smem[wg] = o.astype(q.dtype)\n                    mg.commit_smem()",
            "o_smem[wg] = o.astype(q.dtype)",
        ),
        "output buffer reused early": (
            "ends\n                mg.wait_smem_to_gmem(0, wait_read_only=True)",
            "ends",
        ),
        "window off by one": ("at > of - window", "at >= of - window"),
    },
    "mla_attention.mosaic": {
        "no block wait": FULL_WAIT,
        "no consumed wait": EMPTY_WAIT,
        "causal off by one": CAUSAL,
        "tail not cleared": (
            "                            clear_tail(slot, block)",
            " " * 28 + "pass",
        ),
        "no query wait": QUERY_WAIT,
    },
    "moe.mosaic": {
        "no operand wait": FULL_WAIT,
        "no consumed wait": EMPTY_WAIT,
        "no commit": NO_COMMIT,
        "output buffer reused early": ("mg.wait_smem_to_gmem(0, wait_read_only=True)", "pass"),
        "bias of another part": ("part * width + column)\n", "column)\n"),
        "steps counted from each tile": ("at = turn * steps + step", "at = step"),
    },
    "quant_matmul.mosaic": {
        "no operand wait": FULL_WAIT,
        "no consumed wait": EMPTY_WAIT,
        "sign of the high half": ("((b >> 4) ^ 8) - 8", "(b >> 4)"),
        "scale of the first group": ("scales(part * steps + i)", "scales(0)"),
    },
    "quant_matmul.fp8": {
        "no operand wait": FULL_WAIT,
        "no consumed wait": EMPTY_WAIT,
        "no commit": NO_COMMIT,
        "only the last 128 inputs": ("return total + some", "return some"),
    },
}
QUICK = {
    ("paged_attention.mosaic", "no K wait"),
    ("moe.mosaic", "no consumed wait"),
}


def run_attention() -> bool:
    got, b = attention.run(*attention.MUTATED, races=True)
    return any(attention.RACES) or attention.relative(got, b.expected) > 3e-3


def run_mla() -> bool:
    args, want = mla.build([(2, 150), (1, 70)], 16, 128, 64, jnp.bfloat16, 0)
    how: dict[str, Any] = {"scale": mla.SCALE, "latent": 128, "backend": "mosaic", "num_sms": 1}
    got = mla.mla_attention(*args, interpret=mg.interpret_params(True), **how)
    return mla.relative(got, want) > 3e-3 or mg.races_found()


def run_moe() -> bool:
    return any(
        max(moe.run_kernel(name, grouped_matmul)) > 3e-3 or mg.races_found()
        for name in ("swapped 16 bias", "128 rows gated bias")
    )


def run_quant() -> bool:
    x, w = quant.pair(1, 5, 64, 1024)
    q, x = quantise(w, "int4", 128), x.astype(jnp.bfloat16)
    how: dict[str, Any] = {"backend": "mosaic", "config": QuantConfig(splits=2, stages=2)}
    got = quant_matmul(x, q, interpret=mg.interpret_params(True), **how)
    want = np.asarray(x, np.float32).astype(np.float64) @ np.asarray(dequantise(q), np.float64).T
    return bool(quant.relative(got, want) > 3e-3 or mg.races_found())


def run_fp8() -> bool:
    return any(quant.run_fp8(name) > 3e-3 or mg.races_found() for name in quant.FP8)


RUNS: dict[str, tuple[Callable[[], bool], str]] = {  # and the kernel's name in its module
    "paged_attention.mosaic": (run_attention, "attend"),
    "mla_attention.mosaic": (run_mla, "attend"),
    "moe.mosaic": (run_moe, "grouped_matmul"),
    "quant_matmul.mosaic": (run_quant, "matmul"),
    "quant_matmul.fp8": (run_fp8, "matmul"),
}


def mutate(module: str, bug: str) -> int:
    """In a process of its own: replace the kernel by a mutant; 3 if that is noticed."""
    original = importlib.import_module(f"jaxengine.pallas_kernels.{module}")
    assert original.__file__ is not None
    source = pathlib.Path(original.__file__).read_text()
    old, new = MUTANTS[module][bug]
    assert old in source, f"{bug!r} fits nowhere in {module}"
    run, kernel = RUNS[module]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "mutant.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location("mutant", path)
        assert spec is not None and spec.loader is not None
        mutant = importlib.util.module_from_spec(spec)
        sys.modules["mutant"] = mutant
        spec.loader.exec_module(mutant)
        setattr(original, kernel, getattr(mutant, kernel))
        try:
            return 3 if run() else 0
        except Exception as e:  # noqa: BLE001 - whatever the checker raises
            print("raised", str(e).strip().splitlines()[-1][:200])
            return 3


def caught(module: str, bug: str, seconds: float = 180) -> str:
    """How the bug was noticed; "" if it was not. Only a bug of waiting may end in a deadlock."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parents[2])}
    command = [sys.executable, str(HERE), module, bug]
    try:
        done = subprocess.run(command, env=env, timeout=seconds, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        assert "wait" in bug, f"{bug} took more than {seconds} seconds"
        return "deadlock"
    assert done.returncode in (0, 3), done.stdout + done.stderr[-800:]
    return (done.stdout.strip() or "wrong or racing") if done.returncode else ""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("module", "bug"),
    [
        pytest.param(m, b, marks=() if (m, b) in QUICK else pytest.mark.slow, id=f"{m}: {b}")
        for m, bugs in MUTANTS.items()
        for b in bugs
    ],
)
def test_planted_bug_is_caught(module: str, bug: str) -> None:
    assert caught(module, bug)


@pytest.mark.slow
@pytest.mark.parametrize("module", RUNS)
def test_sound_kernels_pass_the_same_runs(module: str) -> None:
    mg.reset_interpreter()
    assert not RUNS[module][0]()


if __name__ == "__main__":
    status = mutate(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # threads of the interpreter may still wait
