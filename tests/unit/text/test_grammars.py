"""Constraints are tried before their request is queued, and one client's hang-up harms no other."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
from toys import BYTE_VOCAB, byte_tokenizer

from jaxengine.sampling_params import SamplingParams, StructuredOutputsParams
from jaxengine.structured import GrammarError, Spec
from jaxengine.text import grammars
from jaxengine.text.grammars import GrammarChecks, TooManyGrammarsError
from jaxengine.text.processor import InputProcessor
from jaxengine.validation import Limits, RequestError


def _params(**constraint: object) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))  # type: ignore[arg-type]


def test_process_tries_the_grammar() -> None:
    inputs = InputProcessor(byte_tokenizer(), Limits(64, BYTE_VOCAB), {})  # type: ignore[arg-type]
    try:
        made = inputs.process("a", "x", _params(choice=["yes", "no"]))
        assert made.grammar == Spec("choice", '["yes", "no"]', "structured_outputs.choice")
        with pytest.raises(RequestError, match="structured_outputs.regex cannot be enforced") as e:
            inputs.process("b", "x", _params(regex="("))
        assert e.value.field == "structured_outputs"
        unchecked = inputs.process("c", "x", _params(regex="("), check_grammar=False)
        assert unchecked.grammar is not None
    finally:
        inputs.grammars.close()


def test_a_model_without_end_token_is_refused() -> None:
    inputs = InputProcessor(None, Limits(64, BYTE_VOCAB), {})
    with pytest.raises(RequestError, match="needs an end token"):
        inputs.process("a", [5], _params(regex="a"))


async def test_wait_gives_the_verdict() -> None:
    checks = GrammarChecks()
    try:
        await checks.wait(Spec("regex", "[a-z]+"))
        with pytest.raises(RequestError, match="cannot be enforced"):
            await checks.wait(Spec("json", '{"type":"nope"}'))
    finally:
        checks.close()


class _Slow:
    """A validator whose checks end when the test says so."""

    def __init__(self) -> None:
        self.futures: dict[tuple[str, str], Future[str]] = {}

    def submit(self, spec: Spec) -> Future[str]:
        return self.futures.setdefault(spec.key, Future())

    def close(self) -> None:
        self.futures.clear()


def _slow(monkeypatch: pytest.MonkeyPatch) -> tuple[GrammarChecks, _Slow]:
    slow = _Slow()
    monkeypatch.setattr(grammars, "Validator", lambda: slow)
    return GrammarChecks(), slow


async def test_a_hang_up_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, slow = _slow(monkeypatch)
    spec = Spec("regex", "a")
    first, second = (asyncio.create_task(checks.wait(spec)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert not slow.futures[spec.key].cancelled()
    slow.futures[spec.key].set_exception(GrammarError("structured_outputs.regex is bad"))
    with pytest.raises(RequestError, match="is bad"):
        await second


async def test_what_nobody_waits_for_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, slow = _slow(monkeypatch)
    spec = Spec("regex", "a")
    only = asyncio.create_task(checks.wait(spec))
    await asyncio.sleep(0)
    only.cancel()
    await asyncio.gather(only, return_exceptions=True)
    assert slow.futures[spec.key].cancelled()


async def test_too_many_different_checks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, slow = _slow(monkeypatch)
    monkeypatch.setattr(grammars, "MAX_PENDING", 2)
    tasks = [asyncio.create_task(checks.wait(Spec("regex", "ab"[i % 2]))) for i in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyGrammarsError, match="2 constraints wait"):
        await checks.wait(Spec("regex", "c"))
    for future in slow.futures.values():
        if not future.cancelled():
            future.set_result("ok")
    await asyncio.gather(*tasks)
