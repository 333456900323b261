"""The least time that the same bytes and FLOPs take at the rates of a machine (Williams et al.,
"Roofline", 2009): what a throughput is compared with."""

from __future__ import annotations

from jaxengine.lab.bench.machine import Machine
from jaxengine.models.spec import DecoderSpec


def decode_floor(
    spec: DecoderSpec, machine: Machine, itemsize: int, count: int, input_len: int, output_len: int
) -> float:
    """Output tokens/s that bytes and FLOPs allow, prefill included."""
    weights = num_weights(spec)
    context = input_len + output_len / 2
    kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2 * context
    moved = (weights * itemsize + count * kv_bytes) / (machine.gbytes * 1e9)
    flops = count * (2 * weights + attention_flops(spec, context))
    step = max(moved, flops / (machine.gflops * 1e9))
    total = prefill_seconds(spec, machine, count, input_len) + (output_len - 1) * step
    return count * output_len / total


def prefill_seconds(spec: DecoderSpec, machine: Machine, count: int, length: int) -> float:
    """Least seconds for `count` prompts: FLOPs bind; the head runs on last rows only."""
    body = num_weights(spec) - spec.vocab_size * spec.hidden_size
    flops = length * (2 * body + attention_flops(spec, length / 2))
    flops += 2 * spec.vocab_size * spec.hidden_size
    return float(count * flops / (machine.gflops * 1e9))


def attention_flops(spec: DecoderSpec, context: float) -> float:
    """FLOPs of one token's attention over `context` tokens, all layers."""
    return 4 * spec.num_layers * spec.num_heads * spec.head_dim * context


def num_weights(spec: DecoderSpec) -> int:
    """Weights a decoded token is multiplied with (the embedding counts once, as head)."""
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = spec.hidden_size * (heads + 3 * spec.ffn_size)
    return spec.num_layers * layer + spec.vocab_size * spec.hidden_size
