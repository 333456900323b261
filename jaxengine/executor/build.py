"""From settings to a running executor: files, shapes, programs, weights, memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine import platform
from jaxengine.config import EngineConfig, ParallelConfig
from jaxengine.executor.inline import InlineExecutor
from jaxengine.executor.shards import equal_pools
from jaxengine.models.cache import cache_bytes_per_token, device_bytes_per_token
from jaxengine.models.layers.quantize import quantize_params, quantized_shapes
from jaxengine.models.params import param_shapes, param_specs
from jaxengine.models.spec import DecoderSpec, Params, for_context
from jaxengine.offload.layout import KVLayout
from jaxengine.parallel import expert_load
from jaxengine.parallel.layout import Stage, StepLayout
from jaxengine.parallel.mesh import Devices, make_stages
from jaxengine.progress import progress_bar
from jaxengine.runner.attention import choose_attention
from jaxengine.runner.cache_counts import CacheCounts
from jaxengine.runner.divide import cache_spec, divide, expert_tables, place_experts
from jaxengine.runner.draft.open_drafter import Target, find_drafter
from jaxengine.runner.forward import StepConfig
from jaxengine.runner.kv_room import CPU_KV_BYTES, kv_room, weight_bytes
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.programs import Programs, Specs
from jaxengine.runner.state import DeviceState, state_shapes
from jaxengine.runner.warmup import first_keys, warmup_keys
from jaxengine.sched.batch import BatchShape
from jaxengine.sched.buckets import Overlap, all_buckets, in_halves, row_buckets
from jaxengine.sched.config import GroupSpec, SchedulerSizes
from jaxengine.sched.shapes import ON_DEMAND
from jaxengine.sched.slot_record import SlotShape
from jaxengine.settings.coupling import member_of
from jaxengine.weights.fingerprint import fingerprint
from jaxengine.weights.load import checkpoint_dtype, load_params, load_spec
from jaxengine.weights.resolve import resolve_model

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """What the engine core runs on."""

    executor: InlineExecutor
    sched_sizes: SchedulerSizes
    batch_shape: BatchShape
    slot_shape: SlotShape
    spec: DecoderSpec
    info: dict[str, str]
    kv_layout: KVLayout
    kv_facts: dict[str, str]  # what the KV of equal tokens depends on beside the layout
    num_shards: int  # of attention data parallelism
    runner: ModelRunner  # of the executor
    overlap: Overlap | None  # when steps run as two microbatches


def build(config: EngineConfig) -> Built:
    """Load the model and compile its programs, both at once.

    Raises ValueError with one sentence for a setting that cannot work, and the loader's errors.
    """
    started = time.monotonic()
    _offer_cpu_devices(config.parallel)
    if config.parallel.nnodes != 1:
        from jaxengine.executor.nodes import join_nodes

        join_nodes(config.parallel)
    _use_compilation_cache(config.runner.compilation_cache_dir)
    counts = CacheCounts()
    files = resolve_model(config.model.model, config.model.revision, config.model.download_dir)
    spec = load_spec(files)
    dtype = _dtype(config.model.dtype, checkpoint_dtype(files))
    weight_dtype = jnp.dtype(dtype)
    kv_dtype = _kv_dtype(config.cache.kv_cache_dtype, weight_dtype, spec)
    on_cpu = jax.default_backend() == "cpu"
    layout, block_size = choose_attention(
        config.runner.attention_backend,
        spec,
        weight_dtype,
        config.cache.block_size,
        on_cpu,
        kv_dtype,
    )
    layout = divide(config.parallel, layout, spec)
    member = member_of(config)
    stages = make_stages(layout, config.parallel.pipeline_parallel_size, member is not None)
    devices = stages[-1]
    prospect = find_drafter(config, Target(files, spec, dtype, layout, block_size))
    drafter_bytes = 0 if prospect is None else prospect.token_bytes
    weights = weight_bytes(
        spec, weight_dtype, layout, devices, config.parallel, config.model.quantization
    )
    if prospect is not None:
        weights += prospect.weight_bytes
    sched_sizes = plan_sizes(config, spec, kv_dtype, block_size, layout, drafter_bytes, weights)
    if member is not None:
        sched_sizes = equal_pools(sched_sizes)
    stored = for_context(spec, sched_sizes.max_model_len)  # as in the checkpoint
    spec, placement = place_experts(config.parallel, stored)
    if layout.record_experts and spec.moe is not None:
        assert config.parallel.record_expert_load is not None
        expert_load.start(config.parallel.record_expert_load, spec.num_layers, spec.moe.num_experts)
    batch_shape = BatchShape(
        num_groups=len(sched_sizes.groups),
        table_width=-(-sched_sizes.max_model_len // sched_sizes.block_size),
        block_size=sched_sizes.block_size,
        num_blocks=sched_sizes.num_blocks,
    )
    slot_shape = SlotShape(sched_sizes.max_num_seqs, sched_sizes.max_model_len, spec.vocab_size)
    asked = config.model.max_logprobs
    num_logprobs = spec.vocab_size if asked < 0 else min(asked, spec.vocab_size)
    sizes = row_buckets(sched_sizes.max_num_seqs)
    taps = () if prospect is None else prospect.taps
    step = StepConfig(spec, batch_shape, num_logprobs, sizes, layout, taps)
    state = state_shapes(spec, batch_shape, slot_shape, kv_dtype, layout)
    buckets = all_buckets(sched_sizes.max_num_seqs, sched_sizes.max_num_batched_tokens)
    shapes = param_shapes(spec, weight_dtype, layout.tensor_size)
    leaf_specs = param_specs(spec, layout)
    if len(stages) > 1 and spec.tie_embeddings:  # the last stage needs a copy of its own
        shapes["head"], leaf_specs["head"] = shapes["embed"], leaf_specs["embed"]
    if config.model.quantization == "int8":
        if devices.mesh is not None:
            raise ValueError(
                "quantization int8 is for one device; leave it or the parallel sizes out"
            )
        shapes = quantized_shapes(shapes)
    specs = Specs(leaf_specs, cache_spec(spec, layout))
    stage_of = [
        stages[i] for i in range(len(stages)) for _ in Stage(i, len(stages)).layers(spec.num_layers)
    ]
    kv = tuple(of.place(cache, specs.kv) for of, cache in zip(stage_of, state.kv, strict=True))
    state = DeviceState(kv, devices.place(state.slots, devices.data))
    overlap = None
    if layout.dbo:
        parallel = config.parallel
        overlap = Overlap(parallel.dbo_decode_token_threshold, parallel.dbo_prefill_token_threshold)
    drafter = None if prospect is None else prospect.open(step, shapes)
    programs = Programs(
        step, shapes, state, slot_shape, stages=stages, specs=specs, drafter=drafter
    )
    warmup = _warmup(config.runner.warmup)
    if warmup != "lazy":
        first = first_keys(
            buckets,
            sizes,
            greedy=warmup == "greedy",
            token_by_token=sched_sizes.max_num_batched_tokens == 1,
        )
        programs.start(first, urgent=True)

    def place(path: tuple[str | int, ...], array: np.ndarray[Any, Any]) -> jax.Array:
        """A leaf to its devices, each getting only its part."""
        spec_of_leaf: Any = specs.params
        for key in path:
            spec_of_leaf = spec_of_leaf[key]
        if placement is not None and str(path[-1]).startswith("experts_"):
            array = array[placement.expert_of_slot[int(path[1])]]
        if path[0] == "layers":
            return stage_of[int(path[1])].put(array, spec_of_leaf)
        return (stages[0] if path[0] == "embed" else devices).put(array, spec_of_leaf)

    def load() -> Params:
        params = load_params(
            files,
            stored,
            dtype,
            jnp.asarray,
            place=place if devices.mesh is not None else None,
            tensor_size=layout.tensor_size,
            expert_parallel=layout.expert_parallel,
        )
        for i, tables in enumerate(expert_tables(stored, placement)):
            for name, table in tables.items():
                params["layers"][i][name] = place(("layers", i, name), table)
        if "head" in leaf_specs and "head" not in params:
            params["head"] = devices.put(params["embed"], leaf_specs["head"])
        return quantize_params(params) if config.model.quantization == "int8" else params

    try:
        params = load()
        loaded = time.monotonic()
        runner = ModelRunner(params, state, programs, buckets, load, devices, drafter)
        executor = InlineExecutor(runner, sizes, overlap)
        if warmup not in ON_DEMAND:
            # Not earlier: tracing is Python, and would hold up the loader's threads.
            programs.start(
                warmup_keys(buckets, sizes, in_halves(buckets, overlap)), urgent=warmup == "full"
            )
        if warmup == "full":
            _wait_with_progress(programs)
        elif warmup == "background":
            log.info(
                "compiling beside the first requests, so that no later one waits for a compile; "
                "the next start reads the programs from the cache"
            )
            programs.wait_in_background()
    except BaseException:
        programs.shutdown()
        raise
    if config.parallel.nnodes > 1:
        from jaxengine.executor.nodes import over_processes

        executor = InlineExecutor(over_processes(runner, config, devices), sizes, overlap)
    loaded_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    kv_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kv))
    info = {
        "model": files.name,
        "dtype": dtype,
        "KV dtype": kv_dtype.name,
        "device": _device_name(stages),
        "weights MiB": f"{loaded_bytes / 2**20:.0f}",
        "KV MiB": f"{kv_bytes / 2**20:.0f}",
        "KV blocks": f"{sched_sizes.num_blocks} of {sched_sizes.block_size} tokens",
        "KV tokens": str(sched_sizes.num_blocks * sched_sizes.block_size),
        "programs": f"{len(buckets)} buckets, warm-up {warmup}; {counts}",
        "seconds": f"{loaded - started:.1f} load, {time.monotonic() - loaded:.1f} after",
    }
    if drafter is not None:
        info["drafter"] = drafter.method
    return Built(
        executor,
        sched_sizes,
        batch_shape,
        slot_shape,
        spec,
        info,
        _kv_layout(spec, layout, sched_sizes, kv_dtype),
        {
            "model": fingerprint(files),
            "dtype": dtype,
            "quantization": str(config.model.quantization),
        },
        layout.data_size,
        runner,
        overlap,
    )


def _device_name(stages: Sequence[Devices]) -> str:
    """Of people's interest: "cpu", "8 x NVIDIA H200"."""
    count = sum(1 if stage.mesh is None else stage.mesh.size for stage in stages)
    kind = jax.devices()[0].device_kind
    return kind if count == 1 else f"{count} x {kind}"


