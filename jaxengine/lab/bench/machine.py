"""What this machine can do, measured in the same run as what is compared with it."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil


@dataclass(frozen=True)
class Machine:
    """Rates of the machine: GFLOP/s of a large product by type, and GB/s of reading memory."""

    name: str
    cores: int
    gflops_float32: float
    gflops_bfloat16: float
    gbytes: float
    versions: dict[str, str]
    memory_gib: float = 0.0

    @property
    def gflops(self) -> float:
        return max(self.gflops_float32, self.gflops_bfloat16)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe() -> dict[str, Any]:
    """Name, cores, memory and versions, without a measurement and without JAX."""
    return {
        "name": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    names = ("jaxengine", "jax", "jaxlib", "numpy")
    return {name: version(name) for name in names} | {"python": platform.python_version()}


def measure(repeats: int = 8) -> Machine:
    """Rates of JAX's default device, the best of `repeats` runs each; takes about a second."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    size = 1024 if on_cpu else 8192  # a GPU is not busy with less
    facts = describe()
    return Machine(
        name=facts["name"] if on_cpu else f"{device.device_kind}, {facts['name']}",
        cores=facts["cores"],
        gflops_float32=_product_rate(jnp.float32, repeats, size),
        gflops_bfloat16=_product_rate(jnp.bfloat16, repeats, size),
        gbytes=_read_rate(repeats) if on_cpu else _device_read_rate(repeats),
        versions=facts["versions"],
        memory_gib=facts["memory_gib"],
    )


def _product_rate(dtype: Any, repeats: int, size: int) -> float:
    import jax
    import jax.numpy as jnp

    x, w = jnp.ones((size, size), dtype), jnp.ones((size, size), dtype)

    @jax.jit
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )

    product(x, w).block_until_ready()
    best = _best(lambda: product(x, w).block_until_ready(), repeats)
    return 2 * size**3 / best / 1e9


def _read_rate(repeats: int, megabytes: int = 128) -> float:
    cores = os.cpu_count() or 1
    parts = [np.ones(megabytes * 2**18 // cores, np.float32) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        best = _best(lambda: list(pool.map(np.sum, parts)), repeats)
    return sum(part.nbytes for part in parts) / best / 1e9


def _device_read_rate(repeats: int, megabytes: int = 2048) -> float:
    import jax
    import jax.numpy as jnp

    data = jnp.ones((megabytes * 2**18,), jnp.float32)
    total = jax.jit(jnp.sum)
    total(data).block_until_ready()
    return data.nbytes / _best(lambda: total(data).block_until_ready(), repeats) / 1e9


def _best(run: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = info.read_text().splitlines()
    name = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "?")
    flags = next((x.split(":", 1)[1].split() for x in lines if x.startswith("flags")), [])
    wide = [f for f in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16") if f in flags]
    return f"{name} ({', '.join(wide)})"
