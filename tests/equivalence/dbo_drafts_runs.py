"""Dual-batch overlap with drafts and with counted experts, on and off over two host devices, in a
process of its own."""

import json
import os
import pathlib
import sys
import tempfile
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

SIZE: dict[str, Any] = {
    "model": "mixtral",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "block_size": 16,
    "num_gpu_blocks_override": 48,
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "async_scheduling": False,  # drafts do not depend on what came when
    "speculative_config": json.dumps(
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    ),
    "warmup": "lazy",
}
DBO = {"enable_dbo": True, "dbo_decode_token_threshold": 8, "dbo_prefill_token_threshold": 20}


def main() -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    from engine_runs import engine, request, run

    from jaxengine.models import decoder
    from jaxengine.parallel import expert_load

    split: list[int] = []  # tokens of the programs that were made of two halves
    in_halves = decoder._in_halves

    def watched(spec: Any, layout: Any, params: Any, kv: Any, x: Any, *rest: Any) -> Any:
        split.append(x.shape[0])
        return in_halves(spec, layout, params, kv, x, *rest)

    decoder._in_halves = watched
    found = {}
    for name, more in (("off", {}), ("on", DBO)):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "load.json"
            core = engine(**SIZE, **more, record_expert_load=str(path))
            ids = []
            for count in (1, 2):  # one row of drafts is below the threshold, two are not
                # Nearly every token came before: there is something to draft.
                prompts = [[3 + (7 * j + i) % 317 for j in range(150)] for i in range(count)]
                requests = [request(f"{i}", p, max_tokens=12) for i, p in enumerate(prompts)]
                got = run(core, requests)
                ids += [got[f"{i}"].ids for i in range(count)]
            jax.effects_barrier()
            expert_load.flush()
            stats = core.stats().extra
            load = json.loads(path.read_text())["tokens"]
            found[name] = {"ids": ids, "stats": stats, "load": load, "split": sorted(set(split))}
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    main()
