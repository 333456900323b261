"""The notebooks run from top to bottom, without an error and with pictures (make notebooks)."""

from __future__ import annotations

import pathlib

import pytest
from run_notebook import PATHS, execute, problems


@pytest.mark.notebook
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook_runs(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert problems(execute(path, tmp_path)) == []
