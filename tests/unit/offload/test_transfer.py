"""Device pages to host slots and back, bit for bit."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.offload.host_pool import PagePool
from jaxengine.offload.jobs import Job
from jaxengine.offload.layout import KVLayout
from jaxengine.offload.transfer import DeviceTransfer, KVState, split

N, P, G, C = 9, 4, 2, 8
GROUPS = (0, 1, 0)  # three layers in two KV groups


def random_cache(layout: KVLayout, seed: int) -> KVState:
    rng = np.random.default_rng(seed)
    shapes = {
        "token_major": [(N, P, G * C)] * 2,
        "head_major": [(N, 2, G, P, C)],
        "latent": [(N, P, layout.head_dim)],
    }[layout.kind]
    return tuple(
        tuple(jnp.asarray(rng.integers(0, 256, (*s[:-1], s[-1] * layout.item_bytes), np.uint8)
              .view(layout.dtype)) for s in shapes)
        for _ in layout.layer_group
    )  # fmt: skip


def bits(kv: KVState) -> list[np.ndarray]:
    return [np.asarray(array).view(np.uint8) for layer in kv for array in layer]


@pytest.mark.parametrize("kind, dtype", [("token_major", "bfloat16"), ("latent", "float32")])
def test_round_trip_in_every_program_size(kind: str, dtype: str) -> None:
    heads, width = (1, 24) if kind == "latent" else (G, C)
    layout = KVLayout(GROUPS, P, heads, width, dtype, kind)  # type: ignore[arg-type]
    pool = PagePool(20, layout.slot_bytes)
    staging = "pinned_host" if dtype == "bfloat16" else None  # CPU devices have that kind too
    transfer = DeviceTransfer(layout, pool, (1, 4), staging)
    source = random_cache(layout, 1)
    transfer.warmup(source)
    compiled = transfer.num_compiled
    blocks = [8, 0, 3, 5, 1, 2, 7]
    jobs = [
        Job(1, "store", 0, blocks, [10, 11, 12, 13, 14, 15, 16]),
        Job(2, "store", 1, blocks[:2], [3, 4]),
    ]
    transfer.store(source, jobs)
    done = transfer.drain()
    assert [(d.job_id, d.ok, d.bytes) for d in done] == [
        (1, True, 7 * layout.page_bytes(0)),
        (2, True, 2 * layout.page_bytes(1)),
    ]
    target = random_cache(layout, 2)
    before = bits(target)
    target = transfer.load(
        target,
        [
            Job(3, "load", 0, blocks, jobs[0].slots),
            Job(4, "load", 1, blocks[:2], jobs[1].slots),
        ],
    )
    assert [d.job_id for d in transfer.poll()] == [3, 4]
    per_layer = len(before) // len(GROUPS)
    for i, (got, old, want) in enumerate(zip(bits(target), before, bits(source), strict=True)):
        loaded = blocks if GROUPS[i // per_layer] == 0 else blocks[:2]
        for block in range(N):
            assert (got[block] == (want if block in loaded else old)[block]).all()
    assert transfer.num_compiled == compiled == 2 * 2 * 2
    transfer.close()


def test_a_store_keeps_what_was_there_when_it_was_dispatched() -> None:
    """The block goes to somebody else right behind it."""
    layout = KVLayout((0,), P, G, C, "float32")
    pool = PagePool(4, layout.slot_bytes)
    transfer = DeviceTransfer(layout, pool)
    kv = random_cache(layout, 3)
    want = np.asarray(kv[0][0])[5]
    transfer.store(kv, [Job(1, "store", 0, [5], [2])])
    pool.view(3)[:] = 7
    kv = transfer.load(kv, [Job(2, "load", 0, [5], [3])])
    assert {d.job_id for d in transfer.drain()} == {1, 2}
    page = pool.view(2, layout.page_bytes(0)).view(np.float32).reshape(2, G, P, C)
    assert page[0].transpose(1, 0, 2).tobytes() == want.tobytes()
    assert (bits(kv)[0][5] == 7).all()
    transfer.close()


def test_a_wrong_job_fails_alone() -> None:
    layout = KVLayout((0,), P, G, C, "float32")
    pool = PagePool(2, layout.slot_bytes)
    transfer = DeviceTransfer(layout, pool)
    kv = random_cache(layout, 4)
    transfer.store(kv, [Job(1, "store", 0, [N], [0]), Job(2, "store", 0, [1], [1])])
    kv = transfer.load(kv, [Job(3, "load", 0, [0], [2]), Job(4, "load", 1, [0], [0])])
    done = {d.job_id: d for d in transfer.drain()}
    assert [done[i].ok for i in (1, 2, 3, 4)] == [False, True, False, False]
    assert "block outside 0 .. 8" in done[1].error and "KV group 1" in done[4].error
    transfer.close()


def test_a_reset_leaves_no_writer() -> None:
    layout = KVLayout((0,), P, G, C, "float32")
    pool = PagePool(2, layout.slot_bytes)
    transfer = DeviceTransfer(layout, pool)
    kv = random_cache(layout, 5)
    transfer.store(kv, [Job(1, "store", 0, [1], [1])])
    transfer.reset()
    assert transfer.drain() == []
    transfer.close()


def test_split_fills_programs() -> None:
    sizes = (1, 4, 16, 64)
    for count in range(1, 200):
        parts = split(count, sizes)
        assert sum(taken for _, taken, _ in parts) == count
        assert all(size in sizes and taken <= size <= 2 * taken for _, taken, size in parts)
    assert len(split(125, sizes)) == 2


def test_pages_do_not_depend_on_sharding() -> None:
    """TP 1 -> 2 -> 4 -> 1 and two layouts, on 8 devices."""
    script = pathlib.Path(__file__).with_name("sharded_trip.py")
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("trip") == 4
