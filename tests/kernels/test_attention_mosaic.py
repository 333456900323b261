"""The attention kernel in GPU interpret mode against float64, with races."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels.paged_attention import api, mosaic
from jaxengine.pallas_kernels.paged_attention import plan as pn
from jaxengine.pallas_kernels.paged_attention.config import AttentionConfig

HERE = pathlib.Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent))
from attention_cases import Batch, Case, build, relative  # noqa: E402

DECODE = AttentionConfig(1, 64, 2, 2)
PREFILL = AttentionConfig(2, 128, 2, 1)
HALF: dict[str, Any] = {"dtype": jnp.bfloat16}
CASES = {
    "mixed": (Case(((1, 300), (0, 0), (20, 100), (1, 1)), **HALF), DECODE, 4),
    "split": (Case(((1, 1100),), group=8, soft_cap=20.0, **HALF), DECODE, 4),
    "window": (Case(((1, 513), (40, 200)), 1, 2, window=70, sinks=True, **HALF), DECODE, 4),
    "split sinks": (Case(((1, 900),), 8, 1, sinks=True, **HALF), DECODE, 2),
    "group of 7": (Case(((3, 130), (1, 40)), 7, 2, **HALF), AttentionConfig(1, 64, 2, 1), 4),
    "prefill": (Case(((40, 300), (7, 140)), 4, 1, window=100, **HALF), PREFILL, 2),
    "page of 128": (Case(((2, 200),), 4, 2, dim=80, page=128, **HALF), DECODE, 2),
    "width 256": (Case(((5, 70),), 2, 1, 256, 64, **HALF), AttentionConfig(1, 64, 2, 1), 1),
    "fp8": (
        Case(((1, 300), (9, 50)), 4, 2, page=32, sinks=True, fp8=True, **HALF),
        AttentionConfig(1, 64, 2, 1),
        2,
    ),
}  # fmt: skip


RACES: list[bool] = []  # of the last run, one a kernel


def run(case: Case, config: AttentionConfig, num_sms: int, races: bool) -> tuple[Any, Batch]:
    b = build(case)
    attend = mosaic.attend

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = jax.block_until_ready(attend(*args, **kwargs))
        RACES[:] = [races and mg.races_found()]
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mosaic, "attend", watched)
        got = call(case, b, config, num_sms, races)
    jax.block_until_ready(got)
    RACES.append(races and mg.races_found())
    return got, b


def call(case: Case, b: Batch, config: AttentionConfig, num_sms: int, races: bool) -> Any:
    return api.paged_attention(
        b.q,
        b.kv,
        jnp.asarray(b.table),
        jnp.asarray(b.q_start),
        jnp.asarray(b.kv_len),
        scale=case.scale,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=None if b.sinks is None else jnp.asarray(b.sinks),
        kv_scales=None if b.kv_scales is None else jnp.asarray(b.kv_scales),
        config=config,
        backend="mosaic",
        num_sms=num_sms,
        interpret=mg.interpret_params(races),
    )


SLOW_CASES = ("fp8", "mixed", "window", "split sinks", "group of 7", "page of 128", "width 256")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW_CASES else ()) for n in CASES]
)
def test_kernel_is_float64s(name: str) -> None:
    case, config, sms = CASES[name]
    races = name in ("group of 7", "prefill")
    mg.reset_interpreter()
    got, b = run(case, config, sms, races)
    assert relative(got, b.expected) < 3e-3
    assert RACES == [False, False]


def test_split_cases_split() -> None:
    for name in ("split", "split sinks"):
        case, config, sms = CASES[name]
        plan = api.make_plan(
            jnp.array([0, 1]),
            jnp.array([case.rows[0][1]]),
            num_tokens=1,
            heads=case.group * case.kv_heads,
            kv_heads=case.kv_heads,
            config=config,
            num_sms=sms,
            xp=jnp,
        )
        assert int((plan.ctas[:, pn.MERGE_RUN] >= 0).sum()) > 0


MUTATED = (Case(((3, 330), (1, 140)), 4, 1, window=150, **HALF), AttentionConfig(1, 64, 2, 1), 1)


def test_unmutated_kernel_passes_the_mutants_case() -> None:
    mg.reset_interpreter()
    got, b = run(*MUTATED, races=True)
    assert relative(got, b.expected) < 3e-3 and RACES == [False, False]
