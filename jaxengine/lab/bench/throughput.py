"""`jaxengine bench throughput`: output tokens/s at several batch sizes, with the floor beside each.

Greedy, ignore_eos, all prompts at once (a trace's times do not count); the time includes prefill.
The floor is the least time the machine needs for the same bytes and FLOPs (the larger of the two,
per step), from rates measured in the same run. Where lengths vary it is that of their means, which
is never more. It counts every prompt token: prompts that share a prefix can beat it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from jaxengine import platform
from jaxengine.engine.core import EngineCore
from jaxengine.lab.bench import results
from jaxengine.lab.bench.batch import random_prompts, run_batch
from jaxengine.lab.bench.datasets import BenchRequest, prompt_tokens
from jaxengine.lab.bench.flags import (
    add_output,
    engine_config,
    new_parser,
    parse_with_engine,
    positive,
)
from jaxengine.lab.bench.floor import decode_floor, prefill_seconds
from jaxengine.lab.bench.machine import Machine, measure
from jaxengine.lab.bench.workload import add_dataset, dataset_requests
from jaxengine.text.tokenizer import Tokenizer, load_tokenizer
from jaxengine.weights.resolve import resolve_model


def main(argv: list[str]) -> int:
    """Run the bench; prints a table and, with --output-json, writes the figures. Raises
    ValueError for wrong flags, and for requests that are longer than the engine takes."""
    args, settings = parse_with_engine(parser(), argv)
    batches = make_batches(args, _tokenizer(args))
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
    spec = core.facts.spec
    narrow = config.model.quantization is not None
    weight_bytes = 1 if narrow else 2 if "bfloat16" in core.facts.info["dtype"] else 4
    rows: list[dict[str, Any]] = []
    prefill: dict[str, float] = {}
    try:
        for count, tries in zip(args.num_prompts, batches, strict=True):
            done = [run(core, *batch) for batch in tries]
            best = max(done, key=lambda figures: figures["tokens_per_s"])
            lengths = round(best["input_len"]), round(best["output_len"])
            floor = decode_floor(spec, machine, weight_bytes, count, *lengths)
            rows.append({"requests": count, **best, "floor_tokens_per_s": floor})
        if args.prefill_len:
            prompts = [random_prompts(core, 8, args.prefill_len, i) for i in range(args.repeat)]
            best_of = [run(core, one, [1] * 8) for one in prompts]
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
    add("--num-prompts", type=positive, nargs="+", default=[1, 8, 32], help="batch sizes")
    add("--prefill-len", type=int, default=1024, help="of the 8-prompt prefill; 0 = without")
    add("--max-model-len", type=positive, default=2048, help="most tokens of a sequence")
    add("--repeat", type=positive, default=2, help="runs of each; the best counts")
    add_dataset(made, short=True)
    add_output(made)
    return made


Batch = tuple[list[list[int]], list[int]]  # token ids and output lengths


def make_batches(args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[list[Batch]]:
    """Of every size, the batches of all repeats. Text becomes tokens by `tokenizer`, which
    sharegpt and custom need. Raises ValueError naming the flag or file."""

    def tokens(request: BenchRequest, seed: int) -> list[int]:
        if isinstance(request.prompt, str):
            assert tokenizer is not None
            return tokenizer.encode(request.prompt, add_special_tokens=False)
        return list(prompt_tokens(request, seed))

    def batch(size: int, seed: int) -> Batch:
        count = None if tokenizer is None else lambda text: len(tokenizer.encode(text, False))
        requests = dataset_requests(args, size, count, seed)
        if len(requests) < size:
            raise ValueError(f"{args.dataset_path} has {len(requests)} requests, not {size}")
        longest = max(r.prompt_len + r.output_len for r in requests)
        if longest > args.max_model_len:
            raise ValueError(
                f"a prompt and its output are {longest} tokens, which --max-model-len "
                f"{args.max_model_len} does not take"
            )
        return [tokens(r, seed) for r in requests], [r.output_len for r in requests]

    seeds = range(args.seed, args.seed + args.repeat)
    return [[batch(size, seed) for seed in seeds] for size in args.num_prompts]


def _tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    """The model's, for data sets of text."""
    text = args.dataset_name in ("sharegpt", "custom")
    return load_tokenizer(resolve_model(args.model)) if text else None


def run(core: EngineCore, prompts: list[list[int]], output_lens: list[int]) -> dict[str, float]:
    """One batch from an empty engine; made-up tokens are wrapped to the model's vocabulary. Times
    in seconds, host time per step in milliseconds."""
    vocab = core.facts.spec.vocab_size
    done = run_batch(core, [[t % vocab for t in prompt] for prompt in prompts], output_lens)
    prompt_tokens, output_tokens = sum(map(len, prompts)), sum(map(len, done.ids))
    return {
        "tokens_per_s": output_tokens / done.seconds,
        "prompt_tokens_per_s": prompt_tokens / done.seconds,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / done.seconds,
        "requests_per_s": len(prompts) / done.seconds,
        "seconds": done.seconds,
        "first_token_s": done.first,
        "host_ms_per_step": 1e3 * done.host_seconds / max(1, done.steps),
        "input_len": float(np.mean([len(prompt) for prompt in prompts])),
        "output_len": float(np.mean(output_lens)),
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
    print(f"ready in {ready:.1f} s; {args.dataset_name} prompts; lengths are means")
    print(
        f"{'requests':>9}{'prompt':>8}{'output':>8}{'tok/s':>9}{'floor':>9}{'share':>7}"
        f"{'all tok/s':>11}{'host ms/step':>14}{'first s':>9}"
    )
    for row in rows:
        share = row["tokens_per_s"] / row["floor_tokens_per_s"]
        print(
            f"{row['requests']:>9}{row['input_len']:>8.0f}{row['output_len']:>8.0f}"
            f"{row['tokens_per_s']:>9.1f}{row['floor_tokens_per_s']:>9.1f}{share:>7.0%}"
            f"{row['total_tokens_per_s']:>11.1f}{row['host_ms_per_step']:>14.2f}{row['first_token_s']:>9.2f}"
        )
    if prefill:
        print(
            f"prefill 8 x {args.prefill_len}: {prefill['tokens_per_s']:.0f} tok/s, "
            f"floor {prefill['floor_tokens_per_s']:.0f}"
        )
