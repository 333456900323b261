"""Two halves against the whole, on 8 host devices; prints one JSON object a check.

A small decoder of causal attention and experts: the second half attends to the first's keys, and
the cut falls inside a request.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxengine.pallas_kernels.moe import route
from jaxengine.parallel import exchange, experts, overlap

T, D, E, F, K, DEVICES = 11, 16, 16, 8, 3, 8
MESH = Mesh(np.array(jax.devices()), ("x",))
SHARDS = exchange.ExpertShards(("x",), DEVICES, E // DEVICES)


def attention(w: Any, start: int, x: Any, cache: Any) -> tuple[Any, Any]:
    q, k = jnp.split(x @ w["qk"], 2, axis=-1)
    cache = jax.lax.dynamic_update_slice_in_dim(cache, k, start, 0)
    scores = q @ cache.T / D
    causal = jnp.arange(cache.shape[0])[None] <= start + jnp.arange(x.shape[0])[:, None]
    return x + jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1) @ cache, cache


def expert_layer(w: Any, starts: Any, backend: str, real: int) -> overlap.ExpertLayer:
    held = experts.ExpertWeights(w["gate_up"], w["down"])

    def plan(count: int) -> exchange.ExchangePlan:
        return exchange.make_plan(count, K, D, 4, SHARDS, backend, count)

    def attend(half: int, x: Any, cache: Any) -> Any:
        x, cache = attention(w, starts[half], x, cache)
        return {"x": x, "half": jnp.full((), half)}, cache

    def pack(state: Any) -> Any:
        x = state["x"]
        weights, ids = route(x @ w["router"], K)
        # The last tokens are padding, which the second half holds.
        token = jnp.where(state["half"] == 0, starts[0], starts[1]) + jnp.arange(x.shape[0])
        packed = exchange.pack(
            plan(x.shape[0]), x, jnp.where(token[:, None] < real, ids, -1), weights
        )
        return (x, packed), packed

    def send(kept: Any, payload: Any) -> Any:
        return exchange.send(plan(kept[0].shape[0]), payload)

    def run(kept: Any, came: Any) -> Any:
        received = exchange.unpack(plan(kept[0].shape[0]), came, D, kept[0].dtype)
        return experts.compute(received, held, experts.ExpertOptions()), received

    def give_back(kept: Any, rows: Any) -> Any:
        return exchange.give_back(plan(kept[0].shape[0]), *rows)

    def after(kept: Any, back: Any) -> Any:
        x, packed = kept
        return x + exchange.combine(plan(x.shape[0]), back, packed)

    return overlap.ExpertLayer(attend, pack, send, run, give_back, after)


@functools.partial(jax.jit, static_argnames=("cut", "backend", "real"))
def decoder(x: Any, weights: Any, caches: Any, cut: int, backend: str, real: int) -> Any:
    def step(x: Any, weights: Any, caches: Any) -> Any:
        starts = (0, cut)
        layers: list[Any] = [expert_layer(w, starts, backend, real) for w in weights]

        def dense(half: int, x: Any, cache: Any) -> Any:
            return attention(weights[0], starts[half], x, cache)

        layers.insert(1, overlap.DenseLayer(dense))
        layers.insert(0, overlap.DenseLayer(dense))
        if cut == 0:
            return overlap.run_whole(layers, x, caches)
        halves, caches = overlap.interleave(layers, (x[:cut], x[cut:]), caches)
        return jnp.concatenate(halves), caches

    spec = [{k: P("x") if k in ("gate_up", "down") else P() for k in w} for w in weights]
    mapped = jax.shard_map(
        step, mesh=MESH, in_specs=(P("x"), spec, P("x")), out_specs=P("x"), check_vma=False
    )
    return mapped(x, weights, caches)


def main() -> None:
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * 0.25, jnp.float32)

    weights = [
        {"qk": draw(D, 2 * D), "router": draw(D, E), "gate_up": draw(E, 2 * F, D),
         "down": draw(E, D, F)}
        for _ in range(2)
    ]  # fmt: skip
    x = draw(DEVICES * T, D)
    caches = [jnp.zeros((DEVICES * T, D)) for _ in range(4)]
    for backend in ("all_to_all", "allgather"):
        whole, kept = decoder(x, weights, caches, 0, backend, T - 2)
        size = float(jnp.abs(whole).max())
        balanced = overlap.split_tokens(T - 2, T)
        for cut in (1, balanced, T - 3) if backend == "all_to_all" else (balanced,):
            got, written = decoder(x, weights, caches, cut, backend, T - 2)
            difference = max(
                float(jnp.abs(a - b).max())
                for a, b in zip([whole, *kept], [got, *written], strict=True)
            )
            print(
                json.dumps({"check": f"{backend} cut {cut}", "value": difference / size}),
                flush=True,
            )
    moved = float(jnp.abs(whole - x).max()) / size
    print(json.dumps({"check": "what the layers change", "value": moved}))


if __name__ == "__main__":
    main()
