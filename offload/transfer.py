"""The device's side of offload: pages between the KV cache and the host pool.

A store is a gather into a staging array, dispatched like a step; its copy to the host runs while
later steps run. A load is one staging array put on the device and scattered into the cache. The
order of dispatch is the only fence: a gather sees the cache as the steps before it left it.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Int

from jaxengine.offload.host_pool import PagePool
from jaxengine.offload.jobs import Done, Job
from jaxengine.offload.layout import KVLayout

KVState = tuple[tuple[Array, ...], ...]  # per layer
SIZES = (1, 4, 16, 64)  # blocks of a program

# Pages move as integers: bits stay bits, NaN payloads included.
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@dataclass
class _Pending:
    """A store under way: staging arrays with the slots of their first rows."""

    job: Job
    staged: list[tuple[Array, list[int]]]
    began: float
    copying: Future[None] | None = None


class DeviceTransfer:
    """Used by the process, and the thread, that dispatches steps.

    The cache may be sharded over kv heads; staging arrays are whole, so host pages do not depend
    on it.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: PagePool,
        sizes: tuple[int, ...] = SIZES,
        staging: str | None = None,
    ) -> None:
        """`staging`: memory kind of what a store gathers into; default: pinned_host on a GPU (the
        gather itself brings pages to page-locked host memory), else the device's own.

        Raises ValueError when the pool's slots are smaller than a page.
        """
        if pool.page_bytes < layout.slot_bytes:
            raise ValueError(
                f"host pool slots have {pool.page_bytes} bytes, a page needs {layout.slot_bytes}"
            )
        self.layout = layout
        self.pool = pool
        self._staging = staging
        self.sizes = tuple(sorted(sizes))
        self._programs: dict[tuple[str, int, int], Any] = {}
        self._warm = False
        self.num_compiled = 0
        self.compiled_after_warmup = 0
        self._pending: deque[_Pending] = deque()
        self._ended: list[Done] = []
        self._copier = ThreadPoolExecutor(1, "kv-copy")

    def warmup(self, kv: Any) -> None:
        """Compile every program. `kv`: the cache, or ShapeDtypeStructs (with sharding) of it."""
        for group in range(self.layout.num_groups):
            for size in self.sizes:
                self._program("store", group, size, kv)
                self._program("load", group, size, kv)
        self._warm = True

    def share_programs(self, other: DeviceTransfer) -> None:
        """Use the programs of one with the same layout, for another pool."""
        self._programs, self._warm = other._programs, other._warm

    def store(self, kv: KVState, jobs: list[Job]) -> None:
        """Dispatch the gathers of these jobs and start their copies. Returns at once."""
        for job in jobs:
            if self._refused(kv, job):
                continue
            pending = _Pending(job, [], time.monotonic())
            layers = self._layers(kv, job.group)
            for begin, count, size in split(len(job.slots), self.sizes):
                ids = np.zeros(size, np.int32)  # padding reads block 0
                ids[:count] = job.block_ids[begin : begin + count]
                staging = self._program("store", job.group, size, kv)(layers, self._put(kv, ids))
                staging.copy_to_host_async()
                pending.staged.append((staging, job.slots[begin : begin + count]))
            self._pending.append(pending)

    def load(self, kv: KVState, jobs: list[Job]) -> KVState:
        """Scatter host pages into the cache, which is donated. Returns the new cache; whatever is
        dispatched after this sees the loaded blocks."""
        new = list(kv)
        for job in jobs:
            if self._refused(kv, job):
                continue
            began = time.monotonic()
            page = self.layout.page_bytes(job.group)
            num_blocks = kv[0][0].shape[0]
            for begin, count, size in split(len(job.slots), self.sizes):
                ids = np.full(size, num_blocks, np.int32)  # out of range: dropped
                ids[:count] = job.block_ids[begin : begin + count]
                staging = np.zeros((size, page), np.uint8)
                for row, slot in enumerate(job.slots[begin : begin + count]):
                    staging[row] = self.pool.view(slot, page)
                bits = staging.view(_BITS[self.layout.item_bytes])
                shaped = bits.reshape(size, *self.layout.page_shape(job.group))
                group = tuple(new[layer] for layer in self.layout.layers_of(job.group))
                # `kv` may be donated in part by now: only `new` may be asked.
                state = tuple(new)
                program = self._program("load", job.group, size, state)
                loaded = program(group, self._put(state, ids), self._put(state, shaped))
                for layer, arrays in zip(self.layout.layers_of(job.group), loaded, strict=True):
                    new[layer] = arrays
            # The pages were copied to staging: the slots may go.
            self._end(job, began)
        return tuple(new)

    def poll(self) -> list[Done]:
        """Jobs that ended since the last call. Never waits."""
        for pending in self._pending:
            if pending.copying is None and _are_ready(pending):
                pending.copying = self._copier.submit(self._copy, pending)
        while self._pending and (copying := self._pending[0].copying) and copying.done():
            pending = self._pending.popleft()
            error = copying.exception()
            self._end(pending.job, pending.began, f"{error!r}" if error else "")
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> list[Done]:
        """Wait for all stores; returns what `poll` would have."""
        for pending in self._pending:
            if pending.copying is None:
                pending.copying = self._copier.submit(self._copy, pending)
        for pending in self._pending:
            assert pending.copying is not None
            pending.copying.exception()  # waits
        return self.poll()

    def reset(self) -> None:
        """Forget every transfer; when this returns nothing writes to the pool any more."""
        for pending in self._pending:
            if pending.copying is not None and not pending.copying.cancel():
                pending.copying.exception()  # waits
        self._pending.clear()
        self._ended.clear()

    def close(self) -> None:
        self.reset()
        self._copier.shutdown()

    # -- parts ------------------------------------------------------------------------------

    def _refused(self, kv: KVState, job: Job) -> bool:
        """A job that cannot be right fails alone; it must not take the step with it."""
        blocks, slots = kv[0][0].shape[0], self.pool.num_slots
        error = ""
        if not 0 <= job.group < self.layout.num_groups:
            error = f"there is no KV group {job.group}"
        elif len(job.block_ids) != len(job.slots) or not job.slots:
            error = f"{len(job.block_ids)} blocks for {len(job.slots)} slots"
        elif not all(0 <= block < blocks for block in job.block_ids):
            error = f"a block outside 0 .. {blocks - 1}"
        elif not all(0 <= slot < slots for slot in job.slots):
            error = f"a slot outside 0 .. {slots - 1}"
        if error:
            self._ended.append(Done(job.job_id, False, f"{job.kind} job {job.job_id}: {error}"))
        return bool(error)

    def _copy(self, pending: _Pending) -> None:
        """On the copier's thread: staging arrays into the pool."""
        page = self.layout.page_bytes(pending.job.group)
        for staging, slots in pending.staged:
            rows = np.asarray(staging).view(np.uint8).reshape(staging.shape[0], page)
            for row, slot in zip(rows, slots, strict=False):  # the last rows are padding
                self.pool.view(slot, page)[:] = row
        pending.staged.clear()

    def _end(self, job: Job, began: float, error: str = "") -> None:
        moved = 0 if error else len(job.slots) * self.layout.page_bytes(job.group)
        seconds = time.monotonic() - began
        self._ended.append(Done(job.job_id, not error, error, moved, seconds))

    def _layers(self, kv: Any, group: int) -> tuple[Any, ...]:
        return tuple(kv[layer] for layer in self.layout.layers_of(group))

    def _put(self, kv: KVState, array: np.ndarray[Any, Any]) -> Array:
        return jax.device_put(array, _replicated(kv[0][0]))

    def _program(self, kind: str, group: int, size: int, kv: Any) -> Any:
        key = (kind, group, size)
        if key not in self._programs:
            self.num_compiled += 1
            self.compiled_after_warmup += self._warm
            self._programs[key] = self._compile(kind, group, size, kv)
        return self._programs[key]

    def _compile(self, kind: str, group: int, size: int, kv: Any) -> Any:
        layers = jax.tree.map(_shape, self._layers(kv, group))
        whole = _replicated(layers[0][0])
        ids = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=whole)
        if kind == "store":
            gather: Callable[..., Any] = functools.partial(gather_pages, self.layout)
            out = _staging_sharding(whole, self._staging)
            return jax.jit(gather, out_shardings=out).lower(layers, ids).compile()
        shape = (size, *self.layout.page_shape(group))
        staging = jax.ShapeDtypeStruct(shape, _BITS[self.layout.item_bytes], sharding=whole)
        scatter: Callable[..., Any] = functools.partial(scatter_pages, self.layout)
        shardings = jax.tree.map(lambda array: array.sharding, layers)
        jitted = jax.jit(scatter, donate_argnums=0, out_shardings=shardings)
        return jitted.lower(layers, ids, staging).compile()


