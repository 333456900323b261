"""Joins the parts of runs that were split over CTAs, on the device and always in the same order."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels._mgpu import pl
from jaxengine.pallas_kernels.paged_attention import plan as pn

NEG = -math.inf


def combine(
    out: Float[Array, "nt G M C"],
    part_o: Float[Array, "parts M C"],
    part_ml: Float[Array, "parts 2 M"],
    ctas: Int[Array, "ctas 8"],
    *,
    interpret: Any = None,
) -> Float[Array, "nt G M C"]:
    """Joins the parts of split runs into `out`, in place; always in the same order."""
    num_tiles, kv_heads, rows, dim = out.shape
    width = 128 if dim % 128 == 0 else dim  # columns a CTA, for its registers

    def combine_parts(part_o: Any, part_ml: Any, ctas_ref: Any, out_ref: Any, o_smem: Any) -> None:
        cta = lax.axis_index("cta")
        my_rows = pl.ds(lax.axis_index("half") * 64, 64)
        columns = pl.ds(lax.axis_index("column") * width, width)
        run = ctas_ref[cta, pn.MERGE_RUN]

        @mg.when(run >= 0)
        def _() -> None:
            def add(slot: Any, carry: Any) -> Any:
                top, total, acc = carry
                m = mg.load(part_ml.at[slot, 0, my_rows], layout=mg.ROWS, optimized=False)
                n = mg.load(part_ml.at[slot, 1, my_rows], layout=mg.ROWS, optimized=False)
                o = mg.load(
                    part_o.at[slot, my_rows, columns], layout=mg.Layout.WGMMA, optimized=False
                )
                new_top = jnp.maximum(top, m)
                safe = jnp.where(new_top == NEG, 0.0, new_top)
                keep, weight = jnp.exp2(top - safe), jnp.exp2(m - safe)
                acc = acc * mg.rows_to_tile(keep, (64, width))
                acc = acc + o * mg.rows_to_tile(weight, (64, width))
                return new_top, total * keep + n * weight, acc

            carry = (
                mg.full((64,), NEG, mg.ROWS),
                mg.full((64,), 0.0, mg.ROWS),
                mg.full((64, width), 0.0, mg.Layout.WGMMA),
            )
            carry = add(ctas_ref[cta, pn.MERGE_SLOT], carry)
            _, total, acc = lax.fori_loop(
                cta + 1, ctas_ref[cta, pn.MERGE_LAST] + 1, lambda i, c: add(2 * i, c), carry
            )
            inverse = jnp.where(total > 0, 1.0 / total, 0.0)
            o_smem[...] = (acc * mg.rows_to_tile(inverse, (64, width))).astype(out.dtype)
            mg.commit_smem()
            tile = lax.div(run, jnp.int32(kv_heads))
            head = lax.rem(run, jnp.int32(kv_heads))
            mg.copy_smem_to_gmem(o_smem, out_ref.at[tile, head, my_rows, columns])
            mg.wait_smem_to_gmem(0)

    target = jax.new_ref(out)
    mg.kernel(
        combine_parts,
        out_type=(),
        scratch_types=[mg.matrix((64, width), out.dtype)],
        grid=(ctas.shape[0], rows // 64, dim // width),
        grid_names=("cta", "half", "column"),
        compiler_params=mg.CompilerParams(approx_math=True),
        **({"interpret": interpret} if interpret is not None else {}),
    )(part_o, part_ml, ctas, target)
    return jax.freeze(target)
