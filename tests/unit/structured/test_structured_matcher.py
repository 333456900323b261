"""The matcher of one request: consistent, isolated, fail-closed."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structured_walk import (
    Vocabulary,
    byte_vocabulary,
    demo_vocabulary,
    legal_ids,
    ready_matcher,
    walk,
)

from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.sched.grammar import Grammar
from jaxengine.structured import Matcher, check_structured, fill_bitmasks, fill_draft_bitmasks
from jaxengine.structured.matcher import Compiled
from jaxengine.structured.spec import Spec


def spec_of(**fields: Any) -> Spec:
    spec = check_structured(StructuredOutputsParams(**fields))
    assert spec is not None
    return spec


SPECS = [
    spec_of(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    spec_of(json={"type": "array", "items": {"enum": ["true", "x", 12]}}),
    spec_of(regex="(ab|a)*c?"),
    spec_of(choice=["tr", "true", "trut", "12"]),
    spec_of(grammar='start: "[" start "]" | "1"'),
]


def fresh_copy(vocabulary: Vocabulary, spec: Spec, tokens: list[int]) -> Matcher:
    matcher = ready_matcher(vocabulary, spec)
    assert matcher.accept(tokens)
    return matcher


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SPECS), st.data())
def test_accept_validate_rollback_and_masks_agree(spec: Spec, data: st.DataObject) -> None:
    """Whatever was accepted and undone, the state is that of a fresh walk of the same tokens."""
    vocabulary = byte_vocabulary()
    matcher: Grammar = ready_matcher(vocabulary, spec)
    tokens: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        legal = legal_ids(matcher, vocabulary.words)
        assert legal
        ended = bool(tokens) and tokens[-1] in vocabulary.eos
        if tokens and (ended or data.draw(st.booleans())):
            count = data.draw(st.integers(1, len(tokens)))
            matcher.rollback(count)
            del tokens[-count:]
        else:
            token = data.draw(st.sampled_from(legal))
            guess = data.draw(st.integers(-1, vocabulary.width + 1))
            valid = matcher.validate([guess])
            # Where the text is forced, masks allow its usual spelling only; others stay valid.
            assert valid >= int(guess in legal)
            assert valid == int(fresh_copy(vocabulary, spec, tokens).accept([guess]))
            assert matcher.validate([token, guess]) >= 1
            assert matcher.accept([token])
            tokens.append(token)
        fresh = ready_matcher(vocabulary, spec)
        assert fresh.validate(tokens) == len(tokens)
        assert fresh.accept(tokens)
        assert fresh.terminated == matcher.terminated
        assert legal_ids(fresh, vocabulary.words) == legal_ids(matcher, vocabulary.words)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SPECS), st.integers(0, 2**32), st.data())
def test_validate_counts_what_accept_takes_one_by_one(
    spec: Spec, seed: int, data: st.DataObject
) -> None:
    vocabulary = byte_vocabulary()
    text = walk(vocabulary, ready_matcher(vocabulary, spec), np.random.default_rng(seed), 6)
    ids = [*vocabulary.encode(text), vocabulary.eos[0]]
    at = data.draw(st.integers(0, len(ids) - 1))
    ids[at] = data.draw(st.integers(0, vocabulary.size - 1))
    one_by_one, alone = 0, ready_matcher(vocabulary, spec)
    while one_by_one < len(ids) and alone.accept([ids[one_by_one]]):
        one_by_one += 1
    matcher = ready_matcher(vocabulary, spec)
    before = legal_ids(matcher, vocabulary.words)
    assert matcher.validate(ids) == one_by_one
    assert legal_ids(matcher, vocabulary.words) == before
    assert matcher.accept(ids) == (one_by_one == len(ids))


def test_regex_choice_and_grammar_samples_match() -> None:
    vocabulary = byte_vocabulary()
    pattern = "[a-f]{2,5}-(x|yy)+[0-9]"
    choices = ["a", "ab", 'x"y\\', "é😀", "l\nm", "%json {}", "/a/"]
    gbnf = 'root ::= "(" root ")" | "1"'
    seen = set()
    for seed in range(50):
        rng = np.random.default_rng(seed)
        text = walk(vocabulary, ready_matcher(vocabulary, spec_of(regex=pattern)), rng)
        assert re.fullmatch(pattern, text)
        seen.add(walk(vocabulary, ready_matcher(vocabulary, spec_of(choice=choices)), rng))
        text = walk(vocabulary, ready_matcher(vocabulary, spec_of(grammar=gbnf)), rng)
        assert text == "(" * text.count("(") + "1" + ")" * text.count("(")
    assert seen <= set(choices) and len(seen) >= 5


def test_matchers_of_one_grammar_do_not_see_each_other() -> None:
    vocabulary = demo_vocabulary()
    spec = SPECS[0]
    one, two = ready_matcher(vocabulary, spec), ready_matcher(vocabulary, spec)
    first = legal_ids(two, vocabulary.words)
    assert one.accept(vocabulary.encode('{"a":12'))
    assert legal_ids(two, vocabulary.words) == first
    assert not two.accept(vocabulary.encode("nonsense"))
    assert legal_ids(two, vocabulary.words) == []
    assert one.accept(vocabulary.encode("3}"))
    assert one.terminated and not two.terminated
    three = ready_matcher(vocabulary, spec)
    assert legal_ids(three, vocabulary.words) == first
    json.loads(walk(vocabulary, three, np.random.default_rng(0)))


def test_an_illegal_token_closes_everything_for_good() -> None:
    vocabulary = byte_vocabulary()
    for bad in ([vocabulary.eos[0]], [vocabulary.width], [-1], [10**9], vocabulary.encode("x")):
        matcher = ready_matcher(vocabulary, SPECS[0])
        assert matcher.validate(bad) == 0
        assert matcher.accept([])
        assert not matcher.accept(bad)
        assert legal_ids(matcher, vocabulary.words) == []
        assert not matcher.accept(vocabulary.encode("{"))
        assert matcher.validate(vocabulary.encode("{")) == 0
        assert not matcher.terminated


def test_rollback_beyond_the_start_is_refused() -> None:
    vocabulary = byte_vocabulary()
    matcher = ready_matcher(vocabulary, SPECS[2])
    assert matcher.accept(vocabulary.encode("ab"))
    with pytest.raises(ValueError, match="cannot undo 3 of 2"):
        matcher.rollback(3)


class Faulty:
    """A library matcher whose mask computation fails."""

    def deep_copy(self) -> Faulty:
        return self

    def is_error(self) -> bool:
        return False

    def unsafe_compute_mask_ptr(self, *_: int) -> None:
        raise RuntimeError("internal")


def test_an_internal_error_or_an_unready_grammar_allows_nothing() -> None:
    done: Future[Any] = Future()
    waiting = Matcher(done, [2])
    assert not waiting.ready and waiting.failure is None and not waiting.terminated
    assert legal_ids(waiting, 4) == []
    faulty: Any = Faulty()
    done.set_result(Compiled(faulty, (2,), 128, 128))
    assert waiting.ready
    assert legal_ids(waiting, 4) == []
    assert not waiting.accept([5])
    failed: Future[Any] = Future()
    failed.set_exception(ValueError("because"))
    assert not Matcher(failed, [2]).ready
    assert Matcher(failed, [2]).failure == "because"
    with pytest.raises(ValueError, match="end token"):
        Matcher(done, [])


def test_a_step_that_exceeds_its_fuel_allows_nothing() -> None:
    vocabulary = byte_vocabulary()
    limits = llguidance.LLParserLimits(step_max_items=5, verbose_errors=False)
    tokenizer = vocabulary.compiler.prepare()
    grammar = llguidance.LLMatcher.grammar_from_lark('start: ("a" | b | c)+\nb: "b"\nc: "c" b')
    inner = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    done: Future[Compiled] = Future()
    done.set_result(Compiled(inner, vocabulary.eos, tokenizer.vocab_size, vocabulary.width))
    matcher = Matcher(done, vocabulary.eos)
    assert matcher.ready
    assert legal_ids(matcher, vocabulary.words) == []


def test_each_request_has_its_own_end_tokens() -> None:
    vocabulary = byte_vocabulary()
    matcher = vocabulary.compiler.matcher(SPECS[2], eos_ids=[vocabulary.eos[1]])
    vocabulary.compiler.compile(SPECS[2]).result(timeout=60)
    assert matcher.ready
    legal = legal_ids(matcher, vocabulary.words)
    assert vocabulary.eos[1] in legal and vocabulary.eos[0] not in legal


def test_masks_of_a_batch_equal_masks_one_by_one() -> None:
    vocabulary = demo_vocabulary()
    specs = [SPECS[i % len(SPECS)] for i in range(12)]
    matchers = [ready_matcher(vocabulary, spec) for spec in specs]
    assert matchers[2].accept(vocabulary.encode("ab"))
    assert matchers[3].accept(vocabulary.encode("12"))  # at its end
    assert matchers[7].accept([*vocabulary.encode("ab"), vocabulary.eos[0]])  # ended
    assert not matchers[5].accept(vocabulary.encode("nonsense"))  # failed
    mixed: list[Matcher | None] = [*matchers, None]
    out = np.full((15, vocabulary.words), 7, np.int32)
    fill_bitmasks(mixed, out)
    for row, matcher in zip(out, matchers, strict=False):
        alone = np.full(vocabulary.words, -1, np.int32)
        matcher.fill_bitmask(alone)
        assert (row == alone).all()
    assert not out[5].any()
    assert (out[12] == -1).all() and (out[13:] == 7).all()


def test_logits_narrower_than_the_library_s_vocabulary() -> None:
    vocabulary = byte_vocabulary()
    tokenizer = vocabulary.compiler.prepare()
    width = 70
    grammar = llguidance.LLMatcher.grammar_from_regex("(?s).*")
    done: Future[Compiled] = Future()
    inner = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    done.set_result(Compiled(inner, (), tokenizer.vocab_size, width))
    matcher = Matcher(done, [69])
    legal = legal_ids(matcher, 3)
    assert 69 in legal and max(legal) == 69 and len(legal) > 50
    assert not matcher.accept([80])


@pytest.mark.parametrize(
    "spec", [spec_of(json={"enum": [12, 120]}), spec_of(grammar='start: "12" "0"?')], ids=str
)
def test_draft_masks_never_open(spec: Spec) -> None:
    """Of a usual grammar, and of one whose masks are measured."""
    vocabulary = byte_vocabulary()
    drafts = [*vocabulary.encode("1"), *vocabulary.encode("2"), *vocabulary.encode("}x")]
    matcher = ready_matcher(vocabulary, spec)
    assert matcher.measured == (spec.kind == "grammar")
    assert matcher.validate(drafts) == 2  # as the engine asks before
    out = np.full((len(drafts) + 1, vocabulary.words), -1, np.int32)
    assert fill_draft_bitmasks(matcher, drafts, out) == 2
    for k in range(3):
        fresh = ready_matcher(vocabulary, spec)
        assert fresh.accept(drafts[:k])
        alone = np.zeros(vocabulary.words, np.int32)
        fresh.fill_bitmask(alone)
        assert (out[k] == alone).all()
    assert (out[3:] == out[2]).all()
    assert legal_ids(matcher, vocabulary.words) == legal_ids(
        ready_matcher(vocabulary, spec), vocabulary.words
    )
    assert matcher.accept(drafts[:1]) and matcher.validate(drafts[1:2]) == 1
    matcher.rollback(1)
    end = [*vocabulary.encode("120"), vocabulary.eos[0], vocabulary.eos[0]]
    wide = np.full((len(end) + 1, vocabulary.words), -1, np.int32)
    assert fill_draft_bitmasks(matcher, end, wide) == len(end) - 1
    assert not matcher.terminated