def split(count: int, sizes: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(begin, count, program size) parts of `count` blocks: few calls, little padding. A program
    runs when it is filled at least by half, else the next smaller one."""
    parts: list[tuple[int, int, int]] = []
    begin = 0
    while begin < count:
        rest = count - begin
        size = next((s for s in reversed(sizes) if 2 * rest >= s), sizes[0])
        take = min(rest, size)
        parts.append((begin, take, size))
        begin += take
    return parts


def gather_pages(
    layout: KVLayout, layers: tuple[tuple[Array, ...], ...], ids: Int[Array, "B"]
) -> Array:
    """Canonical pages of blocks `ids`: [B, layers, 2, G, P, C] (latent [B, layers, P, X])."""
    block, heads, width = layout.block_size, layout.kv_heads, layout.head_dim
    pages = []
    for arrays in layers:
        parts = [_to_bits(layout, array)[ids] for array in arrays]
        copies = _copies(layout, arrays[0])
        if layout.kind == "token_major":
            parts = [p.reshape(-1, block, heads * copies, width)[:, :, ::copies] for p in parts]
            pages.append(jnp.stack([p.transpose(0, 2, 1, 3) for p in parts], axis=1))
        elif layout.kind == "head_major":
            pages.append(parts[0][:, :, ::copies])
        else:
            pages.append(parts[0])
    return jnp.stack(pages, axis=1)


def scatter_pages(
    layout: KVLayout,
    layers: tuple[tuple[Array, ...], ...],
    ids: Int[Array, "B"],
    pages: Array,
) -> tuple[tuple[Array, ...], ...]:
    """Write canonical pages to blocks `ids`; indices that are out of range are dropped."""
    new = []
    for i, arrays in enumerate(layers):
        page = pages[:, i]
        if (copies := _copies(layout, arrays[0])) > 1:
            page = jnp.repeat(page, copies, axis=2)
        if layout.kind == "token_major":
            flat = page.transpose(0, 1, 3, 2, 4).reshape(len(ids), 2, layout.block_size, -1)
            parts = [flat[:, 0], flat[:, 1]]
        else:
            parts = [page]
        new.append(
            tuple(
                array.at[ids].set(_from_bits(part, array.dtype), mode="drop")
                for array, part in zip(arrays, parts, strict=True)
            )
        )
    return tuple(new)


def _copies(layout: KVLayout, array: Any) -> int:
    """How often the cache holds each kv head: more than once where devices outnumber heads."""
    if layout.kind == "token_major":
        return int(array.shape[2]) // (layout.kv_heads * layout.head_dim)
    return int(array.shape[2]) // layout.kv_heads if layout.kind == "head_major" else 1


def _are_ready(pending: _Pending) -> bool:
    staged: list[Any] = [array for array, _ in pending.staged]
    return all(array.is_ready() for array in staged)


def _to_bits(layout: KVLayout, array: Array) -> Array:
    return jax.lax.bitcast_convert_type(array, _BITS[layout.item_bytes])


def _from_bits(bits: Array, dtype: Any) -> Array:
    return jax.lax.bitcast_convert_type(bits, dtype)


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _staging_sharding(whole: Any, memory: str | None) -> Any:
    """Where stores gather to; `whole` is None for the default device."""
    device = jax.devices()[0] if whole is None else next(iter(whole.device_set))
    memory = memory or ("pinned_host" if device.platform in ("gpu", "cuda") else None)
    if memory is None:
        return whole
    return (SingleDeviceSharding(device) if whole is None else whole).with_memory_kind(memory)


def _replicated(array: Any) -> Any:
    """The sharding of an array that every device of `array` holds whole."""
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding
