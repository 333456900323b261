"""A decoder-only model as data. Families map config.json and tensor names onto it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (rotate-half form). `kind`: default | linear | llama3 | yarn."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None = the formula
    mscale: float | None = None  # yarn (deepseek)
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn


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
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over C on q and k, before rope (qwen3)
    rope: RopeSpec = RopeSpec()
    windows: tuple[int, ...] = ()  # [L] 0 = full attention, else sliding window in tokens

    @property
    def groups(self) -> tuple[int, ...]:
        """Distinct windows, full attention first: the KV groups."""
        return tuple(sorted(set(self.windows or (0,))))


# The parameter tree that weights.load returns and models.decoder reads (arrays, [out, in]):
#   {"embed": [V, D], "final_norm": [D], "head": [V, D] (absent when tied),
#    "layers": [ {"attn_norm": [D], "qkv": [(H+2G)*C, D], "qkv_bias"?: [(H+2G)*C],
#                 "q_norm"?: [C], "k_norm"?: [C], "o": [D, H*C], "o_bias"?: [D],
#                 "mlp_norm": [D], "gate_up": [2F, D], "gate_up_bias"?: [2F],
#                 "down": [D, F], "down_bias"?: [D]} ] * L }
Params = dict[str, Any]
