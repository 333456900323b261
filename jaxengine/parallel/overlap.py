"""Two microbatches out of phase: while one half's tokens travel, the other half computes.

There are no threads and no streams here. The order is data flow: an `optimization_barrier` makes
each half's next computation wait for the other half's data to be ready to leave, so a compiler
with a latency-hiding scheduler has exactly one place for each exchange: beside the other half's
computation. The barriers also make the halves' products depend on each other, so that XLA cannot
merge them into one product (they have the same weights), which would undo the overlap silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

Tree = Any  # a pytree of arrays


@dataclass(frozen=True)
class ExpertLayer:
    """A mixture-of-experts layer in six steps; `send` and `give_back` are the collectives alone.

    `attend` is attention with its residual: (which half, activations, the layer's KV cache) ->
    (activations, the cache with this half's tokens written). `pack` routes: activations ->
    (what the layer keeps, what it sends). The others map (kept, result of the step before) to
    their own: `send` to what came, `experts` to what goes back, `give_back` to what came back,
    `after` to the layer's output.
    """

    attend: Callable[[int, Tree, Tree], tuple[Tree, Tree]]
    pack: Callable[[Tree], tuple[Tree, Tree]]
    send: Callable[[Tree, Tree], Tree]
    experts: Callable[[Tree, Tree], Tree]
    give_back: Callable[[Tree, Tree], Tree]
    after: Callable[[Tree, Tree], Tree]


@dataclass(frozen=True)
class DenseLayer:
    """A layer without an exchange: (half, activations, cache) -> (activations, cache)."""

    run: Callable[[int, Tree, Tree], tuple[Tree, Tree]]


Layers = Sequence[ExpertLayer | DenseLayer]


def split_tokens(num_tokens: int, num_padded: int) -> int:
    """Tokens of the first half when `num_tokens` real tokens lead `num_padded` places.

    Half of the real ones, rounded up, so that padding lies in the second half only. The cut may
    fall inside a request. 0 when there are fewer than two tokens: nothing to split.
    Raises ValueError unless 0 <= num_tokens <= num_padded.
    """
    if not 0 <= num_tokens <= num_padded:
        raise ValueError(f"num_tokens must be from 0 to {num_padded}, not {num_tokens}")
    return 0 if num_tokens < 2 else (num_tokens + 1) // 2


def wants_halves(num_tokens: int, decode_only: bool, decode: int = 32, prefill: int = 512) -> bool:
    """One rank's vote: at least two tokens, and not below the threshold of the batch's kind.

    All ranks must agree (`min` of the votes), since both programs hold collectives.
    """
    return num_tokens >= max(2, decode if decode_only else prefill)


def run_whole(layers: Layers, x: Tree, caches: Sequence[Tree]) -> tuple[Tree, list[Tree]]:
    """The layers over one batch, which is half 0."""
    written = []
    for layer, cache in zip(layers, caches, strict=True):
        if isinstance(layer, DenseLayer):
            x, cache = layer.run(0, x, cache)
        else:
            x, cache = layer.attend(0, x, cache)
            kept, payload = layer.pack(x)
            rows = layer.experts(kept, layer.send(kept, payload))
            x = layer.after(kept, layer.give_back(kept, rows))
        written.append(cache)
    return x, written


def interleave(
    layers: Layers, halves: tuple[Tree, Tree], caches: Sequence[Tree]
) -> tuple[tuple[Tree, Tree], list[Tree]]:
    """The layers over two halves of a batch; equal to `run_whole` over both.

    The second half's tokens may attend to the first's: caches go through half 0, then half 1.

        half 0 | attention |         | experts |         | attention | ...
        half 1 |           | attention |       | experts |
        wire   | 1 back    | 0 out   | 1 out   | 0 back  | 1 back
    """
    first, second = halves
    written = []
    returned: Tree = None  # half 1's rows of the layer before, still on their way
    finish: Callable[[Tree, Tree], Tree] | None = None
    kept1: Tree = None
    for layer, cache in zip(layers, caches, strict=True):
        if isinstance(layer, DenseLayer):
            if finish is not None:
                second, finish = finish(kept1, returned), None
            first, cache = layer.run(0, first, cache)
            # The second half waits for the first: equal products would else be merged.
            first, second = lax.optimization_barrier((first, second))
            second, cache = layer.run(1, second, cache)
            written.append(cache)
            continue
        first, cache = layer.attend(0, first, cache)
        if finish is not None:  # half 1 comes back while half 0 attends
            first, returned = lax.optimization_barrier((first, returned))
            second = finish(kept1, returned)
        kept0, out0 = layer.pack(first)
        out0, second = lax.optimization_barrier((out0, second))
        came0 = layer.send(kept0, out0)
        second, cache = layer.attend(1, second, cache)
        second, came0 = lax.optimization_barrier((second, came0))
        kept1, out1 = layer.pack(second)
        came1 = layer.send(kept1, out1)
        rows0 = layer.experts(kept0, came0)
        rows0, came1 = lax.optimization_barrier((rows0, came1))
        back0 = layer.give_back(kept0, rows0)
        rows1 = layer.experts(kept1, came1)
        rows1, back0 = lax.optimization_barrier((rows1, back0))
        returned = layer.give_back(kept1, rows1)
        first = layer.after(kept0, back0)
        finish = layer.after
        written.append(cache)
    if finish is not None:
        second = finish(kept1, returned)
    return (first, second), written
