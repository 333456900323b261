"""The GPU's head-major cache gives the ids of the CPU's token-major one, in the same engine."""

import random
from dataclasses import replace

import jax.numpy as jnp
import pytest
from engine_runs import TIGHT_16, VOCAB, engine, request, run

from jaxengine.executor import build
from jaxengine.models.families import spec_from_config
from jaxengine.pallas_kernels import device
from jaxengine.parallel.layout import StepLayout
from jaxengine.runner.attention import choose_attention
from jaxengine.runner.model_runner import ModelRunner

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize("model", ["llama", pytest.param("mistral-window", marks=pytest.mark.slow)])
def test_same_ids(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    requests = [
        request(str(i), [rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 15, 16, 17, 50)))])
        for i in range(12)
    ]
    plain = run(engine(model=model, **TIGHT_16), requests)
    head_major = StepLayout(cache="head_major", attention_backend="xla")
    monkeypatch.setattr(build, "choose_attention", lambda *a: (head_major, 16))
    other = engine(model=model, seed=1, **TIGHT_16)
    assert isinstance(other.executor, ModelRunner) and other.executor._state is not None
    assert len(other.executor._state.kv[0]) == 1
    got = run(other, requests)
    assert {n: s.ids for n, s in got.items()} == {n: s.ids for n, s in plain.items()}


def test_choice(caplog: pytest.LogCaptureFixture) -> None:
    spec = spec_from_config(LLAMA)
    bf16 = jnp.dtype(jnp.bfloat16)
    assert choose_attention("auto", spec, bf16, None, on_cpu=True) == (StepLayout(), 16)
    with pytest.raises(ValueError, match="mosaic cannot run: the device is cpu"):
        choose_attention("mosaic", spec, bf16, None, on_cpu=True)
    try:
        device.assume("9.0")
        layout, page = choose_attention("auto", spec, bf16, None, on_cpu=False)
        assert (layout.cache, layout.attention_backend, page) == ("head_major", "mosaic", 64)
        assert choose_attention("xla", spec, bf16, 32, on_cpu=False)[0].cache == "token_major"
        odd = replace(spec, head_dim=72)
        caplog.clear()
        assert choose_attention("auto", odd, bf16, None, on_cpu=False)[0].cache == "token_major"
        assert [r.message for r in caplog.records] == [
            "attention runs in XLA: the head width 72 is no multiple of 16 up to 256"
        ]
        device.assume("8.0")
        caplog.clear()
        choose_attention("auto", spec, bf16, None, on_cpu=False)
        assert "are for compute capability 9.0, the device has 8.0" in caplog.text
        with pytest.raises(ValueError, match="compute capability 9.0"):
            choose_attention("mosaic", spec, bf16, None, on_cpu=False)
    finally:
        device.assume("")
