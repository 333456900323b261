"""Clients that people use, unchanged, against a server whose model says what it is asked to say.
`make test-full` installs them (scripts/install_clients.sh); the openai and anthropic packages of
Python are in every run, in tests/server."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
from testdata import template

HERE = pathlib.Path(__file__).resolve().parent
INSTALLED = pathlib.Path(sys.prefix) / "clients"
FLAGS = [
    *("--chat-template", str(template("qwen3-0.6b.jinja")), "--reasoning-parser", "qwen3"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", "2048"),
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    sys.path.insert(0, str(HERE.parent / "server"))
    from serverlib import running

    with running(*FLAGS, core="scripted_core:Scripted", step=0.01) as up:
        yield up.url


def client(command: list[str], url: str) -> None:
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OTEL_SDK_DISABLED": "true"}
    env = {k: v for k, v in os.environ.items() if "_proxy" not in k.lower()}
    done = subprocess.run(
        [*command, url], env={**env, **quiet}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("script", "module"),
    [
        ("litellm_client.py", "litellm"),
        ("langchain_client.py", "langchain_openai"),
        ("instructor_client.py", "instructor"),
        ("pydantic_ai_client.py", "pydantic_ai"),
    ],
)
def test_a_client_in_python(server: str, script: str, module: str) -> None:
    python = INSTALLED / "bin" / "python"
    if not python.exists() or not list(INSTALLED.glob(f"lib/*/site-packages/{module}")):
        pytest.skip(f"{module} is not installed (scripts/install_clients.sh)")
    client([str(python), str(HERE / script)], server)


@pytest.mark.parametrize(
    ("script", "module"), [("openai_client.mjs", "openai"), ("ai_sdk_client.mjs", "ai")]
)
def test_a_client_in_node(server: str, script: str, module: str, tmp_path: pathlib.Path) -> None:
    modules = INSTALLED / "node_modules"
    if not (modules / module).exists():
        pytest.skip(f"{module} of npm is not installed (scripts/install_clients.sh)")
    for name in (script, "script.mjs"):  # node looks for packages beside the script
        (tmp_path / name).write_text((HERE / name).read_text())
    (tmp_path / "node_modules").symlink_to(modules)
    client(["node", str(tmp_path / script)], server)
