"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from jaxengine.models.families.common import (
    MOE_NAMES,
    TOP_NAMES,
    Config,
    Family,
    decoder_spec,
    need_int,
    window_size,
    windows_where,
)
from jaxengine.models.spec import DecoderSpec, MoeSpec


def spec(config: Config) -> DecoderSpec:
    moe = MoeSpec(
        num_experts=need_int(config, "num_local_experts"),
        top_k=need_int(config, "num_experts_per_tok"),
        ffn_size=need_int(config, "intermediate_size"),
    )
    return decoder_spec(
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6, **config},
        "mixtral",
        windows=windows_where(config, window_size(config), lambda i: True),
        moe=moe,
    )


_MOE = "model.layers.{i}.block_sparse_moe."
_NAMES = {
    **MOE_NAMES,
    "router": (_MOE + "gate.weight",),
    "experts_gate_up": (_MOE + "experts.{e}.w1.weight", _MOE + "experts.{e}.w3.weight"),
    "experts_down": (_MOE + "experts.{e}.w2.weight",),
}
FAMILY = Family("mixtral", spec, TOP_NAMES, _NAMES)
