"""The bench command: hands over to `jaxengine.lab.bench.NAME.main(argv)`."""

from __future__ import annotations

import importlib
import sys

BENCHES = {
    "throughput": "tokens/s of the engine in this process",
    "latency": "seconds of one batch from start to end",
    "perplexity": "likelihood of texts by type and quantisation",
    "sched": "microseconds of the scheduler a request and step, without a device",
    "spec": "tokens/s and acceptance of speculative decoding, by method and K",
    "offload": "lookups, disk and device copies of the KV tiers, beside the bare machine",
    "serve": "load on a running server, ours or another: TTFT, ITL, tokens/s, goodput",
    "startup": "seconds to the first answer with an empty and a filled compilation cache, by phase",
    "kernels": "each device operation against the roofline of this device",
    "sweep": "a bench over lists of parameters, a result file each, resumable",
    "report": "result files side by side as one HTML page",
}


def run_bench(words: list[str]) -> int:
    """Run the bench named by the first word; its own flags follow. Raises ValueError."""
    if not words or words[0] in ("-h", "--help"):
        print("usage: jaxengine bench NAME [FLAGS]; NAME is one of")
        for name, text in BENCHES.items():
            print(f"  {name:<12}{text}")
        return 0 if words else 2
    name, *rest = words
    if name not in BENCHES:
        raise ValueError(f"there is no bench {name!r}; there are {', '.join(BENCHES)}")
    module = f"jaxengine.lab.bench.{name}"
    try:
        bench = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        print(f"jaxengine: bench {name} is not part of this installation", file=sys.stderr)
        return 1
    code = bench.main(rest)
    return code if isinstance(code, int) else 0
