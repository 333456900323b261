"""What the tools hold the source to: style, types, who may import whom, size of files."""

from __future__ import annotations

import pathlib
import subprocess
import sys

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


def test_the_contracts_cover_the_planner() -> None:
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
