"""Expert parallelism on 8 host devices against float64; prints one JSON object a check.

Runs in a process of its own: the number of host devices must be set before JAX starts.
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

from jaxengine.parallel import eplb
from jaxengine.parallel.exchange import ExpertShards
from jaxengine.parallel.experts import (
    ExpertWeights,
    Replicas,
    expert_parallel_mlp,
    replicated_expert_mlp,
)

E, D, F = 16, 16, 8
MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
AXES = ("data", "model")
RNG = np.random.default_rng(0)


def weights(biased: bool = False, dtype: Any = jnp.float32) -> ExpertWeights:
    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(RNG.normal(size=shape) * 0.5, dtype)

    biases = (draw(E, 2 * F), draw(E, D)) if biased else (None, None)
    return ExpertWeights(draw(E, 2 * F, D), draw(E, D, F), *biases)


def oracle(x: Any, ids: Any, w: Any, experts: ExpertWeights, clamp: float = 0.0) -> Any:
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    gate_up, down = (np.asarray(a, np.float64) for a in experts[:2])
    out = np.zeros_like(x)
    for t, row in enumerate(np.asarray(ids)):
        for k, e in enumerate(row):
            if e < 0:
                continue
            h = gate_up[e] @ x[t]
            if experts.gate_up_bias is not None:
                h = h + np.asarray(experts.gate_up_bias, np.float64)[e]
            gate, up = h[:F], h[F:]
            if clamp:
                gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
                inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            else:
                inner = gate / (1 + np.exp(-gate)) * up
            y = down[e] @ inner
            if experts.down_bias is not None:
                y = y + np.asarray(experts.down_bias, np.float64)[e]
            out[t] += w[t, k] * y
    return out


def draw(tokens: int, top_k: int, padding: int = 0) -> tuple[Any, Any, Any]:
    x = RNG.normal(size=(tokens, D)).astype(np.float32)
    ids = np.argsort(RNG.uniform(size=(tokens, E)), axis=1)[:, :top_k].astype(np.int32)
    w = RNG.uniform(0.1, 1.0, size=(tokens, top_k)).astype(np.float32)
    if padding:
        ids[-padding:] = -1
        x[-padding:] = np.nan  # a padding token must reach no sum
    return x, ids, w


@functools.partial(jax.jit, static_argnames=("how", "replicated"))
def run(
    x: Any, ids: Any, w: Any, experts: Any, replicas: Any, how: Any, replicated: bool = False
) -> Any:
    shards = ExpertShards(AXES, 8, experts.gate_up.shape[0] // 8)
    mlp: Any = replicated_expert_mlp if replicated else expert_parallel_mlp
    spread = P() if replicated else P(AXES)

    def inside(x: Any, ids: Any, w: Any, experts: Any, replicas: Any) -> Any:
        return mlp(x, ids, w, experts, shards=shards, replicas=replicas, **dict(how))

    mapped = jax.shard_map(
        inside, mesh=MESH, in_specs=(spread, spread, spread, P(AXES), P()), out_specs=spread,
        check_vma=False,
    )  # fmt: skip
    return mapped(x, ids, w, experts, replicas)


def error(x: Any, ids: Any, w: Any, e: Any, *, clamp: float = 0.0, **how: Any) -> float:
    """Largest difference from the oracle, relative to its largest value."""
    replicated = bool(how.pop("replicated", False))
    slots, slot_weights = how.pop("replicas", None), how.pop("slot_weights", e)
    got = run(x, ids, w, slot_weights, slots, tuple(sorted(how.items())), replicated)
    clean = np.where(np.isnan(x), 0, x)
    want = oracle(clean, ids, w, e, clamp)
    return float(np.abs(np.asarray(got, np.float64) - want).max() / max(np.abs(want).max(), 1.0))


def say(name: str, value: Any) -> None:
    print(json.dumps({"check": name, "value": value}), flush=True)


def main() -> None:
    plain = weights()
    batch = draw(8 * 6, 4, padding=7)
    for backend in ("allgather", "all_to_all"):
        say(f"{backend}", error(*batch, plain, backend=backend))
    say("two rows reserved", error(*batch, plain, backend="all_to_all", rows=2))
    # Equal shapes share a compiled program.
    one = draw(8 * 6, 4)
    one[1][:] = [3, -1, -1, -1]
    say("all to one expert", error(*one, plain, backend="all_to_all", rows=2))
    idle = draw(8 * 6, 4)
    idle[1][:] = -1
    say("only padding", error(*idle, plain, backend="all_to_all"))
    none = run(*draw(0, 2), plain, None, (("backend", "all_to_all"),))
    say("no tokens", list(none.shape))
    many = draw(8, 5)  # two experts a device
    say("more experts a token than a device has", error(*many, plain, backend="all_to_all"))
    biased = weights(biased=True)
    say("biased", error(*batch, biased, backend="all_to_all"))
    clamped = {"activation": "clamped_swiglu", "activation_limit": 0.5, "clamp": 0.5}
    say("clamped", error(*batch, biased, backend="allgather", **clamped))
    narrow = weights(dtype=jnp.bfloat16)
    say("float32 x, bfloat16 weights", error(*batch, narrow, backend="all_to_all"))
    x16 = (jnp.asarray(np.nan_to_num(batch[0]), jnp.bfloat16), *batch[1:])
    say("bfloat16 x", error(*x16, narrow, backend="all_to_all"))

    for backend in ("psum", "all_to_all"):
        how = {"backend": backend, "replicated": True}
        say(f"replicated {backend}", error(*draw(13, 4, padding=2), plain, **how))

    load = np.ones(E)
    load[3] = 20
    placed = eplb.place(load, 8, 3)
    held = ExpertWeights(*(a if a is None else a[placed.expert_of_slot] for a in plain))
    slots = Replicas(jnp.asarray(placed.slots), jnp.asarray(placed.copies))
    how = {"replicas": slots, "slot_weights": held}
    say("copies", error(*batch, plain, backend="all_to_all", **how))

    again = [
        np.asarray(run(*one, plain, None, (("backend", "all_to_all"), ("rows", 2)))).tobytes()
        for _ in range(2)
    ]
    say("same bits", again[0] == again[1])


if __name__ == "__main__":
    main()
