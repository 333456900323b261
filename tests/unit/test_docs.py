"""The pages say what the code does: the worked example, names of files, commands."""

from __future__ import annotations

import ast
import importlib
import pathlib
import re
import shlex
from collections import deque

import numpy as np
import pytest
from cyclopts import CycloptsError

import jaxengine
from jaxengine.bench.flags import engine_settings
from jaxengine.cli import main as cli
from jaxengine.cli.bench import BENCHES
from jaxengine.cli.options import split_argv
from jaxengine.runner.buckets import all_buckets, row_buckets
from jaxengine.sched.config import PlannerConfig
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIRST_TOKEN = {"A": 100, "B": 200}


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def fenced(text: str, languages: tuple[str, ...]) -> list[str]:
    """Bodies of the code blocks in these languages ("" is a block without one)."""
    blocks = re.findall(r"^```([a-z]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [body for language, body in blocks if language in languages]


def inline(text: str) -> list[str]:
    """What stands in single backticks, outside of code blocks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


# -- the worked example of docs/scheduling.md -------------------------------------------------


def fake_device(plan: StepPlan) -> StepResult:
    """Request A samples 100, 101, ... and B 200, 201, ..., by position."""
    ids = [
        FIRST_TOKEN[request.request_id] + int(start + n) - request.num_prompt_tokens
        if samples
        else -1
        for request, start, n, samples in zip(
            plan.requests, plan.start, plan.num_new, plan.samples, strict=True
        )
    ]
    return StepResult(np.array(ids, np.int32)[:, None], plan.samples.astype(np.int32))


def feeds(plan: StepPlan | None) -> str:
    """Position and number of tokens of every row; * marks a row that samples."""
    if plan is None:
        return "nothing"
    rows = zip(plan.requests, plan.start, plan.num_new, plan.samples, strict=True)
    parts = [
        f"{r.request_id}: {start}+{n}{'*' if samples else ''}" for r, start, n, samples in rows
    ]
    return ", ".join(parts + [f"{request.request_id} preempted" for request in plan.preempted])


def worked_example() -> list[str]:
    """Two requests at pipeline depth 2 in a pool of four blocks, as lines of a table."""
    scheduler = Scheduler(
        PlannerConfig(
            max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32, block_size=4, num_blocks=4
        )
    )
    a = Request("A", range(1, 7), max_tokens=4)
    b = Request("B", range(21, 26), max_tokens=4)
    lines: list[str] = []

    def write(call: str, what: str) -> None:
        scheduler.check_integrity()
        cells = [call, what]
        for request in (a, b):
            status = request.status.name.removeprefix("FINISHED_").lower()
            cells += [
                f"{status}, {request.num_tokens}",
                str(request.num_computed_tokens),
                str(request.num_in_flight_tokens),
                str(request.num_output_placeholders),
            ]
        cells.append(str(b.num_stale_output_tokens))
        cells.append(str(scheduler.state.kv.pool.num_free))
        lines.append("| " + " | ".join(cells) + " |")

    scheduler.add(a)
    scheduler.add(b)
    write("add A, B", "")
    in_flight: deque[tuple[StepPlan, StepResult]] = deque()
    for _ in range(30):
        if not scheduler.has_work() and not in_flight:
            return lines
        plan = None
        if len(in_flight) < 2 and scheduler.has_work():
            plan = scheduler.schedule()
            write(f"schedule {plan.step_id}" if plan else "schedule", feeds(plan))
            if plan is not None:
                in_flight.append((plan, fake_device(plan)))
        if in_flight and not (plan and len(in_flight) < 2):
            plan, result = in_flight.popleft()
            updates = list(scheduler.update(plan, result))
            news = [f"{u.request.request_id}: {u.new_token_ids[0]}" for u in updates]
            write(f"update {plan.step_id}", ", ".join(news))
    raise AssertionError("the example does not end")


def test_worked_example_of_scheduling_page() -> None:
    lines = page("docs/scheduling.md").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| add A, B |"))
    expected = worked_example()
    assert lines[first : first + len(expected)] == expected
    assert not lines[first + len(expected)].startswith("|")


# -- names and figures of docs/architecture.md ------------------------------------------------


def find(name: str) -> bool:
    """Is there such a file, or folder with files, under the root or under jaxengine/?"""
    paths = [base / name for base in (ROOT, ROOT / "jaxengine")]
    return any(path.is_file() or any(p.is_file() for p in path.rglob("*")) for path in paths)


@pytest.mark.parametrize("name", ["docs/architecture.md", "docs/scheduling.md", "README.md"])
def test_named_files_exist(name: str) -> None:
    looks_like_a_file = re.compile(r"\.?[\w-]+(/[\w.-]+)*(\.(py|md|toml|sh|mk|yml)|/)")
    named = [
        word
        for code in inline(page(name))
        for word in code.split()
        if looks_like_a_file.fullmatch(word)
    ]
    assert len(named) >= 3
    assert [word for word in named if not find(word)] == []


def test_every_room_is_named() -> None:
    text = page("docs/architecture.md")
    rooms = {path.parent.name for path in (ROOT / "jaxengine").glob("*/__init__.py")} | {"sched"}
    assert "engine" in rooms
    assert [room for room in sorted(rooms) if f"`{room}/`" not in text] == []


def test_links_lead_somewhere() -> None:
    links = [
        (path, link)
        for path in PAGES
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
        if "://" not in link
    ]
    assert links
    broken = [(path.name, link) for path, link in links if not (path.parent / link).exists()]
    assert broken == []


def test_executor_contract() -> None:
    """The page's row of the protocol names every method of it."""
    tree = ast.parse(page("jaxengine/executor/base.py"))
    (protocol,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Executor")
    methods = [n.name for n in protocol.body if isinstance(n, ast.FunctionDef)]
    assert "submit" in methods
    row = next(x for x in page("docs/architecture.md").splitlines() if x.startswith("| `Executor`"))
    assert [name for name in methods if f"`{name}" not in row] == []


def test_program_counts() -> None:
    """Of the defaults on CPU: 64 sequences, 1,024 tokens."""
    forward = len(all_buckets(64, 1024))
    samplers = len(row_buckets(64))
    text = page("docs/architecture.md")
    assert f"{forward} forward buckets and {samplers} sampler sizes" in text
    assert f"{forward + samplers} programs" in text


# -- commands ---------------------------------------------------------------------------------


def commands(text: str, program: str) -> list[list[str]]:
    """Calls of `program`, as words, in shell blocks and alone in backticks."""
    blocks = fenced(text, ("", "sh", "bash", "console", "shell"))
    lines = [line for body in blocks for line in body.replace("\\\n", " ").splitlines()]
    calls = []
    for line in [*lines, *inline(text)]:
        bare = re.sub(r"^\s*(\$ )?([A-Z_]+=\S+ )*", "", line)
        for part in re.split(r"[|;&>]+", bare):
            if part.split()[:1] == [program]:
                calls.append(shlex.split(part, comments=True)[1:])
    return calls


def check_bench(words: list[str]) -> None:
    """The bench exists, and so do its flags."""
    if not words or words[0].startswith("-"):
        return
    name, *rest = words
    assert name in BENCHES, f"there is no bench {name}"
    if not rest:  # a name in a sentence, not a call
        return
    parser = importlib.import_module(f"jaxengine.bench.{name}").parser()
    parser.print_help = parser.print_usage = lambda *_: None
    try:
        _, unknown = parser.parse_known_args([word for word in rest if word != "--help"])
        engine_settings(unknown if parser.epilog else [])
    except (SystemExit, ValueError) as error:
        raise AssertionError(f"bench {shlex.join(words)}: {error}") from None
    assert parser.epilog or not unknown, f"bench {name} has no flag {unknown[0]}"


def check_command(words: list[str]) -> None:
    """Parses with the command line, without running it."""
    if words[:1] == ["bench"]:
        check_bench(words[1:])
        return
    while "--config" in words:  # its file is the reader's
        at = words.index("--config")
        words = words[:at] + words[at + 2 :]
    words, _ = split_argv(words)
    try:
        _, bound, unused = cli.app.parse_args(words, exit_on_error=False, print_error=False)[:3]
    except CycloptsError as error:
        raise AssertionError(f"jaxengine {shlex.join(words)}: {error}") from None
    assert not unused and bound is not None


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_parse(path: pathlib.Path) -> None:
    calls = commands(path.read_text(encoding="utf-8"), "jaxengine")
    if path.name == "README.md":
        assert ["serve"] in calls and ["chat"] in calls
    for words in calls:
        check_command(words)


@pytest.mark.parametrize(
    "words",
    [["serve", "--no-such-flag"], ["convert", "x"], ["bench", "x"], ["bench", "sched", "--x"]],
)
def test_wrong_commands_are_noticed(words: list[str]) -> None:
    with pytest.raises(AssertionError):
        check_command(words)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", page("Makefile"), re.MULTILINE))
    named = {
        words[0]
        for path in PAGES
        for words in commands(path.read_text(encoding="utf-8"), "make")
        if words
    }
    assert {"demo", "test"} <= named <= targets


def test_readme_opens_with_the_two_commands() -> None:
    first = commands("```\n" + fenced(page("README.md"), ("",))[0] + "```", "make")
    assert first == [["demo"], ["test"]]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_blocks_compile_and_import(path: pathlib.Path) -> None:
    for body in fenced(path.read_text(encoding="utf-8"), ("python",)):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and node.module == "jaxengine":
                assert {alias.name for alias in node.names} <= set(jaxengine.__all__)


if __name__ == "__main__":
    print("\n".join(worked_example()))
