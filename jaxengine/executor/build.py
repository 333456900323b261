"""Builds an executor from settings: files, sizes, programs, weights, and the facts about them.

Programs compile while weights load.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxengine import platform
from jaxengine.config import EngineConfig, ParallelConfig
from jaxengine.executor.facts import Facts
from jaxengine.executor.loading import Loader, stage_of_layers
from jaxengine.executor.sizes import plan_sizes
from jaxengine.models.layers.quantize import quantized_shapes
from jaxengine.models.params import param_shapes, param_specs
from jaxengine.models.spec import DecoderSpec, for_context
from jaxengine.offload.layout import KVLayout
from jaxengine.parallel import expert_load
from jaxengine.parallel.eplb import Placement
from jaxengine.parallel.layout import StepLayout
from jaxengine.parallel.mesh import Devices, make_stages
from jaxengine.progress import progress_bar
from jaxengine.runner.attention import choose_attention
from jaxengine.runner.cache_counts import CacheCounts
from jaxengine.runner.divide import cache_spec, divide, place_experts
from jaxengine.runner.draft.open_drafter import Prospect, Target, find_drafter
from jaxengine.runner.forward import StepConfig
from jaxengine.runner.kv_room import weight_bytes
from jaxengine.runner.lowering import Shapes, Specs
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.own_shards import AllShards, OwnShards, equal_pools
from jaxengine.runner.programs import Programs
from jaxengine.runner.state import DeviceState, state_shapes
from jaxengine.runner.warmup import first_keys, warmup_keys
from jaxengine.sched.batch import BatchShape
from jaxengine.sched.buckets import Overlap, all_buckets, row_buckets
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.shapes import ON_DEMAND, StepShapes
from jaxengine.sched.slot_record import SlotShape
from jaxengine.settings.coupling import member_of
from jaxengine.weights.fingerprint import fingerprint
from jaxengine.weights.load import checkpoint_dtype, load_spec
from jaxengine.weights.resolve import ModelFiles, resolve_model

if TYPE_CHECKING:
    from jaxengine.executor.nodes import LeadingExecutor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Model:
    """A checkpoint, and the types that it runs in here."""

    files: ModelFiles
    spec: DecoderSpec
    dtype: str
    kv_dtype: Any

    @property
    def weight_dtype(self) -> Any:
        return jnp.dtype(self.dtype)


@dataclass(frozen=True)
class Plan:
    """The model's layout on the devices, and the sizes of its steps."""

    layout: StepLayout
    stages: tuple[Devices, ...]  # of the pipeline
    sched_sizes: SchedulerSizes
    stored: DecoderSpec  # as in the checkpoint, for this context length
    spec: DecoderSpec  # as it runs: with slots for copies of busy experts
    placement: Placement | None  # of the experts
    prospect: Prospect | None  # the drafter that will be opened
    step_shapes: StepShapes


def build(config: EngineConfig) -> tuple[ModelRunner | LeadingExecutor, Facts]:
    """Load the model and compile its programs, both at once.

    Raises ValueError with one sentence for a setting that cannot work, and the loader's errors.
    """
    started = time.monotonic()
    _prepare_devices(config)
    counts = CacheCounts()
    model = resolve(config)
    plan = plan_devices(config, model)
    shapes = program_shapes(config, model, plan)
    runner, loaded = _load(config, model, plan, shapes)
    seconds = f"{loaded - started:.1f} load, {time.monotonic() - loaded:.1f} after"
    facts = _facts(config, model, plan, runner, {"programs": f"{counts}", "seconds": seconds})
    if not _leads(config):
        return runner, facts
    from jaxengine.executor.nodes import LeadingExecutor

    return LeadingExecutor(runner, config), facts


def _prepare_devices(config: EngineConfig) -> None:
    """Everything that comes before JAX's first use of a device."""
    _offer_cpu_devices(config.parallel)
    if config.parallel.nnodes != 1:
        from jaxengine.executor.nodes import join_nodes

        join_nodes(config.parallel)
    folder = platform.cache_dir(config.runner.compilation_cache_dir)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _offer_cpu_devices(parallel: ParallelConfig) -> None:
    """Ask for the host devices that a mesh on CPU is made of. Must come before JAX's first use."""
    wanted = parallel.tensor_parallel_size * parallel.attention_data_parallel_size
    wanted = wanted * parallel.pipeline_parallel_size // parallel.nnodes
    if wanted > 1 and os.environ.get("JAX_PLATFORMS", "") == "cpu":
        try:
            known = int(getattr(jax.config, "jax_num_cpu_devices", -1))
            jax.config.update("jax_num_cpu_devices", max(wanted, known))
        except RuntimeError:
            log.debug("JAX was used before; its host devices stay as they are")


def _leads(config: EngineConfig) -> bool:
    """Other processes follow what this one plans."""
    parallel = config.parallel
    return parallel.nnodes > 1 and parallel.node_rank == 0 and member_of(config) is None


# -- files -----------------------------------------------------------------------------------


