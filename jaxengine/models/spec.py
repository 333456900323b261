"""A decoder-only model as data. Families map config.json and tensor names onto it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (rotate-half form).

    `kind`: default | linear | llama3 | yarn | longrope. longrope divides the frequencies by
    `long_factor` when `context` (the longest sequence served) exceeds `original_max_position`,
    else by `short_factor`: one choice for the whole engine, so that cached keys stay valid.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None = the formula
    mscale: float | None = None  # yarn (deepseek)
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, [rotary width / 2]
    long_factor: tuple[float, ...] = ()
    context: int = 0


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts in place of the MLP. E experts of width F; each token takes `top_k`.

    See `pallas_kernels.moe.route` for scoring, renormalise, groups and scale.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    scoring: str = "softmax"
    renormalise: bool = True
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"  # a group's strength: top2 (sum of its two best) | max
    scale: float = 1.0
    router_bias: bool = False  # added to the logits (gpt-oss)
    choice_bias: bool = False  # shifts the choice, not the weights (deepseek-v3); float32
    expert_bias: bool = False
    activation: str = "silu"  # silu | gelu | clamped_swiglu
    activation_limit: float = 7.0  # clamped_swiglu
    shared_ffn_size: int = 0  # width of the shared experts, joined to one MLP; 0 = none
    redundant: int = 0  # slots for copies of busy experts, beside all experts
    most_copies: int = 1
    placed: bool = False  # experts lie where tables say (`parallel.eplb`)
    shared_gate: bool = False  # the shared expert is weighted by sigmoid(x . gate)


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention: a token's keys and values come from one cached latent.

    A head's query and key are `nope_dim` plain and `rope_dim` rotated numbers, its value
    `value_dim`; the cache holds `latent` + `rope_dim` numbers a token.
    """

    latent: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int = 0  # width of the query's bottleneck; 0 = none
    norm_eps: float = 1e-6  # of the norms of latent and bottleneck

    @property
    def width(self) -> int:
        """Numbers a token has in a layer's cache."""
        return self.latent + self.rope_dim


@dataclass(frozen=True)
class DecoderSpec:
    """Shape letters: V vocabulary, L layers, D width, H query heads, G kv heads, C head width,
    F ffn width. All weights in Hugging Face layout [out, in]."""

    family: str
    vocab_size: int  # V
    num_layers: int  # L
    hidden_size: int  # D
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # C
    ffn_size: int  # F
    max_position: int
    norm_eps: float = 1e-5
    activation: str = "silu"  # silu | gelu (tanh form)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over C on q and k, before rope (qwen3)
    qk_norm_wide: bool = False  # ... over all heads at once, H * C and G * C (olmo2)
    rope: RopeSpec = RopeSpec()
    windows: tuple[int, ...] = ()  # [L] 0 = full attention, else sliding window in tokens
    window_rope: RopeSpec | None = None  # of windowed layers; None = the same (gemma3)
    no_rope_layers: tuple[int, ...] = ()  # layers without rotary embedding (smollm3)
    rotary_dim: int = 0  # leading part of a head that is rotated; 0 = all of it
    pre_norm: bool = True  # norms before attention and MLP
    post_norm: bool = False  # norms after them, before the residual sum (gemma2, olmo2)
    norm_plus_one: bool = False  # norms multiply by 1 + weight (gemma)
    scale: float | None = None  # of attention scores; None = 1 / sqrt(C)
    soft_cap: float = 0.0  # tanh bound of attention scores; 0 = none
    logit_soft_cap: float = 0.0
    sinks: bool = False  # a learned logit without value in every head's softmax (gpt-oss)
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add (granite)
    logit_scale: float = 1.0
    moe: MoeSpec | None = None
    dense_layers: tuple[int, ...] = ()  # layers with a plain MLP in a model with experts
    mla: MlaSpec | None = None

    @property
    def groups(self) -> tuple[int, ...]:
        """Distinct windows, full attention first: the KV groups."""
        return tuple(sorted(set(self.windows or (0,))))

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.dense_layers

    def layer_rope(self, layer: int) -> RopeSpec | None:
        """The layer's rotary embedding, None for none."""
        if layer in self.no_rope_layers:
            return None
        windowed = bool(self.windows) and self.windows[layer] > 0
        return self.window_rope if windowed and self.window_rope is not None else self.rope


def local_spec(
    spec: DecoderSpec, tensor_size: int, *, expert_parallel: bool = False, devices: int = 0
) -> DecoderSpec:
    """The model as one device of `tensor_size` sees it: its heads, FFN columns and experts.

    Under `expert_parallel`, whole experts are divided over `devices` (default tensor_size)
    instead of their columns. KV heads are replicated where there are fewer than devices; width
    and vocabulary stay. Raises ValueError with the numbers for what cannot be divided.
    """

    def share(count: int, what: str, over: int = tensor_size) -> int:
        if count % over:
            raise ValueError(f"{count} {what} cannot be divided over {over} devices")
        return count // over

    moe = spec.moe
    if moe is not None:
        if expert_parallel:
            over = devices or tensor_size
            what = "experts and their copies" if moe.redundant else "experts"
            slots = share(moe.num_experts + moe.redundant, what, over)
            moe = replace(moe, num_experts=slots)
        else:
            moe = replace(moe, ffn_size=share(moe.ffn_size, "FFN columns of an expert"))
        shared = share(moe.shared_ffn_size, "FFN columns of the shared expert")
        moe = replace(moe, shared_ffn_size=shared)
    if tensor_size == 1:
        return replace(spec, moe=moe)
    heads, kv_heads = share(spec.num_heads, "attention heads"), spec.num_kv_heads
    if spec.mla is None:
        if kv_heads % tensor_size and tensor_size % kv_heads:
            raise ValueError(
                f"{kv_heads} kv heads can be neither divided over {tensor_size} devices nor "
                "replicated evenly"
            )
        kv_heads = max(1, kv_heads // tensor_size)
    has_dense = any(not spec.is_moe(i) for i in range(spec.num_layers))
    ffn = share(spec.ffn_size, "FFN columns") if has_dense else spec.ffn_size
    # The scale is that of the whole head; q-k norms over all heads know of the split by axis.
    return replace(spec, num_heads=heads, num_kv_heads=kv_heads, ffn_size=ffn, moe=moe)


def for_context(spec: DecoderSpec, max_model_len: int) -> DecoderSpec:
    """The model for sequences of at most `max_model_len` tokens: settles longrope's choice."""
    return replace(spec, rope=replace(spec.rope, context=max_model_len))


# The parameter tree that weights.load returns and models.decoder reads; models/params.py has
# every leaf's shape: {"embed": [V, D], "final_norm": [D], "head": [V, D] (absent when tied),
# "layers": [{"attn_norm": [D], "qkv": [(H+2G)*C, D], ...}] * L}
Params = dict[str, Any]
