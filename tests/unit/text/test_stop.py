"""B06 and engine-behaviour A.10: stop strings over streamed text."""

from __future__ import annotations

import itertools

import pytest
from toys import byte_tokenizer, joined, run, sp_tokenizer

from jaxengine.sampling_params import SamplingParams
from jaxengine.text.stop import StopChecker
from jaxengine.validation import RequestError

TOY = byte_tokenizer(merges=(("a", "b"), ("c", "d"), ("ab", "cd"), ("e", "f")))
SPECIAL = TOY.tk.token_to_id("<|im_end|>")
EOS = TOY.eos_ids[0]


def _feed(checker: StopChecker, pieces: list[str]) -> tuple[list[str], str | None]:
    given = []
    for piece in pieces:
        text, matched = checker.push(piece)
        given.append(text)
        if matched is not None:
            return given, matched
    given.append(checker.flush())
    return given, None


def _cuts(text: str) -> list[list[str]]:
    """Every way to cut a short text into pieces."""
    ways = []
    for bits in itertools.product([0, 1], repeat=len(text) - 1):
        pieces, start = [], 0
        for at, bit in enumerate(bits, 1):
            if bit:
                pieces.append(text[start:at])
                start = at
        ways.append([*pieces, text[start:]])
    return ways


def test_hold_back_trace_a10() -> None:
    checker = StopChecker(["END"])
    assert checker.push("abcE") == ("ab", None)
    assert checker.push("x") == ("c", None)
    assert checker.flush() == "Ex"


@pytest.mark.parametrize(
    ("stops", "include", "text", "expected", "matched"),
    [
        (["cde"], False, "abcdefgh", "ab", "cde"),
        (["cde"], True, "abcdefgh", "abcde", "cde"),
        (["ab", "abc"], False, "xxabcd", "xx", "ab"),
        (["abc", "b"], False, "xxabcd", "xxa", "b"),
        (["abc", "bc"], False, "xxabcd", "xx", "abc"),
        (["abz", "hz"], False, "ababgh", "ababgh", None),
        (["h"], False, "abcdefgh", "abcdefg", "h"),
        ([f"no{i}" for i in range(19)] + ["fg"], False, "abcdefgh", "abcde", "fg"),
        (["aab"], False, "aaaaab", "aaa", "aab"),
    ],
)
def test_every_cut_gives_the_same(
    stops: list[str], include: bool, text: str, expected: str, matched: str | None
) -> None:
    for pieces in _cuts(text):
        given, found = _feed(StopChecker(stops, include), pieces)
        assert ("".join(given), found) == (expected, matched)


def test_no_piece_holds_part_of_the_stop() -> None:
    for pieces in _cuts("xyz<end>q"):
        given, _ = _feed(StopChecker(["<end>"]), pieces)
        assert not any("<" in g for g in given)


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_tokens_after_the_match_are_cut(kind: str, step: int) -> None:
    ids = TOY.encode("xabcdefgh", add_special_tokens=False)  # x abcd ef g h
    steps = [ids[i : i + step] for i in range(0, len(ids), step)]
    params = SamplingParams(stop=["de"], max_tokens=50)  # ends inside "ef"
    outputs, aborted = run(TOY, "p", steps, params, kind=kind)
    last = outputs[-1].outputs[0]
    text = joined(outputs) if kind == "delta" else last.text
    assert text == "xabc"
    assert (last.finish_reason, last.stop_reason) == ("stop", "de")
    tokens = [t for o in outputs for t in o.outputs[0].token_ids] if kind == "delta" else None
    assert (tokens or last.token_ids) == ids[:3]
    assert outputs[-1].metrics.num_generation_tokens == 3
    assert aborted == ([] if step == 5 else ["r"])


def test_stop_wins_over_length_at_the_same_token() -> None:
    ids = TOY.encode("gh", add_special_tokens=False)
    outputs, aborted = run(TOY, "p", [[i] for i in ids], SamplingParams(stop="h", max_tokens=2))
    last = outputs[-1].outputs[0]
    assert (joined(outputs), last.finish_reason, last.stop_reason) == ("g", "stop", "h")
    assert aborted == []


