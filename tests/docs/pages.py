"""The pages as the tests see them: code blocks with the marks above them, tables, commands.

A mark is an HTML comment on the line above a block:
`<!-- not run: REASON -->`   its commands are parsed, the block itself is not run;
`<!-- continues -->`         a python block that goes on where the one before it ended.
"""

from __future__ import annotations

import ast
import pathlib
import re
import shlex
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = ("sh", "console")
LANGUAGES = (*SHELL, "python", "json", "yaml", "text", "mermaid")
_BLOCK = re.compile(r"^((?:<!--[^\n]*-->\n)*)```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is that of its first line of code, from 1."""

    page: str
    line: int
    language: str
    code: str
    not_run: str | None
    continues: bool


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(path: pathlib.Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        marks, language, code = match.groups()
        reason = re.search(r"<!-- not run: (.+?) -->", marks)
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(
            Block(
                name_of(path),
                line,
                language,
                code,
                reason.group(1) if reason else None,
                "<!-- continues -->" in marks,
            )
        )
    return found


def scripts(path: pathlib.Path) -> list[tuple[Block, str]]:
    """The python blocks to run: the first block of each chain, and the code of the whole chain."""
    chains: list[tuple[Block, str]] = []
    for block in blocks(path):
        if block.language != "python" or block.not_run:
            continue
        if block.continues:
            first, code = chains.pop()
            chains.append((first, code + "\n" + block.code))
        else:
            chains.append((block, block.code))
    return chains


def shell_lines(code: str) -> list[str]:
    """The commands of a shell block, each on one line, without comments alone on a line."""
    whole = code.replace("\\\n", " ")
    lines: list[str] = []
    for line in whole.splitlines():
        if lines and _open_quote(lines[-1]):
            lines[-1] += "\n" + line
        elif line.strip() and not line.strip().startswith("#"):
            lines.append(line)
    return lines


def _open_quote(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def tables(text: str) -> list[list[list[str]]]:
    """Every table of a page: rows of cells, without head and rule. `\\|` is a bar in a cell."""
    found = []
    for table in re.findall(r"(?:^\|.*\|\n?)+", text, re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", row)[1:-1] for row in table.strip().splitlines()]
        found.append([[cell.strip().replace(r"\|", "|") for cell in row] for row in rows[2:]])
    return found


def section(text: str, title: str) -> str:
    """The part of a page below a `## title`, up to the next."""
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def names_in(code: str) -> set[str]:
    """Names that a piece of Python imports from jaxengine itself."""
    return {
        alias.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and node.module == "jaxengine"
        for alias in node.names
    }
