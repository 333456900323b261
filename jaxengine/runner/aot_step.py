"""The engine's own programs compiled for a GPU on a machine without one.

    python -m jaxengine.runner.aot_step < cases.json

reads [{"config": config.json's content, "target": "h200", "tokens": .., "rows": ..,
"decode_only": ..}, ...] and
prints one JSON object a line: the compiler's figures, or "error". Run by `compile_steps`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jaxengine.pallas_kernels import aot

Case = dict[str, Any]


def compile_steps(cases: Sequence[Case], *, timeout: float = 1800) -> Iterator[dict[str, Any]]:
    """Yields every case with its figures or "error". A compiler that aborts costs one case.

    Raises RuntimeError when nothing can be compiled here.
    """
    if reason := aot.missing():
        raise RuntimeError(reason)
    todo = list(cases)
    while todo:
        with aot.dump_folder() as folder:
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxengine.runner.aot_step"],
                env=aot.worker_env(folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            try:
                out, _ = process.communicate(json.dumps(todo), timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        for case, line in zip(todo, lines, strict=False):
            yield {**case, **line}
        todo = todo[len(lines) :]
        if todo:
            yield {**todo.pop(0), "error": "the compiler process ended or took too long"}


def compile_step(case: Case) -> dict[str, Any]:
    """Compile one forward program of the engine; the figures, with `copies` of the cache and
    `captured` (kernels lie in a command buffer)."""
    import jax
    import jax.numpy as jnp

    from jaxengine.models.decoder import param_shapes
    from jaxengine.models.families import spec_from_config
    from jaxengine.pallas_kernels import device
    from jaxengine.runner.buckets import row_buckets
    from jaxengine.runner.choice import choose_attention
    from jaxengine.runner.forward import StepConfig, forward
    from jaxengine.runner.state import state_shapes
    from jaxengine.sched.batch import BatchShape, Bucket, layout_of
    from jaxengine.sched.slot_record import SlotShape

    target = aot.TARGETS[case["target"]]
    device.assume(f"{target.major}.{target.minor}")
    spec = spec_from_config(case["config"])
    dtype = jnp.dtype(jnp.bfloat16)
    seqs, blocks = case.get("max_num_seqs", 256), case.get("blocks", 1024)
    layout, page = choose_attention("auto", spec, dtype, case.get("block_size"), on_cpu=False)
    width = -(-case.get("max_model_len", 32768) // page)
    shape = BatchShape(len(spec.groups), width, page, blocks)
    step = StepConfig(spec, shape, 20, row_buckets(seqs), layout)
    bucket = Bucket(case["tokens"], case["rows"], case["decode_only"])
    state = state_shapes(spec, shape, SlotShape(seqs, 32768, spec.vocab_size), dtype, layout)

    def run(params: Any, kv: Any, last_token: Any, blob: Any) -> Any:
        return forward(step, bucket, params, kv, last_token, blob)

    blob = jax.ShapeDtypeStruct((layout_of(bucket, shape).size,), jnp.int32)
    args = (param_shapes(spec, dtype), state.kv, state.slots.last_token, blob)
    started = time.monotonic()
    report = aot.compile_for(case["target"], run, args, donate=(1,))
    seconds = time.monotonic() - started
    sizes = {"[" + ",".join(map(str, a.shape)) + "]" for a in jax.tree.leaves(state.kv)}
    copies = [line for line in report.hlo.splitlines() if re.search(r" copy(-start)?\(", line)]
    return {
        **report.as_dict(),
        "seconds": round(seconds, 1),
        "cache_bytes": sum(a.size * dtype.itemsize for a in jax.tree.leaves(state.kv)),
        "copies": sum(any(s in line for s in sizes) for line in copies),
        "captured": "kCommandBuffer" in report.thunks,
    }


def main() -> None:
    for case in json.load(sys.stdin):
        try:
            line = compile_step(case)
        except Exception as e:  # noqa: BLE001 - one case's error is its result
            line = {"error": f"{type(e).__name__}: {str(e).splitlines()[0][:300]}"}
        print(json.dumps(line), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the plugin has no device to shut down


if __name__ == "__main__":
    main()
