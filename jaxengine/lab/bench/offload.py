"""`jaxengine bench offload`: what the tiers can move, beside what the machine can move.

Lookups, the fs tier against the same disk written and read plainly, and copies between the JAX
device and host slots; the page is that of the settings. With --model also what a conversation
that returns gains (offload_model.py).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable

import numpy as np

from jaxengine.lab.bench import machine, results
from jaxengine.lab.bench.flags import add_output, new_parser, positive
from jaxengine.offload.host_pool import PagePool
from jaxengine.offload.jobs import Job
from jaxengine.offload.keys import OffloadKey, make_key, namespace_key
from jaxengine.offload.layout import KVLayout
from jaxengine.offload.policies import make_policy
from jaxengine.offload.tiers.fs import FsStore
from jaxengine.offload.tiers.host import HostTier, State

MIB = 2**20


def main(argv: list[str] | None = None) -> int:
    """Prints one figure a line, or JSON with --json."""
    args = parser().parse_args(argv)
    layout = KVLayout((0,) * args.layers, args.block_size, args.kv_heads, args.head_dim, args.dtype)
    figures = {"page_KiB": layout.slot_bytes / 1024}
    figures |= measure_lookups(1000)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kv-bench-", dir=args.folder))
    try:
        figures |= measure_fs(folder, layout.slot_bytes, args.blocks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures |= measure_device(layout, args.blocks)
    if args.model is not None:
        from jaxengine.lab.bench.offload_model import measure

        figures |= measure(args.model, args.rounds)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<28}{value:>12.3f}")
    if args.output_json:
        results.save(args.output_json, results.result("offload", args, machine.describe(), figures))
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("offload", __doc__)
    add = made.add_argument
    add("--blocks", type=positive, default=128, help="blocks to move")
    add("--layers", type=positive, default=30, help="of the model that a block belongs to")
    add("--kv-heads", type=positive, default=3, help="of a layer")
    add("--head-dim", type=positive, default=64, help="width of a head")
    add("--block-size", type=positive, default=16, help="tokens of a block")
    add("--dtype", default="bfloat16", help="of keys and values")
    add("--folder", default=None, help="on the disk to measure; default: temporary")
    add("--model", default=None, help="measure a returning conversation with it")
    add("--rounds", type=positive, default=3, help="repetitions with --model")
    add("--json", action="store_true", help="print JSON")
    add_output(made)
    return made


def measure_lookups(count: int) -> dict[str, float]:
    """Milliseconds to look up `count` blocks in host memory."""
    host = HostTier(PagePool(count, 1), make_policy("lru", count))
    hashes = [i.to_bytes(32, "big") for i in range(count)]
    reserved = host.reserve([make_key(h, 0) for h in hashes])
    assert reserved is not None
    host.commit(reserved.slots, True)

    def look() -> None:
        assert all(host.lookup(make_key(h, 0)) is State.HIT for h in hashes)

    return {f"lookup_{count}_blocks_ms": 1e3 * min(_seconds(look) for _ in range(10))}


def measure_fs(folder: pathlib.Path, page_bytes: int, blocks: int) -> dict[str, float]:
    """MiB/s of the tier and of the bare disk, both with every file synced, one thread. Reads come
    from the page cache in both."""
    page = np.random.default_rng(0).integers(0, 256, page_bytes, np.uint8)
    keys: list[OffloadKey] = [make_key(i.to_bytes(32, "big"), 0) for i in range(blocks)]
    store = FsStore(folder / "tier", namespace_key({"bench": "offload"}), 2**60)
    plain = folder / "plain"
    plain.mkdir()

    def write_plain() -> None:
        for i in range(blocks):
            file = os.open(plain / str(i), os.O_WRONLY | os.O_CREAT)
            os.write(file, page)
            os.fdatasync(file)
            os.close(file)

    def read_plain() -> None:
        for i in range(blocks):
            with open(plain / str(i), "rb", buffering=0) as file:
                file.readinto(page)

    def write_tier() -> None:
        assert all(store.write(key, page) for key in keys)

    def read_tier() -> None:
        assert all(store.read(keys, [page] * blocks))

    amount = blocks * page_bytes / MIB
    figures = {
        "disk_write_MiB_s": amount / _seconds(write_plain),
        "fs_write_MiB_s": amount / _seconds(write_tier),
        "disk_read_MiB_s": amount / _seconds(read_plain),
        "fs_read_MiB_s": amount / _seconds(read_tier),
    }
    store.close()
    figures["fs_write_share"] = figures["fs_write_MiB_s"] / figures["disk_write_MiB_s"]
    return figures


def measure_device(layout: KVLayout, blocks: int) -> dict[str, float]:
    """MiB/s between the device and host slots."""
    from jaxengine import platform

    platform.setup()
    import jax
    import jax.numpy as jnp

    from jaxengine.offload.transfer import DeviceTransfer

    pool = PagePool(blocks, layout.slot_bytes)
    transfer = DeviceTransfer(layout, pool)
    shape = (blocks, layout.block_size, layout.kv_heads * layout.head_dim)
    kv = tuple(
        (jnp.ones(shape, layout.dtype), jnp.ones(shape, layout.dtype)) for _ in layout.layer_group
    )
    transfer.warmup(kv)
    ids = list(range(blocks))
    store_seconds = load_seconds = float("inf")
    for turn in range(4):  # the first touches memory for the first time
        began = time.perf_counter()
        transfer.store(kv, [Job(2 * turn, "store", 0, ids, ids)])
        transfer.drain()
        stored = time.perf_counter()
        kv = transfer.load(kv, [Job(2 * turn + 1, "load", 0, ids, ids)])  # type: ignore[assignment]
        jax.block_until_ready(kv)
        store_seconds = min(store_seconds, stored - began)
        load_seconds = min(load_seconds, time.perf_counter() - stored)
    transfer.close()
    amount = blocks * layout.slot_bytes / MIB
    return {
        "device_to_host_MiB_s": amount / store_seconds,
        "host_to_device_MiB_s": amount / load_seconds,
    }


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
