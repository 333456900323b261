"""Whatever a client sends costs the step loop a bounded time; an honest one never notices."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from structured_walk import Vocabulary, demo_vocabulary, legal_ids, ready_matcher

from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.structured import (
    GrammarError,
    Matcher,
    check_structured,
    fill_bitmasks,
    fill_draft_bitmasks,
    guard,
)
from jaxengine.structured.matcher import ALLOWANCE, EARNED, MASK_SECONDS, Compiled
from jaxengine.structured.spec import Spec


def spec_of(**fields: Any) -> Spec:
    spec = check_structured(StructuredOutputsParams(**fields))
    assert spec is not None
    return spec


# Every way to cut the text is followed up: work grows with a power of the length.
AMBIGUOUS = [
    "start: e\ne: e e | e e e | /[a-z ]/",
    "start: e\ne: e e | /[a-z ]/",
    "start: e\ne: e e e e | e e e | e e | /[a-z]/",
    'start: e\ne: e e e e | e e e | e e | "a" | "aa"',
    'start: a+\na: b+\nb: c+\nc: d+\nd: e+\ne: /[a-z]/ | /[a-z]/ ""',
    "start: e\ne: e e e |  | /[a-z ]/",
    "start: e\ne: /[a-z ]/ e | /[a-z ]/",
    "start: e\ne: e e e | e e | /[a-z0-9 ]/",
]
NORMAL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags"],
}


def bomb(rules: int) -> Spec:
    """Harmless until a "y"; then one step's work grows with the cube of the rules: seconds for a
    hundred of them, hours for thousands."""
    names = [f"a{i}" for i in range(rules)]
    lines = ['start: "x" | "y" e', f'e: " " | {" | ".join(names)}', *(f"{n}: e e" for n in names)]
    return spec_of(grammar="\n".join(lines))


def tokens_of(vocabulary: Vocabulary, matcher: Matcher, most: int) -> int:
    """How many random legal tokens it takes before it ends or breaks."""
    rng = np.random.default_rng(0)
    for step in range(most):
        legal = [i for i in legal_ids(matcher, vocabulary.words) if i not in vocabulary.eos]
        if not legal or not matcher.accept([int(rng.choice(legal))]):
            return step
    return most


@pytest.mark.parametrize("grammar", AMBIGUOUS)
def test_an_ambiguous_grammar_ends_its_request(
    grammar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M9: the sum of what its masks use is bounded by the tokens that it brings."""
    vocabulary = demo_vocabulary()
    matcher = ready_matcher(vocabulary, spec_of(grammar=grammar))
    used: list[float] = []
    charge = matcher.charge
    monkeypatch.setattr(
        matcher,
        "charge",
        lambda seconds: (used.append(seconds or MASK_SECONDS), charge(seconds))[1],
    )
    count = tokens_of(vocabulary, matcher, 400)
    assert count < 400
    assert matcher.failure is not None
    assert matcher.failure.startswith("structured_outputs.grammar ")
    assert "make it smaller or less ambiguous" in matcher.failure and "\n" not in matcher.failure
    assert sum(used[:-1]) <= ALLOWANCE + EARNED * count
    assert not matcher.accept([5]) and legal_ids(matcher, vocabulary.words) == []


