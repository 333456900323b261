"""The flags that say which requests there are and when they arrive, and the requests."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from jaxengine.lab.bench.datasets import BenchRequest, arrivals_at, load_trace, ramp, with_arrivals
from jaxengine.lab.bench.flags import above_zero, not_negative, positive
from jaxengine.lab.bench.prompts import (
    custom_requests,
    prefix_repetition,
    random_requests,
    sharegpt_requests,
)

DATASETS = ("random", "prefix_repetition", "sharegpt", "custom", "trace")


def add_dataset(parser: argparse.ArgumentParser, *, short: bool = False) -> None:
    """--dataset-name and what belongs to it, --seed. With `short`, --random-input-len is also
    --input-len, and the output's alike."""
    add = parser.add_argument_group("data set").add_argument
    add("--dataset-name", choices=DATASETS, default="random", help="where prompts are from")
    add("--dataset-path", default=None, help="file of sharegpt, custom (JSON lines) or trace")
    add("--seed", type=not_negative, default=0, help="of prompts and arrivals")
    for what, tokens in (("input", 128), ("output", 64)):
        names = [f"--random-{what}-len", *([f"--{what}-len"] if short else [])]
        add(*names, type=positive, default=tokens, help="tokens")
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share")
    add("--random-prefix-len", type=not_negative, default=0, help="tokens that all share, before")
    add("--prefix-repetition-prefix-len", type=positive, default=256, help="tokens")
    add("--prefix-repetition-suffix-len", type=positive, default=256, help="tokens")
    add("--prefix-repetition-num-prefixes", type=positive, default=10, help="different ones")
    add("--prefix-repetition-output-len", type=positive, default=128, help="tokens")
    add("--sharegpt-output-len", type=positive, default=None, help="default: of the answer")
    add("--custom-output-len", type=positive, default=256, help="where a line has none")


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The data set, --num-prompts, --request-rate and the other arrivals."""
    add_dataset(parser)
    add = parser.add_argument_group("arrivals").add_argument
    add("--num-prompts", type=positive, default=None, help="default: 100, of a trace all")
    add = parser.add_argument_group("arrivals").add_argument
    add("--request-rate", type=above_zero, default=math.inf, help="a second; inf = all at once")
    add("--burstiness", type=above_zero, default=1.0, help="1 = Poisson, below burstier (gamma)")
    add("--ramp-up-strategy", choices=["linear", "exponential"], default=None,
        help="let the rate change over the requests instead")  # fmt: skip
    add("--ramp-up-start-rps", type=above_zero, default=1.0, help="rate at the first request")
    add("--ramp-up-end-rps", type=above_zero, default=10.0, help="rate at the last request")
    add("--trace-speed", type=above_zero, default=1.0, help="a trace so many times faster")


def make_requests(
    args: argparse.Namespace, count: Callable[[str], int] | None
) -> list[BenchRequest]:
    """The requests with their arrivals. `count` gives the tokens of a text; sharegpt and custom
    need it. Raises ValueError naming the flag or file."""
    if args.dataset_name == "trace":
        requests = dataset_requests(args, args.num_prompts, count, args.seed)
        if args.ramp_up_strategy is not None or not math.isinf(args.request_rate):
            free = [dataclasses.replace(r, session=None) for r in requests]
            return with_arrivals(free, _times(args, len(free)))
        return with_arrivals(requests, [r.arrival / args.trace_speed for r in requests])
    num = args.num_prompts or 100
    return with_arrivals(dataset_requests(args, num, count, args.seed), _times(args, num))


def dataset_requests(
    args: argparse.Namespace, num: int | None, count: Callable[[str], int] | None, seed: int
) -> list[BenchRequest]:
    """`num` requests of the data set (of a trace at most so many, None is all), those of a trace
    at its times and all others at 0. Raises ValueError naming the flag or file."""
    name = args.dataset_name
    if name in ("sharegpt", "custom", "trace") and args.dataset_path is None:
        raise ValueError(f"--dataset-name {name} needs --dataset-path")
    if name == "trace":
        return load_trace(args.dataset_path)[:num]
    assert num is not None
    if name == "random":
        return random_requests(
            num,
            args.random_input_len,
            args.random_output_len,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
            seed=seed,
        )
    if name == "prefix_repetition":
        return prefix_repetition(
            num,
            args.prefix_repetition_prefix_len,
            args.prefix_repetition_suffix_len,
            args.prefix_repetition_num_prefixes,
            args.prefix_repetition_output_len,
            seed=seed,
        )
    if count is None:
        raise ValueError(f"--dataset-name {name} needs --tokenizer, which counts its tokens")
    read = sharegpt_requests if name == "sharegpt" else custom_requests
    output = args.sharegpt_output_len if name == "sharegpt" else args.custom_output_len
    return read(args.dataset_path, num, count, output_len=output, seed=seed)


def _times(args: argparse.Namespace, num: int) -> list[float]:
    rates = [args.request_rate] * num
    if args.ramp_up_strategy is not None:
        if not math.isinf(args.request_rate):
            raise ValueError("--ramp-up-strategy and --request-rate exclude each other")
        rates = ramp(num, args.ramp_up_start_rps, args.ramp_up_end_rps, args.ramp_up_strategy)
    return arrivals_at(rates, args.burstiness, args.seed)


def token_counter(name: str | None) -> Callable[[str], int] | None:
    """Tokens of a text by a model's tokenizer; None without a name. Raises ValueError."""
    if name is None:
        return None
    from jaxengine.text.tokenizer import load_tokenizer
    from jaxengine.weights.resolve import ModelFiles, resolve_model

    if name == "demo":
        tokenizer = load_tokenizer(resolve_model(name))
    else:
        tokenizer = load_tokenizer(ModelFiles("hf", (Path(name),), name), name)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))