def resolve(config: EngineConfig) -> Model:
    """Find the model's files and settle its number types. Raises the loader's errors, and
    ValueError for a cache type that the model cannot have."""
    files = resolve_model(config.model.model, config.model.revision, config.model.download_dir)
    spec = load_spec(files)
    dtype = config.model.dtype
    if dtype == "auto":
        # float16 products are emulated on CPU, and bfloat16 has the range of float32.
        dtype = "float32" if checkpoint_dtype(files) == "float32" else "bfloat16"
    return Model(files, spec, dtype, _kv_dtype(config.cache.kv_cache_dtype, dtype, spec))


def _kv_dtype(setting: str, dtype: str, spec: DecoderSpec) -> Any:
    if setting == "auto":
        return jnp.dtype(dtype)
    if spec.mla is not None:
        raise ValueError(
            f"kv_cache_dtype {setting} is not for latent attention; leave it at auto for this model"
        )
    return jnp.dtype(jnp.float8_e4m3fn)


# -- layout and sizes ------------------------------------------------------------------------


def plan_devices(config: EngineConfig, model: Model) -> Plan:
    """Divide the model over the devices. Raises ValueError that names the setting."""
    parallel, member = config.parallel, member_of(config)
    layout, block_size = choose_attention(
        config.runner.attention_backend,
        model.spec,
        model.weight_dtype,
        config.cache.block_size,
        jax.default_backend() == "cpu",
        model.kv_dtype,
    )
    layout = divide(parallel, layout, model.spec)
    stages = tuple(make_stages(layout, parallel.pipeline_parallel_size, member is not None))
    if config.model.quantization == "int8" and stages[-1].mesh is not None:
        raise ValueError("quantization int8 is for one device; leave it or the parallel sizes out")
    target = Target(model.files, model.spec, model.dtype, layout, block_size)
    prospect = find_drafter(config, target)
    sizes = _sizes(config, model, layout, stages, block_size, prospect)
    stored = for_context(model.spec, sizes.max_model_len)
    spec, placement = place_experts(parallel, stored)
    overlap = None
    if layout.dbo:
        overlap = Overlap(parallel.dbo_decode_token_threshold, parallel.dbo_prefill_token_threshold)
    step_shapes = StepShapes(
        all_buckets(sizes.max_num_seqs, sizes.max_num_batched_tokens),
        row_buckets(sizes.max_num_seqs),
        overlap,
    )
    return Plan(layout, stages, sizes, stored, spec, placement, prospect, step_shapes)


def _sizes(
    config: EngineConfig,
    model: Model,
    layout: StepLayout,
    stages: Sequence[Devices],
    block_size: int,
    prospect: Prospect | None,
) -> SchedulerSizes:
    weights = weight_bytes(
        model.spec,
        model.weight_dtype,
        layout,
        stages[-1],
        config.parallel,
        config.model.quantization,
    )
    drafter_bytes = 0
    if prospect is not None:
        weights += prospect.weight_bytes
        drafter_bytes = prospect.token_bytes
    sizes = plan_sizes(
        config, model.spec, model.kv_dtype, block_size, layout, drafter_bytes, weights
    )
    return sizes if member_of(config) is None else equal_pools(sizes)


# -- programs --------------------------------------------------------------------------------