def test_eight_at_once_end_and_leave_their_neighbours_alone() -> None:
    """M9: every request has bounds of its own."""
    vocabulary = demo_vocabulary()
    hostile = [ready_matcher(vocabulary, spec_of(grammar=g)) for g in AMBIGUOUS]
    honest = [ready_matcher(vocabulary, spec_of(json=NORMAL)) for _ in range(2)]
    alone = ready_matcher(vocabulary, spec_of(json=NORMAL))
    rng = np.random.default_rng(1)
    living = list(hostile)
    for _ in range(300):
        matchers = [*living, *honest]
        out = np.full((len(matchers), vocabulary.words), -1, np.int32)
        fill_bitmasks(matchers, out)
        expected = np.zeros(vocabulary.words, np.int32)
        alone.fill_bitmask(expected)
        assert (out[-2:] == expected).all()
        for matcher, row in zip(list(living), out, strict=False):
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            legal = [i for i in np.flatnonzero(bits).tolist() if i not in vocabulary.eos]
            if not legal or not matcher.accept([int(rng.choice(legal))]):
                living.remove(matcher)
        if not alone.terminated:
            [token] = legal_ids(alone, vocabulary.words)[:1]
            assert all(m.accept([token]) for m in (*honest, alone))
        if not living:
            break
    assert not living
    assert all(m.failure is not None for m in hostile)
    assert all(m.failure is None for m in honest)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_step_that_would_take_minutes_is_left(drafts: bool) -> None:
    """M9: no single mask holds the loop, nor a look ahead at drafts; and the same constraint is not
    tried again."""
    vocabulary = demo_vocabulary()
    spec = bomb(150 + drafts)
    matcher, sibling = ready_matcher(vocabulary, spec), ready_matcher(vocabulary, spec)
    began = time.thread_time()
    text = vocabulary.encode("y") + vocabulary.encode(" ") * 6
    if drafts:
        assert matcher.validate(text) <= 1
    else:
        assert matcher.accept(text[:1])
        assert legal_ids(matcher, vocabulary.words) == []
    assert time.thread_time() - began < MASK_SECONDS  # of this thread's: it only waits
    assert matcher.failure is not None
    assert "take more than 0.25 s to work out" in matcher.failure
    out = np.full((len(text) + 1, vocabulary.words), -1, np.int32)
    assert fill_draft_bitmasks(matcher, text, out) == 0 and not out.any()
    assert not sibling.accept(text[:1]) and sibling.failure == matcher.failure
    late = vocabulary.compiler.matcher(spec)
    assert not late.ready and late.failure == matcher.failure


def test_a_first_mask_that_does_not_end_is_refused_at_the_door() -> None:
    """The small tokenizer of the check has no token of many blanks; the model's has."""
    vocabulary = demo_vocabulary()
    names = [f"a{i}" for i in range(120)]
    rules = "\n".join(f"{n}: e e" for n in names)
    spec = spec_of(grammar=f'start: e\ne: "  " | {" | ".join(names)}\n{rules}')
    for _ in range(2):
        with pytest.raises(GrammarError, match="take more than 0.25 s to work out"):
            vocabulary.compiler.compile(spec).result(timeout=60)
    assert vocabulary.compiler.matcher(spec).failure is not None


