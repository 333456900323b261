"""The one module that names Mosaic GPU, so that an API change has one place to be fixed.

Works with jax 0.11.2 and 0.12. Kernels take `interpret` and `num_sms` as arguments: importing
this module asks for no device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
from jax import lax
from jax.experimental import pallas

# Its annotations change with every release and leave some names out; kernels are traced anyway.
pl: Any = pallas

LOG2E = math.log2(math.e)
SMEM_LIMIT = 232448  # bytes of shared memory one CTA of sm_90 can have
REGISTER_LIMIT = 255

_NAMES = frozenset(
    (
        "kernel",
        "Barrier",
        "SMEM",
        "GMEM",
        "ACC",
        "Layout",
        "CompilerParams",
        "TilingTransform",
        "SwizzleTransform",
        "barrier_arrive",
        "barrier_wait",
        "broadcasted_iota",
        "commit_smem",
        "copy_gmem_to_smem",
        "copy_smem_to_gmem",
        "layout_cast",
        "load",
        "set_max_registers",
        "wait_smem_to_gmem",
        "wgmma",
        "wgmma_wait",
    )
)


@functools.cache
def mosaic() -> Any:
    """Mosaic GPU itself, imported when a kernel is first used: half a CPU second that a start
    without one is spared."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def __getattr__(name: str) -> Any:
    """Mosaic GPU's names that kernels use; ROWS and COLUMNS are the layouts of one value a row or
    column of a WGMMA tile."""
    if name in _NAMES:
        return getattr(mosaic(), name)
    if name in ("ROWS", "COLUMNS"):
        return mosaic().Layout.WGMMA.reduce(1 if name == "ROWS" else 0)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def matrix_transforms(width: int, dtype: Any) -> tuple[Any, ...]:
    """Tiling and swizzle of a shared-memory matrix with `width` elements a row.

    Raises ValueError when a row is no multiple of 16 bytes.
    """
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = mosaic().find_swizzle(width * bits, "matrix")
    return (
        mosaic().TilingTransform((8, swizzle * 8 // bits)),
        mosaic().SwizzleTransform(swizzle),
    )


def matrix(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared-memory buffer of matrices in the layout that TMA writes and WGMMA reads."""
    return mosaic().SMEM(shape, dtype, transforms=matrix_transforms(shape[-1], dtype))


def interpret_params(detect_races: bool = False) -> Any:
    """`interpret=` argument that simulates the kernel on CPU."""
    # Simulated copy engines carry vector clocks; with few of them a later copy by the same engine
    # hides that an earlier one was not waited for.
    threads = 32 if detect_races else 5
    return mosaic().InterpretGPUParams(
        detect_races=detect_races, inline_mgpu="ignore", num_tma_threads_per_device=threads
    )


def races_found() -> bool:
    """True if the last interpreted kernel with race detection had a data race."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    races: Any = interpret_pallas_call.get_races()
    return bool(races.races_found)


def reset_interpreter() -> None:
    """Clears the interpreter's state, as needed after an exception inside it."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


def full(shape: tuple[int, ...], value: float, layout: Any, dtype: Any = jnp.float32) -> jax.Array:
    """A register array of one value."""
    return mosaic().layout_cast(jnp.full(shape, value, dtype), layout)


def rows_to_tile(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Repeats one value a row along the tile's columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def matmul(a: Any, b: Any, shape: tuple[int, int]) -> jax.Array:
    """a @ b in float32; both operands lie in shared memory and may be reused on return."""

    def scope(acc_ref: Any) -> jax.Array:
        mosaic().wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(scope, mosaic().ACC(shape, jnp.float32))


def accumulate(acc: jax.Array, a: jax.Array, b: Any, stage: Any, interpret: bool) -> jax.Array:
    """acc + a @ b with `a` in registers; `b` may be reused on return.

    The interpreter knows neither register operands nor accumulators that start from a value, so
    there the product goes through the shared buffer `stage`.
    """
    if interpret:
        stage[...] = a
        mosaic().commit_smem()
        return acc + matmul(stage, b, (acc.shape[0], acc.shape[1]))

    def scope(acc_ref: Any) -> None:
        mosaic().wgmma(acc_ref, a, b)

    return pl.run_state(scope)(mosaic().ACC.init(acc))


def store_transposed(to: Any, value: jax.Array, interpret: bool) -> None:
    """Write a WGMMA tile of a 16-bit type into shared memory with rows and columns exchanged."""
    if interpret:
        to[...] = value.T
        return
    to.T[...] = mosaic().layout_cast(value, mosaic().Layout.WGMMA_TRANSPOSED)


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """Decorator: runs the function where the scalar condition holds."""
    return pl.when(condition)


def each(start: Any, stop: Any) -> Callable[[Callable[[Any], None]], None]:
    """Decorator: runs the function for every index."""
    return pl.loop(start, stop)


def largest(dtype: Any) -> float:
    """Largest finite number of a floating-point type."""
    limits: Any = ml_dtypes.finfo
    return float(limits(dtype).max)
