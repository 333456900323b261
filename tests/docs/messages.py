"""Every text in the sources but docstrings, with `...` for what is filled in when it is printed."""

from __future__ import annotations

import ast
import functools
import re

from pages import ROOT

FOLDERS = ("jaxengine", "sched", "offload", "pallas_kernels")


@functools.cache
def texts() -> frozenset[str]:
    found: set[str] = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            nodes = list(ast.walk(tree))
            apart: set[int] = set()  # parts of longer texts, and docstrings
            for node in nodes:
                if isinstance(node, ast.JoinedStr):
                    apart |= {id(value) for value in node.values}
                    found.add("".join(_piece(value) for value in node.values))
                elif isinstance(node, ast.Expr):
                    apart.add(id(node.value))
            for node in nodes:
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    if id(node) not in apart:
                        found.add(_plain(node.value))
    return frozenset(found)


def _piece(value: ast.expr) -> str:
    return _plain(str(value.value)) if isinstance(value, ast.Constant) else "..."


def _plain(text: str) -> str:
    return re.sub(r"%[-0-9.]*[sdfr]", "...", text)


def printed(message: str) -> bool:
    """Is this part of a text of the sources?"""
    return any(message in text for text in texts())
