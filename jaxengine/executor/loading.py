"""Weights to their devices: each device gets only its part, experts lie where they are placed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.models.layers.quantize import quantize_params
from jaxengine.models.spec import DecoderSpec, Params
from jaxengine.parallel.eplb import Placement
from jaxengine.parallel.layout import Stage, StepLayout
from jaxengine.parallel.mesh import Devices
from jaxengine.runner.divide import expert_tables
from jaxengine.runner.lowering import Specs
from jaxengine.weights.load import load_params
from jaxengine.weights.resolve import ModelFiles


@dataclass(frozen=True)
class Loader:
    """Everything that loading needs, so that it can be done again after a deep sleep."""

    files: ModelFiles
    stored: DecoderSpec  # as in the checkpoint: without copies of experts
    dtype: str
    quantization: str | None
    layout: StepLayout
    stages: tuple[Devices, ...]
    specs: Specs
    placement: Placement | None

    def load(self) -> Params:
        """All parameters, on their devices. Raises the loader's errors."""
        devices = self.stages[-1]
        params = load_params(
            self.files,
            self.stored,
            self.dtype,
            jnp.asarray,
            place=self._place if devices.mesh is not None else None,
            tensor_size=self.layout.tensor_size,
            expert_parallel=self.layout.expert_parallel,
        )
        for i, tables in enumerate(expert_tables(self.stored, self.placement)):
            for name, table in tables.items():
                params["layers"][i][name] = self._place(("layers", i, name), table)
        if "head" in self.specs.params and "head" not in params:
            params["head"] = devices.put(params["embed"], self.specs.params["head"])
        return quantize_params(params) if self.quantization == "int8" else params

    def _place(self, path: tuple[str | int, ...], array: np.ndarray[Any, Any]) -> jax.Array:
        """A leaf to its devices."""
        spec: Any = self.specs.params
        for key in path:
            spec = spec[key]
        if self.placement is not None and str(path[-1]).startswith("experts_"):
            array = array[self.placement.expert_of_slot[int(path[1])]]
        return self._stage_of(path).put(array, spec)

    def _stage_of(self, path: tuple[str | int, ...]) -> Devices:
        if path[0] == "layers":
            return stage_of_layers(self.stages, self.stored.num_layers)[int(path[1])]
        return self.stages[0] if path[0] == "embed" else self.stages[-1]


def stage_of_layers(stages: tuple[Devices, ...], num_layers: int) -> list[Devices]:
    """The devices of each layer: those of the pipeline's stage that runs it."""
    count = len(stages)
    return [stages[i] for i in range(count) for _ in Stage(i, count).layers(num_layers)]
