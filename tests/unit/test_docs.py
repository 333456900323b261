"""The pages say what the code does: the worked example, names of files, figures.

Their commands are tried in tests/docs/.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections import deque

import numpy as np
import pytest

from jaxengine.sched.buckets import all_buckets, row_buckets
from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIRST_TOKEN = {"A": 100, "B": 200}


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def inline(text: str) -> list[str]:
    """What stands in single backticks, outside of code blocks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


# -- which kernels the engine reaches ---------------------------------------------------------

ENGINE_ROOMS = ("layers", "models", "parallel", "runner", "sampling", "speculate", "engine")


def test_the_kernels_that_the_engine_uses_are_named() -> None:
    """Of docs/kernels.md's table, by what the engine's rooms import."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", page("docs/kernels.md"), re.MULTILINE)
    folders = {p.parent.name for p in (ROOT / "pallas_kernels").glob("*/mosaic.py")}
    assert {name for name, _ in rows} == folders
    files = [p for room in ENGINE_ROOMS for p in (ROOT / "jaxengine" / room).rglob("*.py")]
    files += (ROOT / "offload").rglob("*.py")
    source = "\n".join(p.read_text(encoding="utf-8") for p in files)
    for name, used in rows:
        imported = f"pallas_kernels.{name}" in source
        assert imported == (used != "no"), f"{name}: {used}"
    # the write's kernel is not: its call asks for the scatter
    writes = re.findall(r"write_kv\([^)]*\)", source)
    assert writes and all('backend="xla"' in call for call in writes)
    assert dict(rows)["kv_write"] == "the scatter only"


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
        SchedulerSizes(
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
    tree = ast.parse(page("jaxengine/sched/executor.py"))
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


if __name__ == "__main__":
    print("\n".join(worked_example()))


# -- how much there is to read ----------------------------------------------------------------


def test_the_loop_is_as_short_as_the_page_says() -> None:
    text = page("docs/architecture.md")
    found = re.search(r"To read the loop is to read(.+?): at most ([\d,]+) lines", text, re.DOTALL)
    assert found is not None
    files = re.findall(r"`([\w/]+\.py)`", found[1])
    assert len(files) >= 6 and "engine/pipeline.py" in files
    lines = sum(len((ROOT / "jaxengine" / name).read_text().splitlines()) for name in files)
    assert lines <= int(found[2].replace(",", "")) <= 2000, lines


# Each an idea of its own, and short because the idea is.
SHORT = {
    "engine/fault/outbox.py",
    "engine/fault/silence.py",
    "engine/crash_note.py",
    "server/page.py",
    "server/run.py",
    "server/memory.py",
}


def test_no_file_is_split_off_only_to_be_short() -> None:
    for room in ("engine", "front", "server"):
        for path in (ROOT / "jaxengine" / room).rglob("*.py"):
            name = path.relative_to(ROOT / "jaxengine").as_posix()
            count = len(path.read_text().splitlines())
            assert count >= 40 or path.name == "__init__.py" or name in SHORT, f"{name}: {count}"


def test_the_walks_name_functions_that_are_there() -> None:
    text = page("docs/architecture.md")
    walks = re.findall(r"^```text\n(.+?)^```", text[text.index("### Three walks") :], re.M | re.S)
    assert len(walks) >= 3
    for line in "".join(walks[:3]).splitlines():
        name, functions = line.split(maxsplit=1)
        tree = ast.parse((ROOT / "jaxengine" / name).read_text())
        defined = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert set(re.split(r", | or ", functions)) <= defined, line
