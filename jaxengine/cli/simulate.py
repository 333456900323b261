"""The simulate command: an engine, or thousands, in virtual time."""

from __future__ import annotations

import contextlib
import functools
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from jaxengine.cli.aot_check import read_config
from jaxengine.cli.simulate_options import Engine, Hardware, SimulateOptions, Workload
from jaxengine.lab.bench.datasets import BenchRequest, arrivals, load_trace, with_arrivals
from jaxengine.lab.bench.machine import describe
from jaxengine.lab.bench.results import result, save
from jaxengine.lab.simulate.cluster import Cluster, simulate
from jaxengine.lab.simulate.gpus import gpu_of
from jaxengine.lab.simulate.limits import Slo, find_limit, parse_slo
from jaxengine.lab.simulate.limits import lines as limit_lines
from jaxengine.lab.simulate.results import lines, summarize
from jaxengine.lab.simulate.roofline import Host, Roofline
from jaxengine.lab.simulate.table import Table, load_table
from jaxengine.lab.simulate.tiers import TierConfig
from jaxengine.lab.simulate.workload import faster, random_requests
from jaxengine.models.families import spec_from_config
from jaxengine.sched.config import GroupSpec, SchedulerSizes

if TYPE_CHECKING:
    from jaxengine.engine.core import EngineCore


def run_simulate(model: str | None, options: SimulateOptions, output_json: str | None) -> int:
    """Simulate and print. Raises ValueError naming the flag."""
    began = time.perf_counter()
    requests = make_requests(options.workload)
    cluster = make_cluster(model, options, requests)
    levels = options.search.slo
    if options.search.find_limit and not levels:
        levels = ["ttft:2000", "tpot:100"]
    slo = parse_slo(levels, options.search.slo_percentile)
    settings = {"model": model, **asdict(options)}
    if options.search.find_limit:
        figures = _search(cluster, requests, options, slo)
    else:
        outcome = simulate(
            cluster,
            requests,
            max_concurrency=options.workload.max_concurrency,
            seed=options.workload.seed,
        )
        figures = summarize(outcome)
        if levels:
            figures |= slo.goodput(outcome)
        print("\n".join(lines(figures)))
    cost = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"simulated in {cost:.1f} s, peak memory {peak:.0f} MiB")
    figures["simulator"] = {"seconds": cost, "peak_mib": peak}
    if output_json:
        save(output_json, result("simulate", settings, describe(), figures))
    return 0 if not figures.get("failed") else 1


def _search(
    cluster: Cluster, requests: list[BenchRequest], options: SimulateOptions, slo: Slo
) -> dict[str, Any]:
    def told(one: Any) -> None:
        print(f"tried {one.offered_per_s:.4g} requests/s: ", end="", file=sys.stderr)
        print("violates " + ", ".join(one.violated) if one.violated else "keeps", file=sys.stderr)

    found = find_limit(
        cluster,
        requests,
        slo,
        max_concurrency=options.workload.max_concurrency,
        seed=options.workload.seed,
        told=told,
    )
    print("\n".join(limit_lines(found, slo)))
    return {
        "tries": [asdict(one) for one in found.tries],
        "highest_rate": None if found.best is None else found.best.offered_per_s,
        "limit": None if found.limit is None else asdict(found.limit),
    }