class Busy:
    """A library matcher whose masks allow everything and take a time of their own."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def deep_copy(self) -> Busy:
        return self

    def is_error(self) -> bool:
        return False

    def is_accepting(self) -> bool:
        return False

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return len(tokens)

    def validate_tokens(self, tokens: list[int]) -> int:
        return len(tokens)

    def rollback(self, num_tokens: int) -> bool:
        return True

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        ctypes.memset(pointer, 255, size)
        self.work()


def matcher_of(work: Any, wild: bool) -> Matcher:
    done: Future[Any] = Future()
    done.set_result(Compiled(Busy(work), (2,), 128, 128, "structured_outputs.grammar", wild))  # type: ignore[arg-type]
    matcher = Matcher(done, [2])
    assert matcher.ready
    return matcher


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_time_that_is_only_waited_for_is_not_charged() -> None:
    """On a busy machine a mask takes long, and uses little of the processor."""
    for wild in (True, False):
        matcher = matcher_of(lambda: time.sleep(MASK_SECONDS * 1.5), wild)
        for _ in range(3):
            assert len(legal_ids(matcher, 4)) == 127
            assert matcher.accept([5])
        assert matcher.failure is None


def test_a_usual_grammar_with_a_slow_mask_is_measured_from_then_on() -> None:
    """A schema that is known to be small is not measured until it is slow; then it is bounded as
    any other, by the average and not by a single mask."""
    pace = {"seconds": 0.0}
    matcher = matcher_of(lambda: burn(pace["seconds"]), wild=False)
    assert legal_ids(matcher, 4) and not matcher.measured
    pace["seconds"] = EARNED * 5
    assert legal_ids(matcher, 4) and matcher.measured and matcher.failure is None
    for _ in range(30):
        if not legal_ids(matcher, 4):
            break
        assert matcher.accept([5])
    assert matcher.failure is not None and "10 ms a token" in matcher.failure


def test_a_batch_with_a_slow_mask_is_measured_from_then_on() -> None:
    vocabulary = demo_vocabulary()
    specs = [spec_of(json=NORMAL), spec_of(regex="[ab]+"), spec_of(choice=["a", "b"])]
    usual = [ready_matcher(vocabulary, spec) for spec in specs] * 2
    assert not any(matcher.measured for matcher in usual)
    out = np.zeros((6, vocabulary.words), np.int32)
    fill_bitmasks(usual, out)
    for matcher in usual:
        matcher.watch()
    again = np.zeros_like(out)
    fill_bitmasks(usual, again)
    assert (out == again).all() and all(matcher.measured for matcher in usual)


def test_honest_constraints_stay_within_their_bounds() -> None:
    """Hundreds of properties, thousands of choices, a grammar of recursion: none is ended."""
    vocabulary = demo_vocabulary()
    wide = {f"p{i}": {"type": "integer"} for i in range(400)}
    tree = 'start: e\ne: e "+" t | t\nt: t "*" f | f\nf: /[0-9]+/ | "(" e ")"'
    for spec in (
        spec_of(json=NORMAL),
        spec_of(json={"type": "object", "properties": wide}),
        spec_of(choice=[f"{i * 7919 % 10007:05d} c{i}" for i in range(9000)]),
        spec_of(grammar=tree),
        spec_of(regex="([a-z]{1,9} ?){1,300}"),
    ):
        matcher = ready_matcher(vocabulary, spec)
        tokens_of(vocabulary, matcher, 100)
        assert matcher.failure is None, spec.text[:60]


def test_a_lexer_that_gives_up_is_the_constraint_s_fault_and_nobody_else_s() -> None:
    """L8: its copies share it, so whoever comes next gets another one."""
    vocabulary = demo_vocabulary()
    spec = spec_of(regex="((a|b|c|d){1,500}){1,500}")
    for _ in range(2):
        matcher = ready_matcher(vocabulary, spec)
        assert 5 < tokens_of(vocabulary, matcher, 2000) < 2000
        assert matcher.failure is not None
        assert matcher.failure.startswith(
            "structured_outputs.regex cannot be enforced to the end: lexer error: too many"
        )
        assert legal_ids(matcher, vocabulary.words) == []


def test_text_that_nothing_can_follow_is_the_constraint_s_fault() -> None:
    vocabulary = demo_vocabulary()
    spec = spec_of(grammar='start: "a" X | "b"\nX: /c+/ & /d+/')
    matcher = ready_matcher(vocabulary, spec)
    assert matcher.accept(vocabulary.encode("a"))
    assert legal_ids(matcher, vocabulary.words) == []
    assert matcher.failure == (
        "structured_outputs.grammar cannot be enforced to the end: "
        "no token of the model can follow the text so far"
    )


def test_a_token_that_should_not_have_come_is_no_fault_of_the_constraint() -> None:
    vocabulary = demo_vocabulary()
    matcher = ready_matcher(vocabulary, spec_of(regex="ab"))
    assert not matcher.accept(vocabulary.encode("x"))
    assert matcher.failure is None


def test_too_many_left_behind_and_no_grammar_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = demo_vocabulary()
    spec = spec_of(regex="nobody else asks for this")
    with monkeypatch.context() as patch:
        patch.setattr(guard, "num_left", lambda: 100)
        with pytest.raises(GrammarError, match="cannot be checked now"):
            vocabulary.compiler.compile(spec).result(timeout=60)
    vocabulary.compiler.compile(spec).result(timeout=60)
