"""What is in the notebooks' files, without running them."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from run_notebook import FOLDER, PATHS, ROOT, outputs, problems, read

LIMIT = 2 * 2**20  # bytes of the whole folder, pictures included
SAVED = [path for path in PATHS if outputs(read(path))]  # with what they put out


def trees(notebook: Any) -> Iterator[ast.AST]:
    """Of all code cells; they may await."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            yield compile(cell.source, "<cell>", "exec", flags=flags)  # type: ignore[misc]


def imports(notebook: Any) -> set[tuple[str, str]]:
    """(module, name) of everything that comes from the package; name "" for a whole module."""
    found = set()
    for node in (node for tree in trees(notebook) for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxengine"):
            found |= {(str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(a.name, "") for a in node.names if a.name.startswith("jaxengine")}
    return found


def exists(module: str, name: str) -> bool:
    loaded = importlib.import_module(module)
    if not name or hasattr(loaded, name):
        return True
    return hasattr(loaded, "__path__") and bool(importlib.util.find_spec(f"{module}.{name}"))


def test_there_are_seven() -> None:
    assert [path.name[:2] for path in PATHS] == [f"0{number}" for number in range(1, 8)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_valid_and_its_names_exist(path: pathlib.Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert [cell for cell in notebook.cells if not cell.source.strip()] == []
    found = imports(notebook)
    assert found
    assert [pair for pair in sorted(found) if not exists(*pair)] == []


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.stem)
def test_saved_with_its_pictures(path: pathlib.Path) -> None:
    notebook = read(path)
    counts = [c.execution_count for c in notebook.cells if c.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "save it with run_notebook.py"
    assert [out for out in outputs(notebook) if out.output_type == "error"] == []
    assert problems(notebook) == []


def test_the_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < LIMIT


def test_the_page_names_every_notebook() -> None:
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert [path.name for path in PATHS if f"../notebooks/{path.name}" not in page] == []


def test_a_missing_and_an_empty_picture_are_noticed() -> None:
    """`problems` finds what it is for."""
    empty = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
    assert problems(empty) == ["there is no figure"]
    empty.cells[0].outputs = [picture(drawn=False), picture(drawn=True)]
    assert problems(empty) == ["figure 1 is empty"]
    path = nbformat.v4.new_output("stream", name="stdout", text="saved in /home/me/draft")
    empty.cells[0].outputs = [picture(drawn=True), path]
    assert problems(empty) == ["an output names the path /home/me/draft"]


def test_a_wrong_name_is_noticed() -> None:
    cell = nbformat.v4.new_code_cell("from jaxengine.config import EngineConfig, NoSuchName")
    (first, second) = sorted(imports(nbformat.v4.new_notebook(cells=[cell])))
    assert exists(*first) and not exists(*second)


def picture(drawn: bool) -> Any:
    """An output cell with a figure."""
    import base64
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 2))
    axes = figure.subplots()
    if drawn:
        axes.bar([1, 2], [3, 4])
    stream = io.BytesIO()
    figure.savefig(stream, dpi=72)
    data = {"image/png": base64.b64encode(stream.getvalue()).decode()}
    return nbformat.v4.new_output("display_data", data=data)
