"""`jaxengine bench latency`: seconds of one batch from start to end.

Random prompts, greedy, ignore_eos, in an engine of its own.
"""

from __future__ import annotations

import argparse

import numpy as np

from jaxengine import platform
from jaxengine.engine.core import EngineCore
from jaxengine.lab.bench import machine, results
from jaxengine.lab.bench.batch import random_prompts, run_batch
from jaxengine.lab.bench.flags import (
    add_output,
    engine_config,
    new_parser,
    not_negative,
    parse_with_engine,
    positive,
)

PERCENTS = (10, 25, 50, 75, 90, 99)


def main(argv: list[str]) -> int:
    """Run the bench; prints mean and percentiles."""
    args, settings = parse_with_engine(parser(), argv)
    platform.setup()
    most = max(8, args.batch_size)
    core = EngineCore(engine_config(settings, model=args.model, max_num_seqs=most, warmup="full"))
    times = []
    try:
        for seed in range(args.num_iters_warmup + args.num_iters):
            prompts = random_prompts(core, args.batch_size, args.input_len, seed)
            times.append(run_batch(core, prompts, args.output_len).seconds)
    finally:
        core.shutdown()
    times = times[args.num_iters_warmup :]
    mean = float(np.mean(times))
    percentiles = {str(p): float(np.percentile(times, p)) for p in PERCENTS}
    print(f"avg latency: {mean:.3f} s")
    for percent, seconds in percentiles.items():
        print(f"{percent}% percentile latency: {seconds:.3f} s")
    if args.output_json:
        figures = {"avg_latency": mean, "latencies": times, "percentiles": percentiles}
        shown = vars(args) | settings
        content = results.result("latency", shown, machine.describe(), figures)
        results.save(args.output_json, content)
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("latency", __doc__, engine=True)
    add = made.add_argument
    add("--model", default="demo", help="model folder, .gguf file, hub id or demo")
    add("--input-len", type=positive, default=32, help="tokens of a prompt")
    add("--output-len", type=positive, default=128, help="tokens of an output")
    add("--batch-size", type=positive, default=8, help="prompts at once")
    add("--num-iters-warmup", type=not_negative, default=2, help="runs before the measurement")
    add("--num-iters", type=positive, default=5, help="runs that count")
    add_output(made)
    return made
