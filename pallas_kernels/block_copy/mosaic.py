"""Gather and scatter of KV blocks by TMA on a few SMs, so that compute keeps the others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from jaxengine.pallas_kernels import _mgpu as mg
from jaxengine.pallas_kernels._mgpu import pl

LINE = 128  # elements of a row of a piece
MAX_BYTES = 32768  # of a piece
STAGES = 3


def piece_rows(rows: int, itemsize: int) -> int:
    """Rows of one copied piece: the largest divisor of a block's rows that fits."""
    limit = min(256, MAX_BYTES // (LINE * itemsize))
    return max(r for r in range(1, limit + 1) if rows % r == 0)


def copy_blocks(
    source: Shaped[Array, "A R 128"],
    target: Shaped[Array, "B R 128"],
    ids: Int[Array, "n"],
    *,
    gather: bool,
    num_ctas: int,
    interpret: Any = None,
) -> Shaped[Array, "B R 128"]:
    """target[i] = source[ids[i]] (gather) or target[ids[i]] = source[i]; others stay."""
    rows = source.shape[1]
    limit = source.shape[0] if gather else target.shape[0]
    height = piece_rows(rows, jnp.dtype(source.dtype).itemsize)
    pieces = rows // height
    total = ids.shape[0] * pieces

    def block_copy(source_ref: Any, ids_ref: Any, target_ref: Any, smem: Any, full: Any) -> None:
        cta = lax.axis_index("cta")
        turns = lax.div(jnp.int32(total - 1) - cta, jnp.int32(num_ctas)) + 1

        def where(turn: Any) -> tuple[Any, Any, Any, Any]:
            index = cta + turn * num_ctas
            entry = lax.div(index, jnp.int32(pieces))
            here = pl.ds(lax.rem(index, jnp.int32(pieces)) * height, height)
            block = ids_ref[entry]
            return entry, block, here, (block >= 0) & (block < limit)

        def fetch(turn: Any) -> None:
            entry, block, here, valid = where(turn)

            @mg.when(valid)
            def _() -> None:
                slot = lax.rem(turn, jnp.int32(STAGES))
                origin = source_ref.at[block if gather else entry, here]
                mg.copy_gmem_to_smem(origin, smem.at[slot], full.at[slot])

        for ahead in range(STAGES - 1):

            @mg.when(ahead < turns)
            def _(ahead: int = ahead) -> None:
                fetch(jnp.int32(ahead))

        @mg.each(0, turns)
        def _(turn: Any) -> None:
            entry, block, here, valid = where(turn)
            slot = lax.rem(turn, jnp.int32(STAGES))

            @mg.when(valid)
            def _() -> None:
                mg.barrier_wait(full.at[slot])
                goal = target_ref.at[entry if gather else block, here]
                mg.copy_smem_to_gmem(smem.at[slot], goal)

            # The next fetch reuses the buffer that the turn before this one sends from. An
            # invalid turn sent nothing, so everything must be out then.
            mg.wait_smem_to_gmem(0, wait_read_only=True)

            @mg.when(turn + STAGES - 1 < turns)
            def _() -> None:
                fetch(turn + STAGES - 1)

        mg.wait_smem_to_gmem(0)

    out = jax.new_ref(target)
    mg.kernel(
        block_copy,
        out_type=(),
        scratch_types=[
            mg.SMEM((STAGES, height, LINE), source.dtype),
            mg.Barrier(num_barriers=STAGES),
        ],
        grid=(min(num_ctas, total),),
        grid_names=("cta",),
        **({"interpret": interpret} if interpret is not None else {}),
    )(source, ids, out)
    return jax.freeze(out)
