"""Every block and every command of the pages parses: shell, Python, JSON, YAML, our own flags."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import json
import pathlib
import re
import shlex
import subprocess

import pytest
import yaml
from cyclopts import CycloptsError
from pages import LANGUAGES, PAGES, ROOT, SHELL, Block, blocks, name_of, names_in, read, shell_lines

import jaxengine
from jaxengine.cli import main as cli
from jaxengine.cli.bench import BENCHES
from jaxengine.lab.bench.flags import engine_settings
from jaxengine.settings.flags import split_argv

ALL = [block for path in PAGES for block in blocks(path)]


def where(block: Block) -> str:
    return f"{block.page}:{block.line}"


# -- calls of our command line -----------------------------------------------------------------


@functools.cache
def problem_of(words: tuple[str, ...]) -> str:
    """Why `jaxengine WORDS` does not parse; "" when it does. Nothing is run."""
    if words in {("run-batch",), *(("bench", name) for name in BENCHES)}:
        return ""  # named only
    if words[:1] == ("bench",):
        return bench_problem(list(words[1:]))
    rest = list(words)
    while "--config" in rest:  # its file is the reader's
        at = rest.index("--config")
        del rest[at : at + 2]
    cli.app.config = ()  # of a test before
    try:
        rest, _ = split_argv(rest)
        _, bound, unused = cli.app.parse_args(rest, exit_on_error=False, print_error=False)[:3]
    except (CycloptsError, ValueError) as error:
        return f"jaxengine {shlex.join(words)}: {error}"
    return "" if bound is not None and not unused else f"left over: {unused}"


def bench_problem(words: list[str]) -> str:
    if not words or words[0] == "--help":
        return ""
    name, *rest = words
    if name not in BENCHES:
        return f"there is no bench {name}"
    parser = importlib.import_module(f"jaxengine.lab.bench.{name}").parser()
    parser.print_usage = lambda *_: None
    try:
        _, unknown = parser.parse_known_args([word for word in rest if word != "--help"])
        engine_settings(unknown if parser.epilog else [])
    except (SystemExit, ValueError) as error:
        return f"bench {shlex.join(words)}: {error}"
    return f"bench {name} has no flag {unknown[0]}" if unknown and not parser.epilog else ""


def calls(text: str, program: str) -> list[list[str]]:
    """Calls of a program in lines of shell, as words."""
    found = []
    for line in shell_lines(text):
        bare = re.sub(r"^\s*(\$ )?([A-Z_]+=\S+ )*", "", line)
        for part in split_commands(bare):
            if part and part[0].removeprefix(".venv/bin/") == program:
                found.append(part[1:])
    return found


def split_commands(line: str) -> list[list[str]]:
    """A line's commands, cut at ; | & and their doubles; redirections are left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";|&()"):
            parts.append([])
        else:
            parts[-1].append(word)
    return [part[: part.index(">")] if ">" in part else part for part in parts]


def inline(path: pathlib.Path) -> list[str]:
    """What stands in single backticks, outside of code blocks."""
    prose = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def page_calls(path: pathlib.Path, program: str) -> list[list[str]]:
    found = [words for b in blocks(path) if b.language in SHELL for words in calls(b.code, program)]
    for code in inline(path):
        if code.split()[:1] == [program]:
            found += calls(code.replace(r"\|", "|"), program)
    return found


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_parse(path: pathlib.Path) -> None:
    found = page_calls(path, "jaxengine")
    problems = [problem_of(tuple(words)) for words in found if "..." not in words]
    assert [problem for problem in problems if problem] == []
    if path == ROOT / "README.md":
        assert ["serve"] in found and ["chat"] in found


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--no-such-flag"),
        ("convert", "x"),
        ("bench", "x"),
        ("bench", "sched", "--no-such"),
        ("serve", "m", "--enable-lora"),
    ],
)
def test_wrong_commands_are_noticed(words: tuple[str, ...]) -> None:
    assert problem_of(words)


def test_commands_are_found() -> None:
    text = "A=1 jaxengine serve m \\\n  --port 1 & # c\ncurl x | jaxengine chat -q 'a; b' > out\n"
    assert calls(text, "jaxengine") == [["serve", "m", "--port", "1"], ["chat", "-q", "a; b"]]
    assert calls(text, "curl") == [["x"]]


# -- other programs ----------------------------------------------------------------------------


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    named = {w for path in PAGES for words in page_calls(path, "make") for w in words}
    assert {"demo", "test"} <= {word for word in named if "=" not in word} <= targets


def test_readme_opens_with_the_two_commands() -> None:
    assert calls(blocks(ROOT / "README.md")[0].code, "make") == [["demo"], ["test"]]


def test_python_and_sh_are_given_files_that_exist() -> None:
    seen = 0
    for program in ("python", "sh"):
        for path in PAGES:
            for words in page_calls(path, program):
                if words[:1] == ["-m"]:
                    assert words[1] in ("venv", "pip", "build", "pytest") or (
                        importlib.util.find_spec(words[1]) is not None
                    ), words
                elif words and not words[0].startswith("-"):
                    assert (ROOT / words[0]).is_file(), words
                else:
                    continue
                seen += 1
    assert seen >= 3


# -- blocks ------------------------------------------------------------------------------------


def test_blocks_name_their_language() -> None:
    assert len(ALL) > 30
    assert [where(b) for b in ALL if b.language not in LANGUAGES] == []
    for path in PAGES:
        text = path.read_text("utf-8")
        assert text.count("\n```") == 2 * len(blocks(path)), f"{name_of(path)}: an odd fence"
        hidden = re.findall(r"^ {4}(?:jaxengine|make|python|curl|pip) .*", text, re.MULTILINE)
        assert hidden == [], f"{name_of(path)}: a command in an indented block"


def test_reasons_are_given() -> None:
    reasons = [block.not_run for block in ALL if block.not_run]
    assert reasons and all(len(reason) > 8 for reason in reasons)
    shell = [block for block in ALL if block.language in (*SHELL, "python")]
    run = [block for block in shell if not block.not_run]
    assert len(run) >= 0.4 * len(shell), "too few blocks are run by test_docs_run.py"


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "sh"], ids=where)
def test_shell_is_shell(block: Block) -> None:
    code = re.sub(r"<[a-z ]+>", "placeholder", block.code)
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "python"], ids=where)
def test_python_imports_what_there_is(block: Block) -> None:
    assert names_in(block.code) <= set(jaxengine.__all__)
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxengine."):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


def test_data_blocks_are_data() -> None:
    kinds = {"json": json.loads, "yaml": yaml.safe_load}
    found = [kinds[block.language](block.code) for block in ALL if block.language in kinds]
    assert found and all(found)
