"""The layer of experts against float64, by the published routers' rules."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.models.layers.moe import moe
from jaxengine.models.layers.norm import rms_norm
from jaxengine.models.layers.quantize import quantized_shapes
from jaxengine.models.layers.rope import apply_rope, inverse_frequencies, rope_tables
from jaxengine.models.params import layer_leaves, param_shapes
from jaxengine.models.spec import DecoderSpec, MlaSpec, MoeSpec, RopeSpec
from jaxengine.parallel.layout import StepLayout

T, D, E = 11, 16, 8
KINDS = {
    "softmax, renormalised": MoeSpec(E, 2, 12),
    "shared expert with a gate": MoeSpec(
        E, 3, 12, renormalise=False, shared_ffn_size=20, shared_gate=True
    ),
    "groups by their best": MoeSpec(
        E, 2, 12, renormalise=False, num_groups=4, top_groups=2, group_score="max", scale=2.5
    ),
    "sigmoid, groups by two best": MoeSpec(
        E, 3, 12, scoring="sigmoid", num_groups=2, top_groups=1, scale=1.5,
        choice_bias=True, shared_ffn_size=12,
    ),
    "clamped, with biases": MoeSpec(
        E, 2, 12, scoring="topk_softmax", router_bias=True, expert_bias=True,
        activation="clamped_swiglu", activation_limit=0.5,
    ),
}  # fmt: skip


def spec_of(kind: MoeSpec) -> DecoderSpec:
    return DecoderSpec("any", 32, 1, D, 2, 2, 8, 12, 64, moe=kind)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def choice(m: MoeSpec, logits: Any, bias: Any) -> tuple[list[int], Any]:
    """Experts and weights of one token."""
    soft = np.exp(logits - logits.max())
    soft /= soft.sum()
    scores = sigmoid(logits) if m.scoring == "sigmoid" else soft
    if m.scoring == "topk_softmax":
        scores = logits
    ranked = scores + bias
    groups = ranked.reshape(m.num_groups, -1)
    best = groups.max(1) if m.group_score == "max" else np.sort(groups, 1)[:, -2:].sum(1)
    closed = np.argsort(-best)[m.top_groups :]
    if m.num_groups > 1:
        groups = groups.copy()
        groups[closed] = -np.inf
    ids = np.argsort(-groups.reshape(-1))[: m.top_k]
    w = scores[ids]
    if m.scoring == "topk_softmax":
        w = np.exp(w - w.max()) / np.exp(w - w.max()).sum()
    elif m.renormalise:
        w = w / w.sum()
    return ids.tolist(), w * m.scale


def oracle(m: MoeSpec, p: dict[str, Any], x: Any) -> Any:
    def mlp(h: Any, clamp: bool) -> Any:
        gate, up = np.split(h, 2)
        if clamp:
            gate = np.minimum(gate, m.activation_limit)
            up = np.clip(up, -m.activation_limit, m.activation_limit)
            return gate * sigmoid(1.702 * gate) * (up + 1)
        return gate * sigmoid(gate) * up

    out = np.zeros_like(x)
    for t, row in enumerate(x):
        logits = p["router"] @ row + p.get("router_bias", 0)
        for e, w in zip(*choice(m, logits, p.get("choice_bias", 0)), strict=True):
            h = p["experts_gate_up"][e] @ row
            h = h + (p["experts_gate_up_bias"][e] if m.expert_bias else 0)
            y = p["experts_down"][e] @ mlp(h, m.activation == "clamped_swiglu")
            out[t] += w * (y + (p["experts_down_bias"][e] if m.expert_bias else 0))
        if m.shared_ffn_size:
            y = p["shared_down"] @ mlp(p["shared_gate_up"] @ row, False)
            out[t] += y * (sigmoid(p["shared_gate"][0] @ row) if m.shared_gate else 1)
    return out


@pytest.mark.parametrize("name", KINDS)
def test_layer_is_float64s(name: str) -> None:
    m = KINDS[name]
    rng = np.random.default_rng(len(name))
    leaves = layer_leaves(spec_of(m), 0)
    p = {k: rng.normal(size=leaf.shape).astype(np.float32) * 0.4 for k, leaf in leaves.items()}
    x = rng.normal(size=(T, D)).astype(np.float32)
    valid = np.arange(T) < T - 2
    layer = jax.jit(moe, static_argnums=(0, 4))
    got = layer(spec_of(m), p, x, valid, StepLayout())
    want = oracle(m, {k: v.astype(np.float64) for k, v in p.items()}, x.astype(np.float64))
    np.testing.assert_allclose(np.asarray(got)[valid], want[valid], atol=2e-4)
    if not m.shared_ffn_size:  # padding goes to no expert
        assert not np.asarray(got)[~valid].any()


def test_norm_of_one_plus_weight() -> None:
    x, w = np.array([[3.0, 4.0]], np.float32), np.array([1.0, -0.5], np.float32)
    plain = rms_norm(jnp.asarray(x), jnp.asarray(w + 1), 0.0)
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(w), 0.0, plus_one=True), plain)
    np.testing.assert_allclose(plain, [[2 * 3 / 12.5**0.5, 0.5 * 4 / 12.5**0.5]], rtol=1e-6)


@pytest.mark.parametrize("context", [64, 65])
def test_longrope(context: int) -> None:
    rope = RopeSpec(
        kind="longrope", factor=4.0, original_max_position=64, context=context,
        short_factor=(1.0, 2.0), long_factor=(4.0, 8.0),
    )  # fmt: skip
    got, scale = inverse_frequencies(rope, 4)
    want = np.array([1.0, 0.01]) / (np.array([1.0, 2.0]) if context == 64 else [4.0, 8.0])
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert scale == pytest.approx((1 + np.log(4) / np.log(64)) ** 0.5)


def test_rotation_of_the_leading_part_only() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 10)), jnp.float32)
    tables = rope_tables(RopeSpec(), 6, jnp.arange(3))
    got = apply_rope(x, *tables)
    np.testing.assert_array_equal(got[..., 6:], x[..., 6:])
    np.testing.assert_array_equal(got[..., :6], apply_rope(x[..., :6], *tables))
    assert np.abs(np.asarray(got[1:, :, :6] - x[1:, :, :6])).max() > 0.1


def test_eight_bits_are_refused_for_experts_and_latents() -> None:
    with pytest.raises(ValueError, match="int8 is not supported for models with experts"):
        quantized_shapes(param_shapes(spec_of(MoeSpec(E, 2, 12)), jnp.float32))
    latent = DecoderSpec("any", 32, 1, D, 2, 1, 12, 12, 64, mla=MlaSpec(8, 4, 8, 8))
    with pytest.raises(ValueError, match="int8 is not supported for models with latent attention"):
        quantized_shapes(param_shapes(latent, jnp.float32))
