"""Compile for a GPU on a machine without one, and read what the compiler says.

Needs the CUDA plugin, its PJRT library and ptxas (`scripts/install_aot.sh`), which are put in
`<venv>/aot`, off the normal import path: a plugin that finds no driver complains in every
process that imports JAX. `worker_env` gives the environment of a process that may use them.
Some LLVM errors abort the process, so run every file of checks in a process of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """What XLA must know of a GPU to compile for it; sizes in bytes."""

    name: str
    core_count: int
    major: int
    minor: int
    extension: str
    shared_per_core: int
    shared_per_block: int
    memory: int
    bandwidth: int
    l2: int
    clock_ghz: float


TARGETS = {
    "h200": Target(
        "NVIDIA H200", 132, 9, 0, "ACCELERATED_FEATURES", 233472, 232448,
        151397597184, 4800000000000, 52428800, 1.98,
    ),
    "h100": Target(
        "NVIDIA H100 80GB HBM3", 132, 9, 0, "ACCELERATED_FEATURES", 233472, 232448,
        84942979072, 3352000000000, 52428800, 1.98,
    ),
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", 108, 8, 0, "NONE", 167936, 166912,
        84987740160, 2039000000000, 41943040, 1.41,
    ),
    "b200": Target(
        "NVIDIA B200", 148, 10, 0, "ACCELERATED_FEATURES", 233472, 232448,
        191000000000, 8000000000000, 132120576, 1.965,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """ptxas's figures of one Mosaic kernel. `shared` is dynamic shared memory in bytes, `threads`
    a CTA's threads."""

    name: str
    registers: int
    spill_bytes: int
    shared: int
    threads: int
    wgmma: bool
    tma: bool


@dataclass(frozen=True)
class Report:
    """One compiled program: its Mosaic kernels and XLA's memory figures in bytes."""

    kernels: tuple[Kernel, ...]
    custom_calls: tuple[str, ...]
    temp: int
    arguments: int
    outputs: int
    aliased: int
    code: int
    hlo: str = field(repr=False, default="")
    thunks: str = field(repr=False, default="")

    def as_dict(self) -> dict[str, Any]:
        """The figures without the program texts."""
        return {k: v for k, v in asdict(self).items() if k not in ("hlo", "thunks")}


def install_dir() -> Path:
    return Path(sys.prefix) / "aot"


def missing() -> str:
    """Why nothing can be compiled for a GPU here; "" if it can."""
    for plugin in ("xla_cuda12", "xla_cuda13"):
        if (install_dir() / "jax_plugins" / plugin).is_dir():
            return ""
    if importlib.util.find_spec("jax_plugins") is not None:
        for plugin in ("xla_cuda12", "xla_cuda13"):
            if importlib.util.find_spec(f"jax_plugins.{plugin}") is not None:
                return ""
    return "the CUDA plugin of JAX is not installed (scripts/install_aot.sh installs it)"


def worker_env(dump_dir: str) -> dict[str, str]:
    """Environment of a process that compiles for a GPU; the compiler's reports go to dump_dir."""
    env = dict(os.environ)
    env["JAX_PLATFORMS"] = "cpu"
    env["TF_CPP_MIN_LOG_LEVEL"] = env.get("TF_CPP_MIN_LOG_LEVEL", "2")
    env["PYTHONPATH"] = os.pathsep.join(
        p for p in (str(install_dir()), env.get("PYTHONPATH", "")) if p
    )
    env["PATH"] = os.pathsep.join(
        [str(install_dir() / "nvidia" / "cuda_nvcc" / "bin"), env.get("PATH", "")]
    )
    env["MOSAIC_GPU_DUMP_TO"] = dump_dir
    for what in ("PTX", "PTXAS"):
        env[f"MOSAIC_GPU_DUMP_{what}"] = "1"
    flags = [env.get("XLA_FLAGS", ""), f"--xla_dump_to={dump_dir}"]
    flags.append(f"--xla_gpu_cuda_data_dir={install_dir() / 'nvidia' / 'cuda_nvcc'}")
    env["XLA_FLAGS"] = " ".join(f for f in flags if f)
    return env


def target_text(target: Target) -> str:
    """The target in XLA's text format."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {target.shared_per_core}
  threads_per_core_limit: 2048
  core_count: {target.core_count}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {target.bandwidth}
  l2_cache_size: {target.l2}
  clock_rate_ghz: {target.clock_ghz}
  device_memory_size: {target.memory}
  shared_memory_per_block_optin: {target.shared_per_block}
  cuda_compute_capability {{
    major: {target.major} minor: {target.minor} feature_extension: {target.extension}
  }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {target.major}.{target.minor}"
  device_address_bits: 64
  name: "{target.name}"
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{target.name}"
"""


