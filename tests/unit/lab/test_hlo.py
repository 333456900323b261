"""The reader of scheduled HLO, on small programs written by hand."""

from __future__ import annotations

import pytest

from jaxengine.lab.aot import hlo

TEXT = """HloModule step, is_scheduled=true

%products (p.0: bf16[64,32], p.1: bf16[16,32]) -> f32[64,16] {
  %p.0 = bf16[64,32]{1,0} parameter(0)
  %p.1 = bf16[16,32]{1,0} parameter(1)
  ROOT %dot.1 = f32[64,16]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%wrapped (q.0: bf16[8,4]) -> bf16[8,4] {
  %q.0 = bf16[8,4]{1,0} parameter(0)
  ROOT %ra = bf16[8,4]{1,0} ragged-all-to-all(%q.0, %q.0), replica_groups={{0,1}}
}

%body (s: (s32[], bf16[64,32])) -> (s32[], bf16[64,32]) {
  %s = (s32[], bf16[64,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = bf16[64,32]{1,0} get-tuple-element(%s), index=1
  %perm = bf16[64,32]{1,0} collective-permute(%x), source_target_pairs={{0,1}}
  ROOT %t = (s32[], bf16[64,32]{1,0}) tuple(%i, %perm)
}

%cond (s.1: (s32[], bf16[64,32])) -> pred[] {
  %s.1 = (s32[], bf16[64,32]{1,0}) parameter(0)
  ROOT %always = pred[] constant(false)
}

ENTRY %main (x: bf16[64,32], w: bf16[16,32], rows: bf16[100,32], e: bf16[4,6,32]) -> f32[64,16] {
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[16,32]{1,0} parameter(1)
  %rows = bf16[100,32]{1,0} parameter(2)
  %e = bf16[4,6,32]{2,1,0} parameter(3)
  %start.1 = ((bf16[64,32]{1,0}), bf16[64,32]{1,0}) all-to-all-start(%x), dimensions={0}
  %fusion.1 = f32[64,16]{1,0} fusion(%x, /*index=1*/%w), kind=kCustom, calls=%products
  %done.1 = bf16[64,32]{1,0} all-to-all-done(%start.1)
  %start.2 = ((bf16[8,4]{1,0}), bf16[8,4]{1,0}) async-start(%done.1), calls=%wrapped
  %update.2 = ((bf16[8,4]{1,0}), bf16[8,4]{1,0}) async-update(%start.2)
  %experts = bf16[100,6]{1,0} custom-call(%rows, %e), custom_call_target="mosaic_gpu_v2"
  %gemm = (f32[64,16]{1,0}, s8[64]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %done.2 = bf16[8,4]{1,0} async-done(%update.2)
  %start.3 = (bf16[64,32]{1,0}, bf16[128,32]{1,0}) all-gather-start(%x), dimensions={0}
  %done.3 = bf16[128,32]{1,0} all-gather-done(%start.3)
  %start.4 = (bf16[64,32]{1,0}, bf16[128,32]{1,0}) all-gather-start(%x), \
backend_config={"collective_backend_config":{"is_sync":true}}
  %fusion.2 = f32[64,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%products
  %done.4 = bf16[128,32]{1,0} all-gather-done(%start.4)
  %tuple = (s32[], bf16[64,32]{1,0}) tuple(%x, %x)
  %loop = (s32[], bf16[64,32]{1,0}) while(%tuple), condition=%cond, body=%body
  ROOT %out = f32[64,16]{1,0} copy(%fusion.2)
}
"""
DOT = 2.0 * 64 * 16 * 32


def test_what_is_beside_each_collective() -> None:
    pairs = {p.name: p for p in hlo.overlap_report(TEXT)}
    assert pairs["start.1"] == hlo.Pair("all-to-all", "start.1", DOT, 64 * 32 * 2, ("fusion.1",))
    wrapped = pairs["start.2"]
    assert wrapped.op == "ragged-all-to-all" and wrapped.bytes == 64
    assert wrapped.flops_between == DOT + 2.0 * 100 * 32 * 6
    assert wrapped.products == ("experts", "gemm")
    assert pairs["start.3"].flops_between == 0 and not pairs["start.3"].synchronous
    assert pairs["start.4"].flops_between == 0 and pairs["start.4"].synchronous
    assert pairs["perm"].synchronous  # in the loop's body
    assert pairs["start.4"].bytes == 128 * 32 * 2


def test_counts() -> None:
    assert hlo.count_collectives(TEXT) == {
        "all-to-all": 1, "ragged-all-to-all": 1, "all-gather": 2, "collective-permute": 1,
    }  # fmt: skip


def test_a_kernel_counts_as_the_caller_says() -> None:
    pairs = hlo.overlap_report(TEXT, lambda call, operands: 7.0)
    assert {p.name: p for p in pairs}["start.2"].flops_between == DOT + 7.0


def test_loops_count_their_trips() -> None:
    known = TEXT.replace(
        "  %fusion.1 = f32",
        "  %again = (s32[], bf16[64,32]{1,0}) while(%x), condition=%cond, body=%work, "
        'backend_config={"known_trip_count":{"n":"5"}}\n  %fusion.1 = f32',
    ).replace(
        "%cond (s.1",
        """%work (s.2: (s32[], bf16[64,32])) -> (s32[], bf16[64,32]) {
  %s.2 = (s32[], bf16[64,32]{1,0}) parameter(0)
  %a = bf16[64,32]{1,0} get-tuple-element(%s.2), index=1
  %dot.2 = f32[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %t.2 = (s32[], bf16[64,32]{1,0}) tuple(%s.2)
}

%cond (s.1""",
        1,
    )
    first = {p.name: p for p in hlo.overlap_report(known)}["start.1"]
    assert first.flops_between == DOT + 5 * 2.0 * 64 * 64 * 32


def test_other_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("module @jit_step {}")
