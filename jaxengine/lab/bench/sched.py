"""`jaxengine bench sched`: what the scheduler costs, schedule and update together, per request and
step, without a device.

CPU time of this thread, so that a busy machine does not blur the figures.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxengine.lab.bench import machine, results
from jaxengine.lab.bench.flags import add_output, new_parser, positive
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler

VOCAB = 30_000


def _fake_result(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    token_ids = rng.integers(0, VOCAB, (plan.num_rows, 1), dtype=np.int32)
    return StepResult(token_ids=token_ids, num_sampled=plan.samples.astype(np.int32))


def _bench_one(
    num_running: int, prompt_len: int, output_len: int, depth: int, prefix_caching: bool
) -> dict[str, float]:
    """Keep `num_running` requests alive: each that ends is replaced, over three lifetimes."""
    rng = np.random.default_rng(0)
    block_size = 16
    max_len = prompt_len + output_len + 1
    blocks = (num_running + 8) * -(-max_len // block_size)
    config = SchedulerSizes(
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, 2 * num_running),
        max_model_len=max_len,
        block_size=block_size,
        num_blocks=blocks,
        enable_prefix_caching=prefix_caching,
    )
    scheduler = Scheduler(config)
    made = 0

    def add(count: int, longest: int) -> None:
        nonlocal made
        for _ in range(count):
            prompt = rng.integers(0, VOCAB, prompt_len, dtype=np.int32)
            # The first ones end at different times, so that later steps all look alike.
            length = output_len if longest else 1 + made * output_len // num_running
            scheduler.add(Request(f"r{made}", prompt, max_tokens=length, eos_token_ids=(VOCAB,)))
            made += 1

    add(num_running, 0)
    flight: deque[tuple[StepPlan, StepResult]] = deque()
    spent, row_steps, tokens = 0.0, 0, 0
    steps = 4 * output_len
    gc.collect()
    gc.disable()
    for step in range(steps):
        begin = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        assert plan is not None
        flight.append((plan, _fake_result(plan, rng)))
        if len(flight) < depth:
            continue
        oldest, result = flight.popleft()
        resumed = time.thread_time()
        batch = scheduler.update(oldest, result)
        done = time.thread_time()
        if step >= output_len:  # steady: the pool is warm, ends are spread over the steps
            spent += planned - begin + done - resumed
            row_steps += plan.num_rows
            tokens += int(batch.num_new.sum())
        add(len(batch.finished), 1)
    gc.enable()
    return {
        "num_running": num_running,
        "depth": depth,
        "prefix_caching": prefix_caching,
        "us_per_request_step": spent / row_steps * 1e6,
        "us_per_step": spent / (steps - output_len) * 1e6,
        "tokens": tokens,
        "preemptions": scheduler.num_preemptions,
    }


def bench_sched(
    num_running: Sequence[int] = (64, 256, 1024),
    prompt_len: int = 512,
    output_len: int = 128,
    depth: int = 2,
    prefix_caching: bool = True,
) -> list[dict[str, float]]:
    """One row per entry of `num_running`; `us_per_request_step` is the figure to watch."""
    return [_bench_one(n, prompt_len, output_len, depth, prefix_caching) for n in num_running]


def main(argv: list[str]) -> int:
    """`jaxengine bench sched`: a row for each number of running requests."""
    args = parser().parse_args(argv)
    print(
        f"prompts {args.input_len}, outputs {args.output_len}, depth {args.depth}, "
        f"prefix caching {'off' if args.no_prefix_caching else 'on'}"
    )
    print(f"{'running':>8}{'us/request-step':>17}{'us/step':>10}{'steps/s':>10}")
    rows = []
    for count in args.num_running:
        row = _bench_one(
            count, args.input_len, args.output_len, args.depth, not args.no_prefix_caching
        )
        rows.append(row)
        print(
            f"{count:>8}{row['us_per_request_step']:>17.2f}{row['us_per_step']:>10.0f}"
            f"{1e6 / row['us_per_step']:>10.0f}",
            flush=True,
        )
    idle = _device_idle(args.model, args.num_requests) if args.model else []
    if args.output_json:
        figures = {"rows": rows, "idle": {row["scheduling"]: row for row in idle}}
        content = results.result("sched", args, machine.describe(), figures, ["num_running"])
        results.save(args.output_json, content)
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("sched", __doc__)
    add = made.add_argument
    add("--num-running", type=positive, nargs="+", default=[64, 256, 1024], help="requests alive")
    add("--input-len", type=positive, default=512, help="tokens of a prompt")
    add("--output-len", type=positive, default=128, help="tokens of an output")
    add("--depth", type=int, default=2, choices=(1, 2), help="steps in flight")
    add("--no-prefix-caching", action="store_true", help="without the prefix cache")
    add("--model", default=None, help="measure the device's idle share with it too")
    add("--num-requests", type=positive, default=32, help="of the idle share")
    add_output(made)
    return made


def _device_idle(model: str, num_requests: int) -> list[dict[str, Any]]:
    from jaxengine import platform

    platform.setup()
    from jaxengine.lab.bench.idle import device_idle

    print(f"{model}, {num_requests} requests decoding")
    print(f"{'':>8}{'step ms':>10}{'device ms':>11}{'host ms':>9}{'device idle':>13}")
    rows = device_idle(model, num_requests)
    for row in rows:
        print(
            f"{row['scheduling']:>8}{row['step_ms']:>10.1f}{row['device_ms']:>11.1f}"
            f"{row['host_ms']:>9.2f}{row['idle_share']:>13.1%}"
        )
    return rows