def test_held_text_comes_out_at_the_end() -> None:
    ids = TOY.encode("ghEN", add_special_tokens=False)
    outputs, _ = run(TOY, "p", [[i] for i in ids], SamplingParams(stop="END", max_tokens=4))
    assert joined(outputs) == "ghEN"
    assert outputs[-1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_text_of_a_special_token_stops(skip: bool, include: bool) -> None:
    ids = TOY.encode("gh", add_special_tokens=False)
    params = SamplingParams(
        stop=["<|im_end|>", "zz"],
        skip_special_tokens=skip,
        include_stop_str_in_output=include,
        max_tokens=9,
    )
    outputs, aborted = run(TOY, "p", [*([i] for i in ids), [SPECIAL], ids], params)
    last = outputs[-1].outputs[0]
    assert joined(outputs) == ("gh<|im_end|>" if include else "gh")
    assert (last.finish_reason, last.stop_reason) == ("stop", "<|im_end|>")
    assert aborted == ["r"]


def test_text_of_eos_as_stop_string() -> None:
    ids = [*TOY.encode("gh", add_special_tokens=False), EOS]
    params = SamplingParams(stop="</s>", max_tokens=9)
    outputs, aborted = run(TOY, "p", [[i] for i in ids], params, finish="stop")
    assert (joined(outputs), outputs[-1].outputs[0].stop_reason) == ("gh", "</s>")
    assert aborted == []


def test_stop_token_has_no_text_unless_included() -> None:
    ids = TOY.encode("ghq", add_special_tokens=False)
    params = SamplingParams(stop_token_ids=[ids[-1]], max_tokens=9)
    outputs, _ = run(TOY, "p", [ids], params, finish="stop", stop_reason=ids[-1])
    assert outputs[-1].outputs[0].text == "gh"
    assert outputs[-1].outputs[0].token_ids == ids
    included = SamplingParams(
        stop_token_ids=[ids[-1]], include_stop_str_in_output=True, max_tokens=9
    )
    outputs, _ = run(TOY, "p", [ids], included, finish="stop", stop_reason=ids[-1])
    assert outputs[-1].outputs[0].text == "ghq"


def test_grammar_end_without_eos_keeps_the_last_text() -> None:
    ids = TOY.encode('{"a"}', add_special_tokens=False)
    outputs, _ = run(TOY, "p", [ids], SamplingParams(max_tokens=9), finish="stop")
    assert joined(outputs) == '{"a"}'


def test_min_tokens_puts_off_the_search() -> None:
    ids = TOY.encode("gqgqgq", add_special_tokens=False)
    params = SamplingParams(stop="gq", min_tokens=3, max_tokens=9)
    for steps in ([[i] for i in ids], [ids]):
        outputs, _ = run(TOY, "p", steps, params)
        # the third token's g lies before the limit, so a match may not begin there
        assert joined(outputs) == "gqgq"
        assert outputs[-1].outputs[0].stop_reason == "gq"
        assert outputs[-1].metrics.num_generation_tokens == 6


def test_stop_in_text_that_only_the_end_releases() -> None:
    toy = sp_tokenizer()
    ids = [toy.tk.token_to_id(t) for t in ["▁Hello", "<0xE2>"]]
    outputs, _ = run(toy, "x", [[i] for i in ids], SamplingParams(stop="\ufffd", max_tokens=2))
    last = outputs[-1].outputs[0]
    assert (joined(outputs), last.finish_reason) == (" Hello", "stop")


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1], 5])
def test_bad_stops_are_refused(stop: object) -> None:
    with pytest.raises(RequestError) as caught:
        run(TOY, "p", [[1]], SamplingParams(stop=stop))  # type: ignore[arg-type]
    assert caught.value.field == "stop"
