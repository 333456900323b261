"""Number formats of weights and KV, from the settings to what the engine holds."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from testdata import GOLDENS

from jaxengine.config import EngineConfig
from jaxengine.executor.build import build
from jaxengine.executor.facts import Facts


def built(model: str, **settings: Any) -> tuple[Any, Facts]:
    """An engine whose programs are never compiled."""
    config = EngineConfig.of(
        model=str(GOLDENS / model),
        warmup="lazy",
        max_num_seqs=2,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=2**16,
        **settings,
    )
    return build(config)


def test_fp8_holds_twice_the_tokens() -> None:
    sizes = {}
    for name in ("auto", "fp8"):
        runner, facts = built("llama-gqa-tied-bias", kv_cache_dtype=name, dtype="bfloat16")
        sizes[name] = facts.sched_sizes.num_blocks
        cache = runner._state.kv[0][0]
        wanted = jnp.bfloat16 if name == "auto" else jnp.float8_e4m3fn
        assert cache.dtype == wanted and facts.info["KV dtype"] == jnp.dtype(wanted).name
        assert facts.kv_layout.dtype == jnp.dtype(wanted).name  # tiers keep them apart
        assert runner.params["embed"].dtype == jnp.bfloat16
        runner.shutdown()
    assert sizes["fp8"] == 2 * sizes["auto"] > 0


def test_fp8_is_refused_for_latent_attention() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype fp8 is not for latent attention"):
        built("deepseek-v3", kv_cache_dtype="fp8")


def test_int8_of_a_model_whose_head_is_its_embedding() -> None:
    runner, _ = built("llama-gqa-tied-bias", quantization="int8")
    values, scale = runner.params["head"]
    assert values.dtype == jnp.int8 and scale.shape == values.shape[:1]
    assert values.shape == runner.params["embed"].shape
    runner.shutdown()