def program_shapes(config: EngineConfig, model: Model, plan: Plan) -> Shapes:
    """The shapes that the engine's programs are compiled for. Raises ValueError for a drafter that
    cannot work with the model."""
    sizes, spec, layout, stages = plan.sched_sizes, plan.spec, plan.layout, plan.stages
    batch_shape = BatchShape(
        num_groups=len(sizes.groups),
        table_width=-(-sizes.max_model_len // sizes.block_size),
        block_size=sizes.block_size,
        num_blocks=sizes.num_blocks,
    )
    slot_shape = SlotShape(sizes.max_num_seqs, sizes.max_model_len, spec.vocab_size)
    asked = config.model.max_logprobs
    num_logprobs = spec.vocab_size if asked < 0 else min(asked, spec.vocab_size)
    taps = () if plan.prospect is None else plan.prospect.taps
    step = StepConfig(spec, batch_shape, num_logprobs, plan.step_shapes.row_sizes, layout, taps)
    params = param_shapes(spec, model.weight_dtype, layout.tensor_size)
    leaf_specs = param_specs(spec, layout)
    if len(stages) > 1 and spec.tie_embeddings:  # the last stage needs a copy of its own
        params["head"], leaf_specs["head"] = params["embed"], leaf_specs["embed"]
    if config.model.quantization == "int8":
        params = quantized_shapes(params)
    specs = Specs(leaf_specs, cache_spec(spec, layout))
    state = state_shapes(spec, batch_shape, slot_shape, model.kv_dtype, layout)
    stage_of = stage_of_layers(stages, spec.num_layers)
    kv = tuple(of.place(cache, specs.kv) for of, cache in zip(stage_of, state.kv, strict=True))
    state = DeviceState(kv, stages[-1].place(state.slots, stages[-1].data))
    drafter = None if plan.prospect is None else plan.prospect.open(step, params)
    return Shapes(step, params, state, slot_shape, stages, specs, drafter)


# -- weights ---------------------------------------------------------------------------------


def _load(
    config: EngineConfig, model: Model, plan: Plan, shapes: Shapes
) -> tuple[ModelRunner, float]:
    """Weights and programs, both at once. Returns the runner, and when the weights were there."""
    loader = _loader(config, model, plan, shapes)
    programs, warmup = Programs(shapes), _warmup(config.runner.warmup)
    try:
        if warmup != "lazy":
            token_by_token = plan.sched_sizes.max_num_batched_tokens == 1
            greedy = warmup == "greedy"
            first = first_keys(plan.step_shapes, greedy=greedy, token_by_token=token_by_token)
            programs.start(first, urgent=True)
        params = loader.load()
        loaded = time.monotonic()
        shards: AllShards | OwnShards = AllShards()
        if member_of(config) is not None:
            shards = OwnShards(shapes.devices, config.parallel.nnodes)
        runner = ModelRunner(params, programs, plan.step_shapes, loader.load, shards)
        _warm_up(programs, plan.step_shapes, warmup)
    except BaseException:
        programs.shutdown()
        raise
    return runner, loaded


def _loader(config: EngineConfig, model: Model, plan: Plan, shapes: Shapes) -> Loader:
    record, moe = config.parallel.record_expert_load, plan.spec.moe
    if plan.layout.record_experts and record is not None and moe is not None:
        expert_load.start(record, plan.spec.num_layers, moe.num_experts)
    return Loader(
        model.files,
        plan.stored,
        model.dtype,
        config.model.quantization,
        plan.layout,
        plan.stages,
        shapes.specs,
        plan.placement,
    )


def _warmup(setting: str) -> str:
    if setting != "auto":
        return setting
    return "background" if jax.default_backend() == "cpu" else "full"


def _warm_up(programs: Programs, shapes: StepShapes, warmup: str) -> None:
    """All programs, once the weights are there: tracing is Python, and would hold up the loader's
    threads."""
    if warmup not in ON_DEMAND:
        programs.start(warmup_keys(shapes), urgent=warmup == "full")
    if warmup == "full":
        _wait_with_progress(programs)
    elif warmup == "background":
        log.info(
            "compiling beside the first requests, so that no later one waits for a compile; "
            "the next start reads the programs from the cache"
        )
        programs.wait_in_background()


def _wait_with_progress(programs: Programs) -> None:
    why = "so that no request waits for a compile"
    with progress_bar("Compiling programs", None, "program", why=why) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        programs.wait(show)


# -- facts -----------------------------------------------------------------------------------


def _facts(
    config: EngineConfig, model: Model, plan: Plan, runner: ModelRunner, notes: dict[str, str]
) -> Facts:
    shapes, sizes, member = runner.programs.shapes, plan.sched_sizes, member_of(config)
    buckets, drafter = len(plan.step_shapes.buckets), shapes.drafter
    info = {
        "model": model.files.name,
        "dtype": model.dtype,
        "KV dtype": model.kv_dtype.name,
        "device": _device_name(plan.stages),
        "weights MiB": f"{_num_bytes(runner.params) / 2**20:.0f}",
        "KV MiB": f"{_num_bytes(shapes.state.kv) / 2**20:.0f}",
        "KV blocks": f"{sizes.num_blocks} of {sizes.block_size} tokens",
        "KV tokens": str(sizes.num_blocks * sizes.block_size),
        "programs": f"{buckets} buckets, warm-up {_warmup(config.runner.warmup)}; "
        + notes["programs"],
        "seconds": notes["seconds"],
    } | ({} if drafter is None else {"drafter": drafter.method})
    return Facts(
        sched_sizes=sizes,
        batch_shape=shapes.config.shape,
        slot_shape=shapes.slot_shape,
        step_shapes=plan.step_shapes,
        spec=plan.spec,
        kv_layout=_kv_layout(plan.spec, plan.layout, sizes, model.kv_dtype.name),
        kv_facts={
            "model": fingerprint(model.files),
            "dtype": model.dtype,
            "quantization": str(config.model.quantization),
        },
        num_shards=plan.layout.data_size // (1 if member is None else member.size),
        info=info,
    )


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _device_name(stages: Sequence[Devices]) -> str:
    """Device name for logs, e.g. "8 x NVIDIA H200"."""
    count = sum(1 if stage.mesh is None else stage.mesh.size for stage in stages)
    kind = jax.devices()[0].device_kind
    return kind if count == 1 else f"{count} x {kind}"


def _kv_layout(
    spec: DecoderSpec, layout: StepLayout, sched_sizes: SchedulerSizes, dtype: str
) -> KVLayout:
    """The contents of a block, for offload."""
    windows = spec.windows or (0,) * spec.num_layers
    groups = tuple(spec.groups.index(window) for window in windows)
    size = sched_sizes.block_size
    if spec.mla is not None:
        return KVLayout(groups, size, 1, spec.mla.width, dtype, "latent")
    return KVLayout(groups, size, spec.num_kv_heads, spec.head_dim, dtype, layout.cache)
