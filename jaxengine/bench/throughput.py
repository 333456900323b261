"""`jaxengine bench throughput`: output tokens/s at several batch sizes, with the floor beside each.

Random prompts, greedy, ignore_eos; the time includes prefill. The floor is the least time the
machine needs for the same bytes and FLOPs (the larger of the two, per step), from rates measured
in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine import platform
from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.engine.messages import EngineRequest
from jaxengine.models.spec import DecoderSpec
from jaxengine.sampling_params import SamplingParams


def main(argv: list[str]) -> int:
    """Run the bench; prints a table and, with --output-json, writes the figures."""
    args = _parser().parse_args(argv)
    platform.setup()
    from jaxengine.bench.machine import measure

    machine = measure()
    started = time.perf_counter()
    core = EngineCore(
        EngineConfig.of(
            model=args.model,
            dtype=args.dtype,
            quantization=args.quantization,
            max_num_seqs=max(args.num_prompts + [8]),
            async_scheduling=not args.no_async_scheduling,
            max_model_len=args.max_model_len,
            warmup="full",
        )
    )
    ready = time.perf_counter() - started
    spec = core.built.spec
    weight_bytes = 1 if args.quantization else 2 if "bfloat16" in core.built.info["dtype"] else 4
    rows: list[dict[str, Any]] = []
    try:
        for count in args.num_prompts:
            floor = decode_floor(
                spec, machine, weight_bytes, count, args.input_len, args.output_len
            )
            best = max(
                (
                    run(core, count, args.input_len, args.output_len, seed)
                    for seed in range(args.repeat)
                ),
                key=lambda figures: figures["tokens_per_s"],
            )
            rows.append({"requests": count, **best, "floor_tokens_per_s": floor})
        prefill = max(
            run(core, 8, args.prefill_len, 1, seed)["prompt_tokens_per_s"]
            for seed in range(args.repeat)
        )
    finally:
        core.shutdown()
    prefill_floor = 8 * args.prefill_len / prefill_seconds(spec, machine, 8, args.prefill_len)
    _print(machine, ready, rows, args, prefill, prefill_floor)
    if args.output_json:
        figures = {
            "machine": machine.to_dict(),
            "settings": vars(args),
            "ready_s": ready,
            "rows": rows,
            "prefill": {"tokens_per_s": prefill, "floor_tokens_per_s": prefill_floor},
        }
        Path(args.output_json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxengine bench throughput", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=["int8"], default=None)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--prefill-len", type=int, default=1024, help="of the 8-prompt prefill")
    parser.add_argument("--num-prompts", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=2, help="runs of each; the best counts")
    parser.add_argument("--no-async-scheduling", action="store_true")
    parser.add_argument("--output-json", default=None)
    return parser


def run(
    core: EngineCore, count: int, input_len: int, output_len: int, seed: int
) -> dict[str, float]:
    """One batch from an empty engine. Times in seconds, host time per step in milliseconds."""
    rng = np.random.default_rng([seed, count, input_len])
    vocab = core.built.spec.vocab_size
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    core.scheduler.reset_prefix_cache()
    before = core.stats()
    steps, host = before.num_steps, before.host_seconds
    start = time.perf_counter()
    for i in range(count):
        prompt = rng.integers(0, vocab, input_len).tolist()
        core.add_request(
            EngineRequest(
                request_id=f"{seed}-{i}", prompt_token_ids=prompt, params=params, arrival_time=0.0
            )
        )
    first, tokens = 0.0, 0
    while core.has_work():
        for output in core.step():
            if output.error:
                raise RuntimeError(output.error)
            first = first or time.perf_counter() - start
            tokens += len(output.new_token_ids)
    seconds = time.perf_counter() - start
    after = core.stats()
    return {
        "tokens_per_s": tokens / seconds,
        "prompt_tokens_per_s": count * input_len / seconds,
        "seconds": seconds,
        "first_token_s": first,
        "host_ms_per_step": 1e3 * (after.host_seconds - host) / max(1, after.num_steps - steps),
    }


def decode_floor(
    spec: DecoderSpec, machine: Any, itemsize: int, count: int, input_len: int, output_len: int
) -> float:
    """Output tokens/s that bytes and FLOPs allow, prefill included."""
    weights = num_weights(spec)
    context = input_len + output_len / 2
    kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2 * context
    moved = (weights * itemsize + count * kv_bytes) / (machine.gbytes * 1e9)
    flops = count * (2 * weights + attention_flops(spec, context))
    step = max(moved, flops / (machine.gflops * 1e9))
    total = prefill_seconds(spec, machine, count, input_len) + (output_len - 1) * step
    return count * output_len / total


def prefill_seconds(spec: DecoderSpec, machine: Any, count: int, length: int) -> float:
    """Least seconds for `count` prompts: FLOPs bind; the head runs on last rows only."""
    body = num_weights(spec) - spec.vocab_size * spec.hidden_size
    flops = length * (2 * body + attention_flops(spec, length / 2))
    flops += 2 * spec.vocab_size * spec.hidden_size
    return float(count * flops / (machine.gflops * 1e9))


def attention_flops(spec: DecoderSpec, context: float) -> float:
    """FLOPs of one token's attention over `context` tokens, all layers."""
    return 4 * spec.num_layers * spec.num_heads * spec.head_dim * context


def num_weights(spec: DecoderSpec) -> int:
    """Weights a decoded token is multiplied with (the embedding counts once, as head)."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = spec.hidden_size * (heads + 3 * spec.ffn_size)
    return spec.num_layers * layer + spec.vocab_size * spec.hidden_size


def _print(
    machine: Any,
    ready: float,
    rows: list[dict[str, Any]],
    args: argparse.Namespace,
    prefill: float,
    prefill_floor: float,
) -> None:
    print(f"{machine.name}, {machine.cores} cores: float32 {machine.gflops_float32:.0f} GFLOP/s,")
    print(f"  bfloat16 {machine.gflops_bfloat16:.0f} GFLOP/s, memory {machine.gbytes:.1f} GB/s")
    print(
        f"{args.model}: ready in {ready:.1f} s; prompts {args.input_len}, outputs {args.output_len}"
    )
    print(f"{'requests':>9}{'tok/s':>9}{'floor':>9}{'share':>7}{'host ms/step':>14}{'first s':>9}")
    for row in rows:
        share = row["tokens_per_s"] / row["floor_tokens_per_s"]
        print(
            f"{row['requests']:>9}{row['tokens_per_s']:>9.1f}{row['floor_tokens_per_s']:>9.1f}"
            f"{share:>7.0%}{row['host_ms_per_step']:>14.2f}{row['first_token_s']:>9.2f}"
        )
    print(f"prefill 8 x {args.prefill_len}: {prefill:.0f} tok/s, floor {prefill_floor:.0f}")