def _kv_layout(
    spec: DecoderSpec, layout: StepLayout, sched_sizes: SchedulerSizes, kv_dtype: Any
) -> KVLayout:
    """What a block is made of, for offload."""
    windows = spec.windows or (0,) * spec.num_layers
    groups = tuple(spec.groups.index(window) for window in windows)
    name = jnp.dtype(kv_dtype).name
    if spec.mla is not None:
        return KVLayout(groups, sched_sizes.block_size, 1, spec.mla.width, name, "latent")
    return KVLayout(
        groups, sched_sizes.block_size, spec.num_kv_heads, spec.head_dim, name, layout.cache
    )


def _offer_cpu_devices(parallel: ParallelConfig) -> None:
    """On CPU a mesh is made of host devices, which must be asked for before JAX's first use."""
    wanted = parallel.tensor_parallel_size * parallel.attention_data_parallel_size
    wanted = wanted * parallel.pipeline_parallel_size // parallel.nnodes
    if wanted > 1 and os.environ.get("JAX_PLATFORMS", "") == "cpu":
        try:
            known = int(getattr(jax.config, "jax_num_cpu_devices", -1))
            jax.config.update("jax_num_cpu_devices", max(wanted, known))
        except RuntimeError:
            log.debug("JAX was used before; its host devices stay as they are")


