"""`jaxengine bench latency`: seconds of one batch from start to end."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from jaxengine import platform
from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore


def main(argv: list[str]) -> int:
    """Run the bench; prints mean and percentiles."""
    from jaxengine.bench.throughput import run

    parser = argparse.ArgumentParser(prog="jaxengine bench latency", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-iters-warmup", type=int, default=2)
    parser.add_argument("--num-iters", type=int, default=5)
    parser.add_argument("--output-json", default=None)
    args = parser.parse_args(argv)
    platform.setup()
    core = EngineCore(
        EngineConfig.of(
            model=args.model,
            dtype=args.dtype,
            max_num_seqs=max(8, args.batch_size),
            warmup="full",
        )
    )
    try:
        times = [
            run(core, args.batch_size, args.input_len, args.output_len, seed)["seconds"]
            for seed in range(args.num_iters_warmup + args.num_iters)
        ][args.num_iters_warmup :]
    finally:
        core.shutdown()
    cuts = statistics.quantiles(times, n=100) if len(times) > 1 else times * 99
    print(f"avg latency: {statistics.mean(times):.3f} s")
    for percent in (10, 25, 50, 75, 90, 99):
        print(f"{percent}% percentile latency: {cuts[percent - 1]:.3f} s")
    if args.output_json:
        Path(args.output_json).write_text(json.dumps({"latencies": times}) + "\n")
    return 0
