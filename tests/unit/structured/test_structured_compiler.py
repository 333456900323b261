"""Compilation: bounded, cached, and a failure is one request's own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from structured_walk import byte_vocabulary, legal_ids, ready_matcher

from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.structured import (
    GrammarCompiler,
    GrammarError,
    GrammarTooComplexError,
    Validator,
    check_structured,
)
from jaxengine.structured import compiler as compiler_module
from jaxengine.structured import sandbox as sandbox_module
from jaxengine.structured.sandbox import Sandbox
from jaxengine.structured.spec import Spec

# keeps the library busy for minutes, and cannot be interrupted
RUNAWAY = {"allOf": [{"type": "number", "multipleOf": x} for x in (0.7, 1.3, 1.7, 1.9, 2.3)]}


def spec_of(**fields: Any) -> Spec:
    spec = check_structured(StructuredOutputsParams(**fields))
    assert spec is not None
    return spec


def nested_one_of(depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"type": "string", "maxLength": 3}
    inner = nested_one_of(depth - 1)
    branches = [{"type": "object", "properties": {k: inner}, "required": [k]} for k in ("a", "b")]
    return {"oneOf": [{**branch, "additionalProperties": False} for branch in branches]}


def one_sided(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        branch = {"type": "object", "properties": {f"k{level}": schema}, "required": [f"k{level}"]}
        schema = {"oneOf": [{**branch, "additionalProperties": False}, {"type": "null"}]}
    return schema


def properties(count: int) -> dict[str, Any]:
    names = [f"p{i}" for i in range(count)]
    return {"type": "object", "properties": {n: {"type": "integer"} for n in names}}


def ambiguous(count: int) -> dict[str, Any]:
    def side(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {name: {"type": "integer"}}}

    return {"allOf": [{"anyOf": [side(f"a{i}"), side(f"b{i}")]} for i in range(count)]}


HEAVY: dict[str, dict[str, Any]] = {
    "oneOf 12 deep": {"json": nested_one_of(12)},
    "oneOf 8 deep": {"json": nested_one_of(8)},
    "one-sided oneOf 12 deep": {"json": one_sided(12)},
    "2,000 properties": {"json": properties(2000)},
    "repeated ambiguous": {"regex": "((a|a)*){50}"},
    "repeated unbounded": {"regex": "(a|a)*{50}"},
    "long repeat": {"regex": "(.*a){40}[ab]{1000}"},
    "product of anyOf": {"json": ambiguous(11)},
    "large product of anyOf": {"json": ambiguous(20)},
    "runaway": {"json": RUNAWAY},
}


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_constraints_end_in_bounded_time(name: str) -> None:
    """B63: compiled or refused, never endless."""
    vocabulary = byte_vocabulary()
    start = time.monotonic()
    try:
        spec = spec_of(**HEAVY[name])
        vocabulary.compiler.compile(spec).result(timeout=60)
    except ValueError as e:
        assert str(e).startswith("structured_outputs.") and "\n" not in str(e)
    else:
        assert legal_ids(ready_matcher(vocabulary, spec), vocabulary.words)
        assert name not in ("large product of anyOf", "oneOf 12 deep")
    assert time.monotonic() - start < 30  # half of it in the sandbox; the machine may be busy


def test_a_runaway_is_killed_and_others_go_on() -> None:
    validator = Validator(time_limit=3, num_threads=2)
    try:
        late = validator.submit(spec_of(json=RUNAWAY))
        validator.check(spec_of(regex="ab*"))
        assert not late.done()
        with pytest.raises(GrammarTooComplexError, match="too complex: it took longer than 1.5 s"):
            late.result(timeout=30)
        again = validator.submit(spec_of(json=RUNAWAY))
        assert again is not late  # a late one may pass when the machine is less busy
        validator.check(spec_of(regex="ab*c"))
    finally:
        validator.close()


async def test_validation_is_awaitable_and_blocks_no_loop() -> None:
    validator = Validator(time_limit=4)
    try:
        grammar = await asyncio.wrap_future(validator.submit(spec_of(json_object=True)))
        assert json.loads(grammar)
        with pytest.raises(GrammarError, match=r"^structured_outputs.regex cannot be enforced"):
            await asyncio.wrap_future(validator.submit(spec_of(regex="(?=a)b")))
    finally:
        validator.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": "(?<!a)b"}, "look-behind"),
        ({"regex": "(a)\\1"}, "backreferences"),
        ({"regex": "[^\\s\\S]"}, "nothing satisfies it"),
        ({"grammar": "start: foo"}, "foo"),
        ({"grammar": "start: start"}, "nothing satisfies it"),
        ({"grammar": 'root ::= "a'}, ""),
        ({"grammar": 'start: %json {"x-guidance":{"lenient":true},"uniqueItems":true}'}, "unique"),
    ],
)
def test_bad_texts_are_refused_with_their_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        byte_vocabulary().compiler.compile(spec_of(**fields)).result(timeout=60)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"structured_outputs.{next(iter(fields))} ")
    assert "\n" not in str(caught.value)


def test_equal_specs_are_compiled_once_and_the_oldest_is_dropped() -> None:
    vocabulary = byte_vocabulary()
    compiler = GrammarCompiler(
        vocabulary.tk.to_str(), vocabulary.width, vocabulary.eos, time_limit=8, cache_size=2
    )
    try:
        one = compiler.compile(spec_of(regex="a"))
        assert compiler.compile(spec_of(regex="a")) is one
        two = compiler.compile(spec_of(regex="b"))
        assert compiler.compile(spec_of(regex="a")) is one
        compiler.compile(spec_of(regex="c"))
        assert compiler.compile(spec_of(regex="a")) is one
        assert compiler.compile(spec_of(regex="b")) is not two
    finally:
        compiler.close()


def test_a_failed_compilation_is_its_own_request_s_alone() -> None:
    compiler = byte_vocabulary().compiler
    bad = compiler.matcher(spec_of(regex="(z"))
    good = compiler.matcher(spec_of(regex="z"))
    compiler.compile(spec_of(regex="z")).result(timeout=60)
    with pytest.raises(GrammarError):
        compiler.compile(spec_of(regex="(z")).result(timeout=60)
    assert good.ready and good.failure is None
    assert not bad.ready and bad.failure is not None and "unclosed group" in bad.failure
    with pytest.raises(GrammarError):
        compiler.validate(spec_of(regex="(z"))
    compiler.validate(spec_of(regex="z"))


def test_end_tokens_are_needed_and_must_have_logits() -> None:
    with pytest.raises(ValueError, match="needs an end token"):
        GrammarCompiler("{}", 10, [])
    with pytest.raises(ValueError, match="not all below 10"):
        GrammarCompiler("{}", 10, [10])


@pytest.mark.parametrize("reaped", [True, False])
def test_a_child_that_was_killed_while_idle_harms_no_constraint(
    reaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L11: whether its end is seen before the next constraint is sent to it, or after."""
    sandbox = Sandbox(30)
    try:
        assert sandbox.build(spec_of(regex="ab*"))
        [child] = sandbox._idle
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, nobody knows
        if not reaped:
            monkeypatch.setattr(child, "poll", lambda: None)
        assert sandbox.build(spec_of(regex="ab*c"))
        assert child.returncode == -signal.SIGKILL  # and it is no zombie
        [fresh] = sandbox._idle
        assert fresh.pid != child.pid and fresh.poll() is None
    finally:
        sandbox.close()