def _use_compilation_cache(setting: str | None) -> None:
    folder = platform.cache_dir(setting)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _warmup(setting: str) -> str:
    if setting != "auto":
        return setting
    return "background" if jax.default_backend() == "cpu" else "full"


def _dtype(setting: str, stored: str) -> str:
    if setting != "auto":
        return setting
    # float16 products are emulated on CPU, and bfloat16 has the range of float32.
    return "float32" if stored == "float32" else "bfloat16"


def _kv_dtype(setting: str, dtype: Any, spec: DecoderSpec) -> Any:
    """The type of the KV cache. Raises ValueError for models whose cache is not made of heads."""
    if setting == "auto":
        return dtype
    if spec.mla is not None:
        raise ValueError(
            f"kv_cache_dtype {setting} is not for latent attention; leave it at auto for this model"
        )
    return jnp.dtype(jnp.float8_e4m3fn)


def plan_sizes(
    config: EngineConfig,
    spec: DecoderSpec,
    kv_dtype: Any,
    block_size: int,
    layout: StepLayout,
    drafter_bytes: int = 0,
    weights: int = 0,
) -> SchedulerSizes:
    """Resolve every size the scheduler needs. Raises ValueError naming the setting.

    `drafter_bytes`: a token's KV in the drafter, beside the model's; `weights`: bytes that a device
    will hold.
    """
    on_cpu = jax.default_backend() == "cpu"
    sched, cache, stages = config.scheduler, config.cache, config.parallel.pipeline_parallel_size
    max_num_seqs = sched.max_num_seqs or (64 if on_cpu else 256)
    budget = sched.max_num_batched_tokens or (1024 if on_cpu else 8192)
    if max_num_seqs < 1 or budget < 1:
        raise ValueError("max_num_seqs and max_num_batched_tokens must be at least 1")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if budget < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens {budget} must be at least max_num_seqs {max_num_seqs}"
        )
    wanted = config.model.max_model_len
    if wanted is not None and wanted < 1:
        raise ValueError(f"max_model_len must be at least 1, got {wanted}")
    if wanted is not None and wanted > spec.max_position:
        raise ValueError(
            f"max_model_len {wanted} is more than the {spec.max_position} positions of the model"
        )
    max_model_len = wanted or spec.max_position
    itemsize = jnp.dtype(kv_dtype).itemsize
    # The pool's memory is one device's, but on CPU, where devices share the machine's.
    token_bytes = (
        cache_bytes_per_token(spec, itemsize, layout)
        if on_cpu
        else device_bytes_per_token(spec, itemsize, layout, stages)
    ) + drafter_bytes
    block_bytes = token_bytes * block_size
    num_blocks = cache.num_gpu_blocks_override
    if num_blocks is None:
        room = cache.kv_cache_memory_bytes or CPU_KV_BYTES
        if not on_cpu and cache.kv_cache_memory_bytes is None:
            stats = jax.local_devices()[0].memory_stats() or {}
            room = kv_room(stats, cache.gpu_memory_utilization, weights)
        most = -(-max_model_len // block_size) * max_num_seqs
        num_blocks = min(room // block_bytes, most)
    if num_blocks < 1:
        raise ValueError("kv_cache_memory_bytes does not hold a single block")
    fits = num_blocks * block_size
    if max_model_len > fits:
        if wanted is not None:
            need = max_model_len * token_bytes / 2**30
            raise ValueError(
                f"max_model_len {wanted} needs {need:.2f} GiB of KV, but the pool of {num_blocks} "
                f"blocks holds {fits} tokens; lower max_model_len or raise kv_cache_memory_bytes"
            )
        log.info("max_model_len is %d, all that the KV pool holds", fits)
        max_model_len = fits
    return SchedulerSizes(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        groups=tuple(GroupSpec(window) for window in spec.groups),
        enable_prefix_caching=cache.enable_prefix_caching,
        prefix_caching_hash_algo=cache.prefix_caching_hash_algo,
        enable_chunked_prefill=sched.enable_chunked_prefill,
        long_prefill_token_threshold=sched.long_prefill_token_threshold,
        policy=sched.scheduling_policy,
        async_scheduling=sched.async_scheduling,
        num_cohorts=stages if sched.async_scheduling else 1,
        watermark=sched.watermark,
        residency_share=_residency_share(config),
    )


def _residency_share(config: EngineConfig) -> float:
    share = config.server.kv_cache_metrics_sample
    if not 0 < share <= 1:
        raise ValueError(f"kv_cache_metrics_sample must be above 0 and at most 1, got {share}")
    return share if config.server.kv_cache_metrics else 0.0


def _wait_with_progress(programs: Programs) -> None:
    why = "so that no request waits for a compile"
    with progress_bar("Compiling programs", None, "program", why=why) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        programs.wait(show)
