"""The programs of a step, lowered for their shapes; those of drafts are in `spec_programs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxengine.models.decoder import KV, WHOLE
from jaxengine.models.spec import Params
from jaxengine.parallel.layout import Stage
from jaxengine.parallel.mesh import Devices
from jaxengine.runner.draft.drafter import Drafter
from jaxengine.runner.forward import ForwardOutput, StepConfig, forward
from jaxengine.runner.sampling_step import pool_rows, sample_rows, score_prompt
from jaxengine.runner.state import Counted, DeviceState, SlotState, counted_shapes, seed_slot
from jaxengine.sched.batch import Bucket, layout_of, rows_layout
from jaxengine.sched.slot_record import SlotShape


class Specs(NamedTuple):
    """The division of parameters and caches over the mesh: trees of PartitionSpec."""

    params: Any = P()
    kv: Any = P()


@dataclass(frozen=True)
class Shapes:
    """Everything that the programs are lowered for. `params` and `state` may be ShapeDtypeStructs:
    compiling needs no weights, so that programs compile while weights load."""

    config: StepConfig
    params: Params
    state: DeviceState
    slot_shape: SlotShape
    stages: Sequence[Devices] = (Devices(),)  # devices of the pipeline's stages
    specs: Specs = Specs()
    drafter: Drafter | None = None

    @property
    def devices(self) -> Devices:
        """Those of the last stage, where the samplers run."""
        return self.stages[-1]

    @property
    def head(self) -> Params:
        """The leaves that the output head reads."""
        return head_params(self.params)

    @property
    def head_specs(self) -> Any:
        return head_params(self.specs.params)

    @property
    def counted(self) -> Counted:
        """Shapes of what engines that speculate keep in addition to the slots."""
        remembers = self.drafter is not None and self.drafter.remembers
        return counted_shapes(self.state.slots, self.config.feature_width if remembers else None)


def lower_forward(of: Shapes, bucket: Bucket, stage: Stage = WHOLE) -> Any:
    """(params, kv, last_token, blob) -> (kv, ForwardOutput); of a pipeline's stage (its params,
    its kv, last_token or hidden states, blob) -> (its kv, hidden states or ForwardOutput)."""
    config, devices = of.config, of.stages[stage.index]
    num_layers = config.spec.num_layers
    layers = stage.layers(num_layers)

    def run_forward(
        params: Params, kv: KV, carry: Array, blob: Array
    ) -> tuple[KV, ForwardOutput | Array]:
        return forward(config, bucket, params, kv, carry, blob, stage)

    carry: Any = of.state.slots.last_token
    if stage.count > 1:  # it comes from other devices
        carry = jax.ShapeDtypeStruct(carry.shape, carry.dtype)
    if not stage.is_first:
        carry = _floats(devices.num_shards * bucket.tokens, config.spec.hidden_size)
    blob = ints(devices.num_shards * layout_of(bucket, config.shape).size)
    params = stage_params(of.params, stage, num_layers)
    return devices.lower(
        run_forward,
        (params, of.state.kv[layers.start : layers.stop], carry, blob),
        (
            stage_params(of.specs.params, stage, num_layers),
            of.specs.kv,
            devices.data,
            devices.data,
        ),
        (of.specs.kv, devices.data),
        donate=(1,),
    )


def pipelined(of: Shapes, bucket: Bucket) -> Callable[..., Any]:
    """All stages of a forward, compiled, as one call. Nothing in it waits for a device: while a
    stage works on this step, the one before may already work on the next."""
    count, num_layers = len(of.stages), of.config.spec.num_layers
    stages = [Stage(i, count) for i in range(count)]
    programs = [lower_forward(of, bucket, stage).compile() for stage in stages]

    def run(params: Params, kv: KV, last_token: Array, blob: Any) -> tuple[KV, Any]:
        written: KV = ()
        carry: Any = last_token
        for stage, program, devices in zip(stages, programs, of.stages, strict=True):
            layers = stage.layers(num_layers)
            carry = devices.put(carry, devices.data)
            own = stage_params(params, stage, num_layers)
            part, carry = program(own, kv[layers.start : layers.stop], carry, blob)
            written += part
        return written, carry

    return run


def lower_seed(of: Shapes) -> Any:
    """(slots, slot record) -> slots."""
    devices, shape = of.devices, of.slot_shape

    def run_seed(slots: SlotState, blob: Array) -> SlotState:
        return seed_slot(shape, slots, blob)

    blob = ints(devices.num_shards * shape.blob_size)
    specs = (devices.data, devices.data)
    return devices.lower(run_seed, (of.state.slots, blob), specs, devices.data, donate=(0,))


def lower_sample(of: Shapes, rows: int, greedy: bool = False) -> Any:
    """(head, slots, rows' hidden states, rows blob, mask) -> (slots, output rows)."""
    config, devices = of.config, of.devices
    data, shards = devices.data, devices.num_shards

    def run_sample(
        params: Params, slots: SlotState, hidden: Array, blob: Array, mask: Array
    ) -> tuple[SlotState, Array]:
        slots, out = sample_rows(config, rows, params, slots, hidden, blob, mask, greedy)
        return slots, devices.fetched(out)

    hidden = _floats(shards * rows, config.width)
    blob = ints(shards * rows_layout(rows).size)
    mask = ints(shards * rows, -(-config.spec.vocab_size // 32))
    return devices.lower(
        run_sample,
        (of.head, of.state.slots, hidden, blob, mask),
        (of.head_specs, data, data, data, data),
        (data, devices.fetch),
        donate=(1,),
    )


def lower_score(of: Shapes, tokens: int) -> Any:
    """(head, tokens' hidden states, target ids) -> log-probabilities of a prompt."""
    config, devices = of.config, of.devices

    def run_score(params: Params, hidden: Array, targets: Array) -> Array:
        return devices.fetched(score_prompt(config, params, hidden, targets))

    args = (
        of.head,
        _floats(devices.num_shards * tokens, config.width),
        ints(devices.num_shards * tokens),
    )
    specs = (of.head_specs, devices.data, devices.data)
    return devices.lower(run_score, args, specs, devices.fetch)


def lower_pool(of: Shapes, tokens: int) -> Any:
    """(tokens' hidden states, row of each) -> sums by row, for embeddings."""
    config, devices = of.config, of.devices
    num_rows = config.row_buckets[-1]

    def run_pool(hidden: Array, index: Array) -> Array:
        return devices.fetched(pool_rows(config.final(hidden), index, num_rows))

    args = (_floats(devices.num_shards * tokens, config.width), ints(devices.num_shards * tokens))
    return devices.lower(run_pool, args, (devices.data, devices.data), devices.fetch)


def stage_params(params: Any, stage: Stage, num_layers: int) -> Any:
    """The leaves of one stage; a spec for all leaves stays as it is."""
    if stage.count == 1 or not isinstance(params, dict):
        return params
    layers = stage.layers(num_layers)
    part = {"layers": params["layers"][layers.start : layers.stop]}
    if stage.is_first:
        part["embed"] = params["embed"]
    if stage.is_last:
        part |= {"final_norm": params["final_norm"], "head": params["head"]}
    return part


def head_params(params: Any) -> Any:
    """The leaves that the output head reads; a spec for all leaves stays as it is."""
    if not isinstance(params, dict):
        return params
    name = "head" if "head" in params else "embed"
    return {name: params[name]} if name in params else {}


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of an int32 argument."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
