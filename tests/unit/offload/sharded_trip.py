"""Run by test_transfer in a process with 8 devices: pages written under one sharding are read
under another. Prints one line a trip; any difference raises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxengine.offload.host_pool import PagePool
from jaxengine.offload.jobs import Job
from jaxengine.offload.layout import KVLayout
from jaxengine.offload.transfer import DeviceTransfer

N, P, G, C, LAYERS = 6, 4, 4, 8, 2
SPECS = {
    "token_major": PartitionSpec(None, None, "tp"),
    "head_major": PartitionSpec(None, None, "tp"),
}


def cache(kind: str, ranks: int, values: np.ndarray) -> tuple[tuple[jax.Array, ...], ...]:
    """values [LAYERS, N, 2, G, P, C] as a cache of this kind over `ranks` devices."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("tp",))
    sharding = NamedSharding(mesh, SPECS[kind])
    layers = []
    for layer in values:
        if kind == "head_major":
            arrays = [layer]
        else:
            arrays = [layer[:, i].transpose(0, 2, 1, 3).reshape(N, P, G * C) for i in range(2)]
        layers.append(tuple(jax.device_put(jnp.asarray(a), sharding) for a in arrays))
    return tuple(layers)


def main() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**16, (LAYERS, N, 2, G, P, C), np.uint16)
    values = bits.view(jnp.bfloat16)  # NaN payloads and all
    trips = [("token_major", 1), ("token_major", 2), ("head_major", 4), ("token_major", 1)]
    layouts = {kind: KVLayout((0,) * LAYERS, P, G, C, "bfloat16", kind) for kind in SPECS}
    pool = PagePool(8, layouts["token_major"].slot_bytes)
    blocks, slots = [0, 2, 5], [7, 1, 4]
    current = values
    for number, (kind, ranks) in enumerate(trips):
        transfer = DeviceTransfer(layouts[kind], pool, (4,))
        kv = cache(kind, ranks, current)
        transfer.warmup(kv)
        transfer.store(kv, [Job(number, "store", 0, blocks, slots)])
        assert [done.ok for done in transfer.drain()] == [True]
        following, ranks = trips[(number + 1) % len(trips)]
        target = cache(following, ranks, np.zeros_like(values))
        reader = DeviceTransfer(layouts[following], pool, (4,))
        reader.warmup(target)
        shardings = [array.sharding for layer in target for array in layer]
        target = reader.load(target, [Job(9, "load", 0, blocks, slots)])
        assert [array.sharding for layer in target for array in layer] == shardings
        got = np.stack([_plain(following, layer) for layer in target])
        assert (got.view(np.uint16)[:, blocks] == bits[:, blocks]).all(), "bits changed"
        assert not got.view(np.uint16)[:, [1, 3, 4]].any(), "another block was written"
        assert transfer.compiled_after_warmup == reader.compiled_after_warmup == 0
        current = got
        print(f"trip {number}: {kind} -> {following} over {ranks}")


def _plain(kind: str, layer: tuple[jax.Array, ...]) -> np.ndarray:
    if kind == "head_major":
        return np.asarray(layer[0])
    parts = [np.asarray(a).reshape(N, P, G, C).transpose(0, 2, 1, 3) for a in layer]
    return np.stack(parts, 1)


if __name__ == "__main__":
    main()
