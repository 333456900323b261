"""The step's layout, from parallel settings: the mesh, caches on it, experts and their copies."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from jaxengine.config import ParallelConfig
from jaxengine.models.cache import cache_head_axis
from jaxengine.models.spec import DecoderSpec, local_spec
from jaxengine.parallel import eplb, expert_load
from jaxengine.parallel.eplb import Placement
from jaxengine.parallel.layout import StepLayout
from jaxengine.parallel.mesh import DATA, TENSOR

log = logging.getLogger(__name__)


def divide(parallel: ParallelConfig, layout: StepLayout, spec: DecoderSpec) -> StepLayout:
    """The layout over the asked mesh. Raises ValueError naming the setting and the numbers."""
    tensor, data = parallel.tensor_parallel_size, parallel.attention_data_parallel_size
    stages = parallel.pipeline_parallel_size
    devices = tensor * data * stages
    if parallel.nnodes > 1 and stages > 1:
        raise ValueError("pipeline_parallel_size works within one node; nnodes must be 1 with it")
    if parallel.nnodes > 1 and devices % parallel.nnodes:
        raise ValueError(f"{devices} devices cannot be shared by nnodes {parallel.nnodes}")
    if stages > spec.num_layers:
        raise ValueError(
            f"pipeline_parallel_size {stages} is more than the {spec.num_layers} layers"
        )
    for name in (
        "tensor_parallel_size", "attention_data_parallel_size", "pipeline_parallel_size"
    ):  # fmt: skip
        if getattr(parallel, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(parallel, name)}")
    experts = parallel.enable_expert_parallel
    if (parallel.num_redundant_experts or parallel.eplb_load) and not (experts and spec.moe):
        raise ValueError("num_redundant_experts and eplb_load need enable_expert_parallel")
    if parallel.record_expert_load and spec.moe is None:
        raise ValueError("record_expert_load is set, but the model has no experts")
    if parallel.num_redundant_experts < 0:
        raise ValueError(f"num_redundant_experts is {parallel.num_redundant_experts}, below 0")
    if experts and spec.moe is None:
        raise ValueError("enable_expert_parallel is set, but the model has no experts")
    spread = experts and tensor * data > 1
    if parallel.enable_dbo and not spread:
        log.warning("enable_dbo: experts are on one device, there is no communication to hide")
    moe = spec.moe and replace(spec.moe, redundant=parallel.num_redundant_experts)
    local_spec(replace(spec, moe=moe), tensor, expert_parallel=experts, devices=tensor * data)
    return replace(
        layout,
        tensor_axis=TENSOR if tensor > 1 else "",
        tensor_size=tensor,
        data_axis=DATA if data > 1 else "",
        data_size=data,
        expert_parallel=spread,
        dispatch=parallel.all2all_backend,
        record_experts=parallel.record_expert_load is not None,
        dbo=parallel.enable_dbo and spread,
    )


def place_experts(
    parallel: ParallelConfig, spec: DecoderSpec
) -> tuple[DecoderSpec, Placement | None]:
    """The model with slots for copies of busy experts, and what lies in every slot. Without a
    file of loads all experts count as equally busy. Raises ValueError for a wrong file."""
    devices = parallel.tensor_parallel_size * parallel.attention_data_parallel_size
    wanted = parallel.num_redundant_experts or parallel.eplb_load
    if not wanted or spec.moe is None or devices == 1:
        return spec, None
    experts = spec.moe.num_experts
    load = np.ones((spec.num_layers, experts))
    if parallel.eplb_load is not None:
        load = expert_load.read(parallel.eplb_load, spec.num_layers, experts)
    slots = experts + parallel.num_redundant_experts
    placement = eplb.place(load, devices, slots // devices)
    moe = replace(
        spec.moe,
        redundant=parallel.num_redundant_experts,
        most_copies=placement.slots.shape[-1],
        placed=True,
    )
    return replace(spec, moe=moe), placement


def expert_tables(
    spec: DecoderSpec, placement: Placement | None
) -> list[dict[str, np.ndarray[Any, Any]]]:
    """The slots of every layer's experts; nothing in layers without experts."""
    if placement is None:
        return []
    return [
        {"expert_slots": placement.slots[i], "expert_copies": placement.copies[i]}
        if spec.is_moe(i)
        else {}
        for i in range(spec.num_layers)
    ]


def cache_spec(spec: DecoderSpec, layout: StepLayout) -> PartitionSpec:
    """The division of a layer's cache arrays: blocks by shard, heads by tensor axis."""
    axis = cache_head_axis(spec, layout)
    heads = () if axis is None else (*[None] * (axis - 1), layout.tensor_axis)
    return PartitionSpec(layout.data_axis or None, *heads)
