"""The engine's devices: one, or a mesh of (data, tensor) axes over which a step is shard_mapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxengine.parallel.layout import StepLayout

DATA, TENSOR = "data", "tensor"


@dataclass(frozen=True)
class Devices:
    """`mesh` None: one device, plain jit. `data` is the spec of arrays that differ by shard along
    their first axis."""

    mesh: Mesh | None = None
    num_shards: int = 1  # of attention data parallelism
    several_processes: bool = False  # of jax.distributed, and each reads the rows of all

    def fetched(self, rows: Any) -> Any:
        """Inside a program: rows that the host will read; every process needs those of all."""
        if not self.several_processes or self.num_shards == 1:
            return rows
        return jax.lax.all_gather(rows, DATA, tiled=True)

    @property
    def fetch(self) -> P:
        """The spec of what `fetched` gives."""
        return P() if self.several_processes else self.data

    @property
    def data(self) -> P:
        return P(DATA) if self.num_shards > 1 else P()

    def lower(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        in_specs: tuple[Any, ...],
        out_specs: Any,
        donate: tuple[int, ...] = (),
    ) -> Any:
        """fn lowered for arguments of these (global) shapes; under a mesh fn sees its device's
        part of each. Specs are pytree prefixes, as in shard_map."""
        if self.mesh is None:
            return jax.jit(fn, donate_argnums=donate).lower(*args)
        mapped = jax.shard_map(
            fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        shaped = tuple(self.place(arg, spec) for arg, spec in zip(args, in_specs, strict=True))
        return jax.jit(mapped, donate_argnums=donate).lower(*shaped)

    def place(self, tree: Any, specs: Any) -> Any:
        """ShapeDtypeStructs with their shardings; `specs` is a prefix of the tree."""
        if self.mesh is None:
            return tree
        mesh = self.mesh

        def put(spec: P, part: Any) -> Any:
            sharding = NamedSharding(mesh, spec)
            return jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), part
            )

        return jax.tree.map(put, specs, tree, is_leaf=lambda s: isinstance(s, P))

    def put(self, array: Any, spec: P) -> jax.Array:
        """An array on its devices; each gets only its part."""
        if self.mesh is None:
            return jax.device_put(array)
        if isinstance(array, np.ndarray):
            sharding = NamedSharding(self.mesh, spec)
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
        return jax.device_put(array, NamedSharding(self.mesh, spec))


def make_stages(layout: StepLayout, count: int, own_rows: bool = False) -> list[Devices]:
    """The devices of every pipeline stage; each stage has a mesh of its own. `own_rows`: every
    process reads the rows of its own shards only."""
    if count == 1:
        only = make_devices(layout)
        return [replace(only, several_processes=only.several_processes and not own_rows)]
    size = layout.data_size * layout.tensor_size
    found = jax.devices()
    if len(found) < size * count:
        raise ValueError(
            f"pipeline_parallel_size {count} of stages of {size} devices needs {size * count}, "
            f"but there are {len(found)}"
        )
    grids = np.asarray(found[: size * count]).reshape(count, layout.data_size, layout.tensor_size)
    several = jax.process_count() > 1
    return [Devices(Mesh(grid, (DATA, TENSOR)), layout.data_size, several) for grid in grids]


def make_devices(layout: StepLayout, found: Any = None) -> Devices:
    """The mesh over `found` (default: JAX's devices). Raises ValueError when there are fewer
    devices than the layout asks for."""
    wanted = layout.data_size * layout.tensor_size
    if wanted == 1:
        return Devices()
    found = jax.devices() if found is None else found
    if len(found) < wanted:
        raise ValueError(
            f"tensor_parallel_size {layout.tensor_size} x attention_data_parallel_size "
            f"{layout.data_size} needs {wanted} devices, but there are {len(found)}"
        )
    grid = np.asarray(found[:wanted]).reshape(layout.data_size, layout.tensor_size)
    return Devices(Mesh(grid, (DATA, TENSOR)), layout.data_size, jax.process_count() > 1)
