"""The KV pool gets what the weights leave."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from testdata import CONFIGS

from jaxengine.config import EngineConfig, ParallelConfig
from jaxengine.executor import sizes
from jaxengine.lab.simulate.gpus import gpu_of
from jaxengine.lab.simulate.roofline import Roofline
from jaxengine.models.families import spec_from_config
from jaxengine.models.spec import DecoderSpec
from jaxengine.parallel.layout import Stage, StepLayout
from jaxengine.parallel.mesh import DATA, TENSOR, Devices
from jaxengine.runner.divide import cache_spec
from jaxengine.runner.kv_room import RESERVE, kv_room, local_bytes, weight_bytes
from jaxengine.runner.state import state_shapes
from jaxengine.sched.batch import BatchShape
from jaxengine.sched.slot_record import SlotShape

GIB = 2**30

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}


def test_weights_are_counted_before_they_are_there() -> None:
    spec = spec_from_config(LLAMA_8B)
    size = weight_bytes(spec, jnp.bfloat16, StepLayout(), Devices(), ParallelConfig())
    assert size / 2**30 == pytest.approx(14.96, abs=0.01)  # 8.03 billion parameters of 2 bytes
    alone = (spec, jnp.bfloat16, StepLayout(), Devices(), ParallelConfig())
    # GiB in 8 bits: gate and up 3.5, qkv 0.75, o 0.5, head 0.49; as they are: down 3.5, embed 0.98
    assert weight_bytes(*alone, "int8") / 2**30 == pytest.approx(9.72, abs=0.01)
    halves = ParallelConfig(pipeline_parallel_size=2)
    staged = weight_bytes(spec, jnp.bfloat16, StepLayout(), Devices(), halves)
    assert size / 2 < staged < 0.6 * size  # every stage may hold an embedding or a head

    stats = {"bytes_limit": 100 * 2**30, "bytes_in_use": 2**30}
    room = kv_room(stats, 0.9, size)
    assert room == 90 * 2**30 - 2**30 - size - RESERVE
    assert kv_room(stats, 0.1, size) == 0


# -- the pool on a mesh of GPUs ---------------------------------------------------------------


def published(name: str) -> DecoderSpec:
    return spec_from_config(json.loads((CONFIGS / name / "config.json").read_text()))


def on_gpus(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """As on devices that have so much left for KV."""
    monkeypatch.setattr(sizes.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(sizes, "kv_room", lambda *_: room)


def blocks_of(spec: DecoderSpec, tensor: int, stages: int, **settings: Any) -> tuple[int, int]:
    """Blocks of 64 tokens that the pool gets; bytes of one on a device of the fullest stage."""
    layout = StepLayout(
        cache="head_major", tensor_axis=TENSOR if tensor > 1 else "", tensor_size=tensor
    )
    config = EngineConfig.of(
        tensor_parallel_size=tensor, pipeline_parallel_size=stages, max_num_seqs=4096, **settings
    )
    num_blocks = sizes.plan_sizes(config, spec, jnp.bfloat16, 64, layout).num_blocks
    pool = state_shapes(
        spec, BatchShape(1, 8, 64, num_blocks), SlotShape(1, 8, 8), jnp.bfloat16, layout
    ).kv
    devices = Devices(AbstractMesh((1, tensor), (DATA, TENSOR)))
    placed = devices.place(pool, cache_spec(spec, layout))
    layers = max(len(Stage(i, stages).layers(spec.num_layers)) for i in range(stages))
    return num_blocks, local_bytes(placed[:layers]) // num_blocks


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize(
    "name",
    [
        "DeepSeek-V2-Lite",  # latents, whole on every device
        "Llama-3.1-8B",  # 8 kv heads: divided
        "Qwen3-30B-A3B",  # 4: of 8 devices two have copies of each
    ],
)
def test_the_pool_of_a_device_is_what_it_has_left(
    monkeypatch: pytest.MonkeyPatch, name: str, tensor: int, stages: int
) -> None:
    """Counted from the arrays that are allocated, of one device of the fullest stage."""
    on_gpus(monkeypatch, 20 * GIB)
    num_blocks, block = blocks_of(published(name), tensor, stages)
    assert num_blocks * block <= 20 * GIB < (num_blocks + 1) * block


def test_latents_do_not_shrink_with_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 20 * GIB)
    spec = published("DeepSeek-V2-Lite")
    assert len({blocks_of(spec, tensor, 1) for tensor in (1, 2, 8)}) == 1
    said = {"kv_cache_memory_bytes": 10 * GIB}  # of one device too
    assert blocks_of(spec, 8, 1, **said)[0] == blocks_of(spec, 1, 1)[0] // 2
    llama = published("Llama-3.1-8B")
    assert blocks_of(llama, 8, 1)[0] == 8 * blocks_of(llama, 1, 1)[0]
    # In the simulator as well: what eight devices have more is the room of the weights.
    few, many = (Roofline(spec, gpu_of("h200"), tensor_parallel=n).kv_blocks(64) for n in (1, 8))
    block = 64 * 27 * 576 * 2  # tokens, layers, width, bytes
    assert few < many < few + 2 * 16e9 / block


def test_what_a_sequence_needs_is_told_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, GIB)
    with pytest.raises(ValueError, match="needs 2.00 GiB of KV") as found:
        blocks_of(published("Llama-3.1-8B"), 8, 1, max_model_len=131072)
    assert "raise kv_cache_memory_bytes" in str(found.value)
    on_gpus(monkeypatch, 3 * GIB)
    blocks_of(published("Llama-3.1-8B"), 8, 1, max_model_len=131072)
