"""What a start must not wait for: modules that it does not use, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import pytest

from jaxengine.front.ranks.spawning import without_main


@pytest.mark.parametrize(
    "module,unused",
    [
        ("jaxengine.executor.build", ["jax.experimental.mosaic.gpu", "flax", "optax", "orbax"]),
        ("jaxengine.engine.process", ["jax", "cyclopts", "fastapi"]),
        ("jaxengine.server.run", ["jax", "fastapi", "pydantic"]),
        ("jaxengine.cli.main", ["jax", "fastapi", "huggingface_hub"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_module_imports_only_what_it_uses(module: str, unused: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {unused} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_kernel_brings_mosaic() -> None:
    code = (
        "import sys; from jaxengine.pallas_kernels import _mgpu; assert _mgpu.kernel;"
        "assert _mgpu.ROWS != _mgpu.COLUMNS; print('jax.experimental.mosaic.gpu' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


def test_a_spawned_process_leaves_the_main_module_alone() -> None:
    main = sys.modules["__main__"]
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    process = multiprocessing.get_context("spawn").Process(target=queue.put, args=("well",))
    with without_main():
        assert not hasattr(sys.modules["__main__"], "__file__")
        process.start()
    assert sys.modules["__main__"] is main
    process.join(60)
    assert process.exitcode == 0 and queue.get() == "well"