def test_a_constraint_that_ends_every_child_is_tried_twice_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L11: of two ends one was its own fault."""
    starts: list[int] = []

    def ends_at_once() -> subprocess.Popen[str]:
        starts.append(1)
        command = [sys.executable, "-c", "input(); import os; os._exit(3)"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    monkeypatch.setattr(sandbox_module, "_start", ends_at_once)
    sandbox = Sandbox(30)
    try:
        sandbox._idle.append(ends_at_once())
        with pytest.raises(GrammarTooComplexError, match="too complex: it needs too much"):
            sandbox.build(spec_of(regex="ab*"))
        assert len(starts) == 2 and not sandbox._idle
    finally:
        sandbox.close()


def test_a_long_constraint_is_checked_beside_the_step_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A short one at once: its faults are raised."""
    compiler = byte_vocabulary().compiler
    threads: list[bool] = []

    def check(asked: StructuredOutputsParams) -> Spec | None:
        threads.append(threading.current_thread() is threading.main_thread())
        return check_structured(asked)

    monkeypatch.setattr(compiler_module, "check_structured", check)
    padding = {"description": "x" * 5000}
    asked: list[tuple[Any, str | None]] = [
        (json.dumps({"type": "integer", **padding}), None),
        ({"type": "boolean"}, None),
        (json.dumps({"type": "integer", "extends": {}, **padding}), "uses 'extends'"),
        (json.dumps({"type": "nope", **padding}), "cannot be enforced"),
    ]
    for schema, fault in asked:
        matcher = compiler.matcher_of(StructuredOutputsParams(json=schema))
        while not matcher.ready and matcher.failure is None:
            time.sleep(0.005)
        if fault is None:
            assert matcher.ready and matcher.failure is None
        else:
            assert matcher.failure is not None and fault in matcher.failure
            assert matcher.failure.startswith("structured_outputs.json ")
    assert threads == [False] * 4
    with pytest.raises(ValueError, match="uses 'extends'"):
        compiler.matcher_of(StructuredOutputsParams(json='{"extends": {}}'))
    assert threads[4:] == [True]
    compiler.compile(spec_of(regex="ab*")).result(timeout=60)
    assert compiler.matcher_of(StructuredOutputsParams(regex="ab*")).ready