@functools.cache
def topology(name: str, devices: int) -> Any:
    """So many devices of a target, on paper. Raises RuntimeError without the plugin."""
    import jax
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(
            platform="cuda",
            target_config=target_text(TARGETS[name]),
            topology=f"1x1x{devices}",
        )
    except (RuntimeError, ValueError, jax.errors.JaxRuntimeError) as e:
        raise RuntimeError(f"no compiler for {name}: {e}") from e


def compile_for(
    target: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    donate: tuple[int, ...] = (),
    devices: int = 1,
) -> Report:
    """Compile fn(*args) for a target of TARGETS. Runs inside a process with `worker_env`.

    `args` are pytrees of ShapeDtypeStruct. Raises RuntimeError when no plugin is there, and
    whatever the compiler raises (ValueError for too much shared memory).
    """
    import jax
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = topologies.make_mesh(topology(target, devices), (devices,), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    shaped = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=getattr(a, "sharding", None) or whole
        ),
        tuple(args),
    )
    return compile_lowered(
        target, devices, lambda: jax.jit(fn, donate_argnums=donate).lower(*shaped)
    )


def compile_lowered(target: str, devices: int, lower: Callable[[], Any]) -> Report:
    """Compile what `lower` gives; it is called where the target is JAX's default device."""
    import jax

    dump = os.environ.get("MOSAIC_GPU_DUMP_TO")
    if not dump:
        raise RuntimeError("compiling for a GPU needs the environment that worker_env makes")
    before = set(Path(dump).iterdir())
    with jax.default_device(topology(target, devices).devices[0]):
        compiled = lower().compile()
    fresh = sorted(set(Path(dump).iterdir()) - before)
    memory: Any = compiled.memory_analysis()
    hlo = compiled.as_text() or ""
    thunks = [p.read_text() for p in fresh if "thunk_sequence" in p.name]
    return Report(
        kernels=_kernels(fresh),
        custom_calls=tuple(sorted(set(re.findall(r'custom_call_target="([^"]+)"', hlo)))),
        temp=memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        hlo=hlo,
        thunks="\n".join(thunks),
    )


def _kernels(files: Sequence[Path]) -> tuple[Kernel, ...]:
    shared: dict[str, int] = {}
    # Numbered apart from the machine code, so matched by the kernel's name alone.
    for path in (p for p in files if p.name.endswith(".resources.txt")):
        name = path.name.removesuffix(".resources.txt").rpartition("_")[0]
        size = _number(r"smem_scratch_bytes\D*(\d+)", path.read_text())
        shared[name] = max(size, shared.get(name, 0))
    found = []
    for ptx in (p for p in files if p.suffix == ".ptx"):
        text = ptx.read_text()
        ptxas = ptx.with_suffix(".ptxas")
        report = ptxas.read_text() if ptxas.exists() else ""
        found.append(
            Kernel(
                name=ptx.stem,
                registers=_number(r"Used (\d+) registers", report),
                spill_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)),
                shared=shared.get(ptx.stem.rpartition("_")[0], -1),
                threads=_number(r"\.(?:req|max)ntid (\d+)", text),
                wgmma="wgmma.mma_async" in text,
                tma="cp.async.bulk.tensor" in text,
            )
        )
    return tuple(found)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        return -1
    return int(match.group(1))


def in_processes(
    module: str, cases: Sequence[dict[str, Any]], *, flags: Sequence[str] = (), timeout: float
) -> Iterator[dict[str, Any]]:
    """Give cases to `python -m module`, which prints one JSON object a case; yields every case
    with its figures or "error".

    A case that aborts the compiler ends the process; it gets an error, and the rest another
    process. Raises RuntimeError when nothing can be compiled here.
    """
    if reason := missing():
        raise RuntimeError(reason)
    todo = list(cases)
    while todo:
        with dump_folder() as folder:
            env = worker_env(folder)
            env["XLA_FLAGS"] = " ".join([env["XLA_FLAGS"], *flags])
            process = subprocess.Popen(
                [sys.executable, "-m", module],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            try:
                out, _ = process.communicate(json.dumps(todo), timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        for case, line in zip(todo, lines, strict=False):
            yield {**case, **line}
        todo = todo[len(lines) :]
        if todo:
            yield {**todo.pop(0), "error": "the compiler process ended or took too long"}


def answer(compile_case: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The other side of `in_processes`: compile the cases of stdin, one line of stdout each."""
    for case in json.load(sys.stdin):
        try:
            line = compile_case(case)
        except Exception as e:  # noqa: BLE001 - one case's error is its result
            line = {"error": f"{type(e).__name__}: {str(e).splitlines()[0][:300]}"}
        print(json.dumps(line), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the plugin has no device to shut down


def dump_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="jaxengine-aot-")
