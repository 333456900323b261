"""What the tools hold the source to: style, types, who may import whom, size of files."""

from __future__ import annotations

import ast
import glob
import graphlib
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(sys.executable).parent

CHECKS = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "--line-length", "100", "."],
    "mypy": ["mypy"],
    "import contracts": ["lint-imports"],
}


# CI runs mypy by `make lint`: over a minute without its cache.
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=name, marks=[pytest.mark.slow] if name == "mypy" else [])
        for name, command in CHECKS.items()
    ],
)
def test_tool_finds_nothing(command: list[str]) -> None:
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


SETTINGS = {"config": "settings", "validation": "sampling_params"}  # files that are of a room


def room(module: str) -> str:
    first = module.split(".")[1]
    return SETTINGS.get(first, first)


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules of jaxengine that a file imports when it runs, inside its functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxengine"):
            if node.module == "jaxengine":
                yield from (f"jaxengine.{name.name}" for name in node.names)
            else:
                yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (n.name for n in node.names if n.name.startswith("jaxengine."))
        yield from imported(node)


def test_no_rooms_import_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name in glob.iglob("jaxengine/**/*.py", root_dir=ROOT, recursive=True):
        path = ROOT / name
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module == "jaxengine.__init__":
            continue  # the face of the package names what it shows
        below = {room(found) for found in imported(ast.parse(path.read_text()))}
        graph.setdefault(room(module), set()).update(below - {room(module), "__version__"})
    assert len(graph) > 20
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the rooms


# Packages that are imported by another name; those that come with another; those that are used
# without an import (uvicorn's parser and the tool of the serving loop).
NAMES = {"pyyaml": "yaml", "pyzmq": "zmq", "huggingface-hub": "huggingface_hub"}
NAMES |= {"prometheus-client": "prometheus_client", "orbax-checkpoint": "orbax"}
COME_ALONG = {"ml_dtypes", "starlette", "jaxlib"}
BY_UVICORN = {"httptools"}


def named(requirements: list[str]) -> set[str]:
    names = {re.split(r"[\[<>=]", each, maxsplit=1)[0] for each in requirements}
    return {NAMES.get(name, name) for name in names}


def test_pyproject_names_what_is_imported() -> None:
    """Serving imports each base dependency, and nothing that is not one; the lab has extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: named(each) for name, each in project["optional-dependencies"].items()}
    serving: set[str] = set()
    lab: set[str] = set()
    for path in glob.iglob("jaxengine/**/*.py", root_dir=ROOT, recursive=True):
        found = lab if path.startswith("jaxengine/lab/") else serving
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    own = set(sys.stdlib_module_names) | {"jaxengine", "__future__"} | COME_ALONG
    base = named(project["dependencies"])
    optional = {"obstore", "opentelemetry"}  # `obj` and `otel`
    assert serving - own == (base - BY_UVICORN) | optional
    assert lab - own - base == (extras["bench"] | extras["train"])


def test_the_contracts_cover_the_scheduler() -> None:
    """A contract over modules that import-linter does not see would hold whatever they import."""
    done = subprocess.run(
        [str(BIN / "lint-imports"), "--verbose"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "does not exist" not in done.stdout + done.stderr
    assert "Contracts: 4 kept" in done.stdout, done.stdout[-2000:]
