"""Executes notebooks in kernels of their own and looks at what came out.

    python tests/notebooks/run_notebook.py [NAME ...]

executes those whose file name begins so (all without a name) and saves them with their outputs.
"""

from __future__ import annotations

import base64
import io
import os
import pathlib
import re
import sys
import tempfile
import time
from typing import Any

import matplotlib.image
import nbformat
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
_SECONDS = 900  # of one cell, with an empty compilation cache on a busy machine


def read(path: pathlib.Path) -> Any:
    return nbformat.read(path, as_version=4)


def environment() -> dict[str, str]:
    """Of a kernel: it imports this checkout, wherever the package was installed from."""
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), before]))}


def execute(path: pathlib.Path, folder: pathlib.Path) -> Any:
    """The notebook with its outputs; its cells ran in `folder`. Raises CellExecutionError."""
    notebook = read(path)
    client = NotebookClient(
        notebook,
        timeout=_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
    )
    return client.execute(env=environment())


def outputs(notebook: Any) -> list[Any]:
    return [out for cell in notebook.cells for out in cell.get("outputs", [])]


def texts(notebook: Any) -> list[str]:
    """Everything readable that the cells put out, logs left out."""
    found = []
    for out in (out for out in outputs(notebook) if out.get("name") != "stderr"):
        data = out.get("data", {})
        found += [
            out.get("text", ""),
            *(data.get(kind, "") for kind in ("text/plain", "text/html")),
        ]
    return [text for text in found if text]


def figures(notebook: Any) -> list[Any]:
    """Pictures of all cells, as arrays [height, width, channels]."""
    encoded = (out.get("data", {}).get("image/png") for out in outputs(notebook))
    return [matplotlib.image.imread(io.BytesIO(base64.b64decode(png))) for png in encoded if png]


def problems(notebook: Any) -> list[str]:
    """What a reader would miss, or should not see: no picture, an empty one, a path of the
    machine."""
    pictures = figures(notebook)
    found = [] if pictures else ["there is no figure"]
    for number, picture in enumerate(pictures, 1):
        # Axes and labels are black: what was drawn has colour.
        colour = picture[..., :3].max(-1) - picture[..., :3].min(-1)
        if float((colour > 0.1).mean()) < 0.001:
            found.append(f"figure {number} is empty")
    name = os.uname().nodename
    for text in texts(notebook):
        path = re.search(r"(?<![\w.])/(home|root|tmp|usr|Users|work)/\S*", text)
        if path:
            found.append(f"an output names the path {path[0]}")
        if len(name) > 3 and name in text:
            found.append("an output names this machine")
    return found


def save(path: pathlib.Path, notebook: Any) -> None:
    """With outputs, but without progress bars, logs and what the kernel says of itself."""
    for cell in notebook.cells:
        cell.metadata = {}
        if "outputs" in cell:
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def main(names: list[str]) -> int:
    failed = 0
    for path in PATHS:
        if names and not path.name.startswith(tuple(names)):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, pathlib.Path(folder))
        found = problems(notebook)
        save(path, notebook)
        print(f"{path.name}: {time.monotonic() - began:.0f} s {'; '.join(found)}", flush=True)
        failed += bool(found)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
