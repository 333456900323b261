"""Dual-batch overlap on and off over two host devices, in a process of its own.

Case B74: batches of 1, 2, 3 and 33 requests of very different lengths, prompts cut inside, a
shard that is idle or below the threshold, thresholds at the edge.
"""

import json
import os
import pathlib
import random

os.environ["JAX_PLATFORMS"] = "cpu"


def main() -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    from engine_runs import VOCAB, engine, request, run

    size = {
        "model": "mixtral",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 16,
        "num_gpu_blocks_override": 120,
        "attention_data_parallel_size": 2,
        "enable_expert_parallel": True,
        "warmup": "lazy",
    }
    rng = random.Random(74)
    batches = []
    for count in (1, 2, 3, 33):
        lengths = [rng.choice((1, 2, 15, 16, 17, 40, 90)) for _ in range(count)]
        lengths[0] = 100  # its chunks are cut inside
        batches.append([[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths])
    seen: dict[str, list[list[int]]] = {}
    figures = {}
    for name, more in (
        ("off", {}),
        (
            "2",
            {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2},
        ),
        (
            "5",
            {
                "enable_dbo": True,
                "dbo_decode_token_threshold": 5,
                "dbo_prefill_token_threshold": 17,
            },
        ),
    ):
        core = engine(**size, **more)
        ids = []
        for again in (False, True):  # the first round only compiles what the second needs
            for batch in batches:
                requests = [request(str(i), prompt, max_tokens=6) for i, prompt in enumerate(batch)]
                got = run(core, requests)
                ids += [got[str(i)].ids for i in range(len(batch)) if again]
            core.utility("wait_warm", [])
        seen[name] = ids
        figures[name] = core.stats().extra
    print(json.dumps({"equal": [seen[n] == seen["off"] for n in ("2", "5")], "figures": figures}))


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    main()
