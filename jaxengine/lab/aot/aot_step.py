"""The engine's own programs compiled for GPUs on a machine without one.

    python -m jaxengine.lab.aot.aot_step < cases.json

answers [{"config": config.json's content, "target": "h200", "tokens": .., "rows": ..,
"decode_only": .., and settings of the mesh}, ...] ("layers": only the first so many) with the
compiler's figures; `compile_steps` runs it.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from jaxengine.lab.aot import aot
from jaxengine.platform import has_flag, xla_flags

Case = dict[str, Any]


def compile_steps(cases: Sequence[Case], *, timeout: float = 1800) -> Iterator[dict[str, Any]]:
    """Yields every case with its figures or "error", compiled with the flags that an engine of its
    mesh sets. A compiler that aborts costs one case.

    Raises RuntimeError when nothing can be compiled here.
    """
    for devices, alike in itertools.groupby(cases, devices_of):
        wanted = xla_flags(devices).items()
        flags = [f"--{name}={value}" for name, value in wanted if not has_flag(name)]
        yield from aot.in_processes(
            "jaxengine.lab.aot.aot_step", list(alike), flags=flags, timeout=timeout
        )


def devices_of(case: Case) -> int:
    """Devices of the case's mesh."""
    tensor, data = case.get("tensor_parallel_size", 1), case.get("attention_data_parallel_size", 1)
    return int(tensor) * int(data)


def compile_step(case: Case) -> dict[str, Any]:
    """Compile one forward program of the engine.

    The figures are one device's, with `copies` of the cache, `captured` (kernels lie in a command
    buffer), and on a mesh `collectives` (how many of each) and `pairs` (what runs beside them).
    """
    import jax
    import jax.numpy as jnp

    from jaxengine.config import ParallelConfig
    from jaxengine.lab.aot.hlo import overlap_report
    from jaxengine.models.families import spec_from_config
    from jaxengine.models.params import param_shapes, param_specs
    from jaxengine.pallas_kernels import device
    from jaxengine.parallel.mesh import make_devices
    from jaxengine.runner.attention import choose_attention
    from jaxengine.runner.divide import cache_spec, divide
    from jaxengine.runner.forward import StepConfig, forward
    from jaxengine.runner.kv_room import local_bytes, weight_bytes
    from jaxengine.runner.state import state_shapes
    from jaxengine.sched.batch import BatchShape, Bucket, layout_of
    from jaxengine.sched.buckets import row_buckets
    from jaxengine.sched.slot_record import SlotShape

    target = aot.TARGETS[case["target"]]
    device.assume(f"{target.major}.{target.minor}")
    whole = spec_from_config(case["config"])
    layers = min(case.get("layers") or whole.num_layers, whole.num_layers)
    spec = replace(whole, num_layers=layers, windows=whole.windows[:layers])
    dtype = jnp.dtype(jnp.bfloat16)
    seqs, blocks = case.get("max_num_seqs", 256), case.get("blocks", 1024)
    parallel = ParallelConfig(
        **{k: case[k] for k in ParallelConfig.__dataclass_fields__ if k in case}
    )
    layout, page = choose_attention("auto", spec, dtype, case.get("block_size"), on_cpu=False)
    layout = divide(parallel, layout, spec)
    count = layout.data_size * layout.tensor_size
    devices = make_devices(layout, aot.topology(case["target"], count).devices)
    width = -(-case.get("max_model_len", 32768) // page)
    shape = BatchShape(len(spec.groups), width, page, blocks)
    step = StepConfig(spec, shape, 20, row_buckets(seqs), layout)
    dbo = bool(case.get("dbo"))
    bucket = Bucket(case["tokens"], case["rows"], case["decode_only"], dbo)
    state = state_shapes(spec, shape, SlotShape(seqs, 32768, spec.vocab_size), dtype, layout)

    def run(params: Any, kv: Any, last_token: Any, blob: Any) -> Any:
        return forward(step, bucket, params, kv, last_token, blob)

    size = devices.num_shards * layout_of(bucket, shape).size
    blob = jax.ShapeDtypeStruct((size,), jnp.int32)
    params = param_shapes(spec, dtype, layout.tensor_size)
    args = (params, state.kv, state.slots.last_token, blob)
    data, kv_spec = devices.data, cache_spec(spec, layout)
    specs = (param_specs(spec, layout), kv_spec, data, data)
    started = time.monotonic()
    if devices.mesh is None:
        report = aot.compile_for(case["target"], run, args, donate=(1,))
    else:
        report = aot.compile_lowered(
            case["target"],
            count,
            lambda: devices.lower(run, args, specs, (kv_spec, data), donate=(1,)),
        )
    found = {} if devices.mesh is None else _collectives(overlap_report(report.hlo))
    sizes = _local_sizes(devices.place(state.kv, kv_spec))
    copies = [line for line in report.hlo.splitlines() if re.search(r" copy(-start)?\(", line)]
    return {
        **report.as_dict(),
        **found,
        "seconds": round(time.monotonic() - started, 1),
        "layers": layers,
        "weights": weight_bytes(whole, jnp.bfloat16, layout, devices, parallel),
        "cache_bytes": local_bytes(devices.place(state.kv, kv_spec)),
        "block_size": page,
        "copies": sum(any(s in line for s in sizes) for line in copies),
        "captured": "kCommandBuffer" in report.thunks,
    }


def _collectives(pairs: Sequence[Any]) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for pair in pairs:
        counts[pair.op] = counts.get(pair.op, 0) + 1
    return {"collectives": counts, "pairs": [asdict(pair) for pair in pairs]}


def _local_sizes(tree: Any) -> set[str]:
    """The arrays' shapes on one device, as HLO writes them."""
    import jax

    from jaxengine.runner.kv_room import local_shape

    return {"[" + ",".join(map(str, local_shape(a))) + "]" for a in jax.tree.leaves(tree)}


if __name__ == "__main__":
    aot.answer(compile_step)
