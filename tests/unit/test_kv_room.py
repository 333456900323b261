"""The KV pool gets what the weights leave."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxengine.config import ParallelConfig
from jaxengine.engine.kv_room import RESERVE, kv_room, weight_bytes
from jaxengine.models.families import spec_from_config
from jaxengine.models.layout import StepLayout
from jaxengine.parallel.mesh import Devices

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
