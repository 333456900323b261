"""`jaxengine bench throughput`: output tokens/s at several batch sizes, with the floor beside each.

Random prompts, greedy, ignore_eos; the time includes prefill. The floor is the least time the
machine needs for the same bytes and FLOPs (the larger of the two, per step), from rates measured
in the same run.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from jaxengine import platform
from jaxengine.bench import results
from jaxengine.bench.batch import random_prompts, run_batch
from jaxengine.bench.flags import add_output, engine_config, new_parser, parse_with_engine, positive
from jaxengine.bench.floor import decode_floor, prefill_seconds
from jaxengine.bench.machine import Machine, measure
from jaxengine.engine.core import EngineCore


def main(argv: list[str]) -> int:
    """Run the bench; prints a table and, with --output-json, writes the figures."""
    args, settings = parse_with_engine(parser(), argv)
    platform.setup()
    machine = measure()
    started = time.perf_counter()
    most = max([*args.num_prompts, 8])
    config = engine_config(
        settings,
        model=args.model,
        max_num_seqs=most,
        max_model_len=args.max_model_len,
        warmup="full",
    )
    core = EngineCore(config)
    ready = time.perf_counter() - started
    spec = core.built.spec
    narrow = config.model.quantization is not None
    weight_bytes = 1 if narrow else 2 if "bfloat16" in core.built.info["dtype"] else 4
    rows: list[dict[str, Any]] = []
    prefill: dict[str, float] = {}
    try:
        for count in args.num_prompts:
            floor = decode_floor(
                spec, machine, weight_bytes, count, args.input_len, args.output_len
            )
            tries = [
                run(core, count, args.input_len, args.output_len, seed)
                for seed in range(args.repeat)
            ]
            best = max(tries, key=lambda figures: figures["tokens_per_s"])
            rows.append({"requests": count, **best, "floor_tokens_per_s": floor})
        if args.prefill_len:
            best_of = (run(core, 8, args.prefill_len, 1, seed) for seed in range(args.repeat))
            least = prefill_seconds(spec, machine, 8, args.prefill_len)
            prefill = {
                "tokens_per_s": max(figures["prompt_tokens_per_s"] for figures in best_of),
                "floor_tokens_per_s": 8 * args.prefill_len / least,
            }
    finally:
        core.shutdown()
    _print(machine, ready, rows, args, prefill)
    if args.output_json:
        figures = {"ready_s": ready, "rows": rows, "prefill": prefill}
        shown = vars(args) | settings
        content = results.result("throughput", shown, machine.to_dict(), figures, ["requests"])
        results.save(args.output_json, content)
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("throughput", __doc__, engine=True)
    add = made.add_argument
    add("--model", default="demo", help="model folder, .gguf file, hub id or demo")
    add("--input-len", type=positive, default=128, help="tokens of a prompt")
    add("--output-len", type=positive, default=64, help="tokens of an output")
    add("--num-prompts", type=positive, nargs="+", default=[1, 8, 32], help="batch sizes")
    add("--prefill-len", type=int, default=1024, help="of the 8-prompt prefill; 0 = without")
    add("--max-model-len", type=positive, default=2048, help="most tokens of a sequence")
    add("--repeat", type=positive, default=2, help="runs of each; the best counts")
    add_output(made)
    return made


def run(
    core: EngineCore, count: int, input_len: int, output_len: int, seed: int
) -> dict[str, float]:
    """One batch from an empty engine. Times in seconds, host time per step in milliseconds."""
    done = run_batch(core, random_prompts(core, count, input_len, seed), output_len)
    return {
        "tokens_per_s": sum(map(len, done.ids)) / done.seconds,
        "prompt_tokens_per_s": count * input_len / done.seconds,
        "seconds": done.seconds,
        "first_token_s": done.first,
        "host_ms_per_step": 1e3 * done.host_seconds / max(1, done.steps),
    }


def _print(
    machine: Machine,
    ready: float,
    rows: list[dict[str, Any]],
    args: argparse.Namespace,
    prefill: dict[str, float],
) -> None:
    print(f"{machine.name}, {machine.cores} cores: float32 {machine.gflops_float32:.0f} GFLOP/s,")
    print(f"  bfloat16 {machine.gflops_bfloat16:.0f} GFLOP/s, memory {machine.gbytes:.1f} GB/s")
    print(f"ready in {ready:.1f} s; prompts {args.input_len}, outputs {args.output_len}")
    print(f"{'requests':>9}{'tok/s':>9}{'floor':>9}{'share':>7}{'host ms/step':>14}{'first s':>9}")
    for row in rows:
        share = row["tokens_per_s"] / row["floor_tokens_per_s"]
        print(
            f"{row['requests']:>9}{row['tokens_per_s']:>9.1f}{row['floor_tokens_per_s']:>9.1f}"
            f"{share:>7.0%}{row['host_ms_per_step']:>14.2f}{row['first_token_s']:>9.2f}"
        )
    if prefill:
        print(
            f"prefill 8 x {args.prefill_len}: {prefill['tokens_per_s']:.0f} tok/s, "
            f"floor {prefill['floor_tokens_per_s']:.0f}"
        )
