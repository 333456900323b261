"""How a step lies on devices and in caches: static choices, made once when the engine is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CacheLayout = Literal["token_major", "head_major"]


@dataclass(frozen=True)
class Stage:
    """One of `count` consecutive parts of the layers (pipeline parallelism)."""

    index: int = 0
    count: int = 1

    def layers(self, num_layers: int) -> range:
        """The stage's layers; sizes differ by one at most."""
        return range(
            self.index * num_layers // self.count, (self.index + 1) * num_layers // self.count
        )

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


@dataclass(frozen=True)
class StepLayout:
    """Single device, token-major (the CPU's) unless said otherwise.

    token_major: a layer's cache is keys and values [N, P, G * C]; head_major (GPU): one array
    [N, 2, G, P, C]. Mesh axes are named where the step runs inside `shard_map`; "" = none.
    """

    cache: CacheLayout = "token_major"
    attention_backend: str = "xla"  # auto | mosaic | xla, for the head-major cache
    rows_per_turn: int = 8  # decode rows that attend together, token-major; 0 = all
    tensor_axis: str = ""  # heads, FFN columns and vocabulary rows are split over it
    tensor_size: int = 1
    data_axis: str = ""  # tokens and caches differ along it (attention data parallelism)
    data_size: int = 1
    expert_parallel: bool = False  # experts are split over both axes, else their columns
    dispatch: str = "auto"  # all-to-all backend of expert parallelism
    record_experts: bool = False  # count the experts' tokens on the host
    dbo: bool = False  # two microbatches out of phase, in the programs that ask for it
