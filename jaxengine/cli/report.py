"""`jaxengine doctor --report`: one block of Markdown for a bug report, without secrets."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from jaxengine import platform
from jaxengine.cli.doctor import run_doctor
from jaxengine.engine.crash_note import crash_file

_PREFIXES = (
    "JAX", "XLA", "CUDA", "NVIDIA", "NCCL", "TF_", "HF_", "LD_", "OMP_", "OPENBLAS_", "MALLOC_",
    "PYTHON", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|AUTH|CREDENTIAL", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(://)[^/@\s]+@")
_LONGEST_CRASH = 4000  # characters


def run_report() -> int:
    """Print the report; 1 when the doctor found a problem."""
    said = io.StringIO()
    before = dict(os.environ)  # the doctor's platform set-up adds to it
    with contextlib.redirect_stdout(said):
        code = run_doctor()
    sections = {
        "doctor": said.getvalue(),
        "machine": _machine(),
        "environment": "\n".join(environment_lines(before)) or "nothing that matters is set",
        "compilation cache": _cache(),
        "last crash": _crash(),
    }
    print("### jaxengine report\n")
    for title, text in sections.items():
        print(f"**{title}**\n\n```text\n{text.strip()}\n```\n")
    print(
        "Please add the command you ran, and the last lines of its standard error "
        "(`--log-level debug` says more)."
    )
    return code


def environment_lines(variables: dict[str, str]) -> list[str]:
    """`NAME=value` of the variables that change how the engine runs. Values of names that sound
    like secrets are masked, and so are user names and passwords in addresses."""
    lines = []
    for name, value in sorted(variables.items()):
        if not name.upper().startswith(_PREFIXES):
            continue
        hidden = "****" if _SECRET.search(name) else _USER_IN_URL.sub(r"\1****@", value)
        lines.append(f"{name}={hidden}")
    return lines


def _machine() -> str:
    import psutil

    memory = psutil.virtual_memory()
    lines = [
        f"memory: {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free",
        f"load: {', '.join(f'{x:.1f}' for x in os.getloadavg())} on {os.cpu_count()} cores",
        f"shared memory: {_free('/dev/shm')}",
        f"python: {sys.version.split()[0]} ({sys.implementation.name}), {_environment_kind()}",
    ]
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        lines += _driver(tool)
    return "\n".join(lines)


def _environment_kind() -> str:
    return "virtual environment" if sys.prefix != sys.base_prefix else "system environment"


def _driver(tool: str) -> list[str]:
    ask = [tool, "--query-gpu=name,driver_version,memory.total,compute_cap", "--format=csv"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi: {error}"]
    return done.stdout.strip().splitlines()


def _free(folder: str | Path) -> str:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return str(error.strerror)
    return f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"


def _cache() -> str:
    folder = platform.cache_dir(None)
    assert folder is not None  # only a setting switches it off
    if not folder.exists():
        return "not made yet"
    files = [entry for entry in os.scandir(folder) if entry.is_file()]
    size = sum(entry.stat().st_size for entry in files)
    programs = sum(entry.name.endswith("-cache") for entry in files)
    return (
        f"{programs} programs, {size / 2**20:.0f} MiB, disk {_free(folder)}, "
        f"{'writable' if os.access(folder, os.W_OK) else 'NOT writable'}"
    )


def _crash() -> str:
    path = crash_file()
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        age = time.time() - path.stat().st_mtime
    except OSError:
        return "none recorded"
    return f"{age / 3600:.1f} hours ago\n{text[-_LONGEST_CRASH:]}"
