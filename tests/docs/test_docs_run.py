"""Every block of the pages that is not marked `not run`, run as a reader would.

Shell blocks of a page run in turn in one folder that looks like a checkout. A block that begins
with `jaxengine serve` or `make serve` starts a server; the blocks below it use it. What differs
from a reader's terminal: ports are free ones, `make` finds its virtual environment ready (and
only prints what `test` and `lint` would do), curl fails on an error status.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from pages import PAGES, ROOT, Block, blocks, scripts, shell_lines
from served import environment, serving

TO_RUN = [b for path in PAGES for b in blocks(path) if b.language == "sh" and not b.not_run]
SCRIPTS = [pair for path in PAGES for pair in scripts(path)]
OWN = ("chat", "complete")  # commands that talk to port 8000 unless told


def serve_words(block: Block) -> list[str] | None:
    """The arguments of a block that starts a server; None for other blocks."""
    words = shlex.split(shell_lines(block.code)[0], comments=True)
    if words[:2] == ["make", "serve"]:
        return []
    return words[2:] if words[:2] == ["jaxengine", "serve"] else None


def pages_with_blocks() -> list[str]:
    return sorted({block.page for block in TO_RUN})


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of commands: ours, from this checkout, and make and curl as described above."""
    folder = tmp_path_factory.mktemp("tools")
    venv = folder / "venv"
    binaries = venv / "bin"
    binaries.mkdir(parents=True)
    python = shlex.quote(sys.executable)
    command = f"exec {python} -m jaxengine.cli.main"
    make, curl = shutil.which("make"), shutil.which("curl")
    texts = {
        folder
        / "jaxengine": f'case "$1" in {"|".join(OWN)}) set -- "$@" --url "$PAGE_URL";; esac\n'
        f'{command} "$@"\n',
        folder / "python": f'exec {python} "$@"\n',
        # nothing may be installed into the environment that runs the tests
        binaries / "python": f'[ "$2" = pip ] && exit 1; exec {python} "$@"\n',
        binaries / "jaxengine": f'{command} "$@"\n',
        folder / "make": 'case "$1" in test*|lint) set -- -n "$@";; esac\n'
        f'exec {make} -o pyproject.toml VENV={venv} EXTRA= "$@"\n',
        folder / "curl": f'exec {curl} -sS --fail-with-body "$@"\n',
    }
    for path, text in texts.items():
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)
    for stamp in ("venv", "install", "demo", "dev"):
        (venv / f".{stamp}-stamp").touch()
    return folder


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """Links to all of this checkout, but a docs folder that commands may write to."""
    for path in ROOT.iterdir():
        if path.name not in ("docs", ".git", ".venv"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(5000)
@pytest.mark.parametrize("page", pages_with_blocks())
def test_shell_blocks_run(page: str, tools: pathlib.Path, checkout: pathlib.Path) -> None:
    with contextlib.ExitStack() as up:
        url = "http://127.0.0.1:9"  # nobody
        for block in [block for block in TO_RUN if block.page == page]:
            words = serve_words(block)
            if words is not None:
                assert len(shell_lines(block.code)) == 1, "a server's block has no other command"
                up.close()
                url = up.enter_context(serving(without_port(words), checkout))
                continue
            run_block(block, url, tools, checkout)


def without_port(words: list[str]) -> list[str]:
    if "--port" not in words:
        return words
    at = words.index("--port")
    return words[:at] + words[at + 2 :]


def run_block(block: Block, url: str, tools: pathlib.Path, folder: pathlib.Path) -> None:
    code = re.sub(r"http://(127\.0\.0\.1|localhost):8000", url, block.code)
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", code],
        cwd=folder,
        env=environment(PATH=f"{tools}:{os.environ['PATH']}", PAGE_URL=url),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    said = (done.stdout + done.stderr)[-3000:]
    assert done.returncode == 0, f"{block.page}:{block.line} ended with {done.returncode}:\n{said}"
    assert done.stdout.strip(), f"{block.page}:{block.line} printed nothing"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("block", "code"), SCRIPTS, ids=[f"{block.page}:{block.line}" for block, _ in SCRIPTS]
)
def test_python_blocks_run(block: Block, code: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