def make_requests(w: Workload) -> list[BenchRequest]:
    """The workload. Raises ValueError naming the flag."""
    for name in ("num_prompts", "max_concurrency"):
        value = getattr(w, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if w.dataset_path is not None or w.dataset_name == "trace":
        if w.dataset_path is None:
            raise ValueError("--dataset-name trace needs --dataset-path")
        return faster(load_trace(w.dataset_path)[: w.num_prompts], w.speed)
    count = w.num_prompts or 1000
    if w.dataset_name == "prefix_repetition":
        requests = random_requests(
            count,
            w.prefix_repetition_suffix_len,
            w.prefix_repetition_output_len,
            w.random_range_ratio,
            prefix_len=w.prefix_repetition_prefix_len,
            prefixes=w.prefix_repetition_num_prefixes,
            seed=w.seed,
        )
    else:
        requests = random_requests(
            count, w.random_input_len, w.random_output_len, w.random_range_ratio, seed=w.seed
        )
    times = arrivals(count, w.request_rate, w.burstiness, w.seed)
    return faster(with_arrivals(requests, times), w.speed)


def make_cluster(
    model: str | None, options: SimulateOptions, requests: list[BenchRequest]
) -> Cluster:
    """What is simulated. Raises ValueError naming the flag."""
    hardware, engine = options.hardware, options.engine
    if not 1 <= engine.ranks <= 4096:
        raise ValueError(f"--ranks must be from 1 to 4096, got {engine.ranks}")
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size",
                 "num_kv_blocks"):  # fmt: skip
        value = getattr(engine, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if engine.cpu_offload_gib < 0:
        raise ValueError(f"--cpu-offload-gib must not be negative, got {engine.cpu_offload_gib}")
    if (hardware.table is None) == (hardware.device is None):
        raise ValueError("give --table FILE (see --calibrate) or --device NAME with MODEL")
    if hardware.table is not None:
        table = load_table(hardware.table)
        sched_sizes, pages = _measured(table, engine)
        cost: Table | Roofline = table
    else:
        assert hardware.device is not None
        cost, sched_sizes, pages = _roofline(model, hardware, engine, requests)
    tier = None
    if engine.cpu_offload_gib:
        tier = TierConfig(engine.cpu_offload_gib, pages, engine.policy)
    depth = 2 if engine.async_scheduling else 1
    return Cluster(sched_sizes, cost, engine.ranks, depth, engine.data_parallel_affinity, tier)


def _measured(table: Table, engine: Engine) -> tuple[SchedulerSizes, tuple[int, ...]]:
    """The measured engine's sizes, where no flag says otherwise."""
    changes = {
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": engine.max_model_len,
        "block_size": engine.block_size,
        "num_blocks": engine.num_kv_blocks,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        most = table.engine[name]
        if given.get(name, 0) > most:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {given[name]} is above the {most} of the measured engine")
    sched_sizes = table.sched_sizes(**given, enable_prefix_caching=engine.enable_prefix_caching)
    scale = sched_sizes.block_size / table.engine["block_size"]
    return sched_sizes, tuple(int(size * scale) for size in table.page_bytes)


def _roofline(
    model: str | None, hardware: Hardware, engine: Engine, requests: list[BenchRequest]
) -> tuple[Roofline, SchedulerSizes, tuple[int, ...]]:
    """A GPU, the sizes that an engine on it would have, and the bytes of a block by group."""
    if model is None:
        raise ValueError("--device needs MODEL: a folder with a config.json, or that file")
    assert hardware.device is not None
    cost = Roofline(
        spec_from_config(read_config(model)),
        gpu_of(hardware.device),
        hardware.tensor_parallel_size,
        hardware.enable_expert_parallel,
        hardware.dtype,
        efficiency=hardware.efficiency,
        memory_efficiency=hardware.memory_efficiency,
        host=Host(hardware.host_us * 1e-6, hardware.host_row_us * 1e-6),
    )
    block = engine.block_size or 64
    longest = max(r.prompt_len + r.output_len for r in requests) + 1
    max_len = engine.max_model_len or -(-longest // block) * block
    seqs = engine.max_num_seqs or 256
    most = -(-max_len // block) * seqs  # more can never be used
    spec = cost.spec
    sched_sizes = SchedulerSizes(
        max_num_seqs=seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens or 8192,
        max_model_len=max_len,
        block_size=block,
        num_blocks=engine.num_kv_blocks or min(cost.kv_blocks(block), most),
        groups=tuple(GroupSpec(window) for window in spec.groups),
        enable_prefix_caching=engine.enable_prefix_caching,
    )
    windows = spec.windows or (0,) * spec.num_layers
    layer = cost.token_bytes // spec.num_layers * block
    return cost, sched_sizes, tuple(layer * windows.count(window) for window in spec.groups)


def run_calibrate(
    model: str,
    output: str,
    rounds: int,
    engine: Engine,
    most_rows: int | None = None,
    most_tokens: int | None = None,
) -> int:
    """Measure the engine here and write the table. `engine`: its sizes, where flags give some."""
    from jaxengine.platform import setup

    setup()  # before JAX is imported
    from jaxengine.lab.simulate.calibrate import Calibration, copy_seconds_per_byte

    with _open_core(model, engine) as core:
        calibration = Calibration(core, most_rows=most_rows, most_tokens=most_tokens)
        calibration.warm()
        for i in range(rounds):
            calibration.round(functools.partial(_tell, f"round {i + 1} of {rounds}: "))
        table = calibration.table(copy_seconds_per_byte(core))
    table.save(output)
    print(
        f"{table.model}: {table.num_samples} steps measured, half of them within "
        f"{table.residual:.1%} of the table; {output} written"
    )
    return 0


def run_check(model: str, rounds: int, engine: Engine, clock: Literal["wall", "cpu"]) -> int:
    """Compare with the real engine. Exit code 1 beyond the limit."""
    from jaxengine.platform import setup

    setup()
    from jaxengine.lab.simulate.check import LIMIT, check
    from jaxengine.lab.simulate.check import lines as check_lines
    from jaxengine.lab.simulate.clock import CpuClock, WallClock

    with _open_core(model, engine) as core:
        time_of = CpuClock() if clock == "cpu" else WallClock()
        comparisons = check(core, rounds, functools.partial(_tell, ""), time_of)
    print("\n".join(check_lines(comparisons)))
    return 0 if max(abs(c.error) for c in comparisons) <= LIMIT else 1


def _tell(where: str, what: str) -> None:
    print(where + what, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _open_core(model: str, engine: Engine) -> Iterator[EngineCore]:
    """The real engine with everything compiled, of the sizes that were given."""
    from jaxengine.config import EngineConfig
    from jaxengine.engine.core import EngineCore

    core = EngineCore(
        EngineConfig.of(
            model=model,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            block_size=engine.block_size,
            num_gpu_blocks_override=engine.num_kv_blocks,
            async_scheduling=engine.async_scheduling,
        )
    )
    try:
        core.executor.wait_warm()
        yield core
    finally:
        core.shutdown()
