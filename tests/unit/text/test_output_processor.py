"""Outputs: kinds, n, log-probabilities (B09), usage (B30), merging, aborts, errors, speed."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from toys import BYTE_VOCAB, byte_char, byte_tokenizer, joined, run, sp_tokenizer

from jaxengine.sampling_params import SamplingParams
from jaxengine.text.logprobs import FLOOR, TokenTexts, position_logprobs
from jaxengine.text.output_processor import OutputProcessor
from jaxengine.text.outputs import RequestOutput, merge_deltas, usage
from jaxengine.text.processor import InputProcessor, ProcessedRequest
from jaxengine.validation import Limits
from jaxengine.wire.messages import EngineOutput, TokenLogprobs

TOY = byte_tokenizer()
INPUTS = InputProcessor(TOY, Limits(4096, BYTE_VOCAB))  # type: ignore[arg-type]


def _add(processor: OutputProcessor, kind: Any, **params: Any) -> ProcessedRequest:
    done = INPUTS.process("r", "p", SamplingParams(**params))
    processor.add(done, kind)
    return done


def _ids(text: str) -> list[int]:
    return TOY.encode(text, add_special_tokens=False)


def _out(name: str, text: str, finish: str | None = None, **more: Any) -> EngineOutput:
    return EngineOutput(request_id=name, new_token_ids=_ids(text), finish_reason=finish, **more)


@pytest.fixture
def processor() -> OutputProcessor:
    return OutputProcessor(TOY)  # type: ignore[arg-type]


def test_kinds_agree() -> None:
    ids = _ids("abc🙂d")
    steps = [[i] for i in ids]
    delta, _ = run(TOY, "p", steps, SamplingParams(max_tokens=99))
    cumulative, _ = run(TOY, "p", steps, SamplingParams(max_tokens=99), kind="cumulative")
    final, _ = run(TOY, "p", steps, SamplingParams(max_tokens=99), kind="final")
    assert joined(delta) == cumulative[-1].outputs[0].text == joined(final) == "abc🙂d"
    assert [t for o in delta for t in o.outputs[0].token_ids] == ids
    assert cumulative[-1].outputs[0].token_ids == final[0].outputs[0].token_ids == ids
    assert [len(o.outputs[0].token_ids) for o in cumulative] == list(range(1, len(ids) + 1))
    assert len(final) == 1 and len(delta) == len(ids)
    assert {o.finished for o in delta[:-1]} == {False} and delta[-1].finished
    texts = [o.outputs[0].text for o in cumulative]
    assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
def test_stream_interval(kind: str) -> None:
    """The first token at once, then three at a time, the rest with the end; nothing is lost."""
    ids = _ids("abcdefghi")
    processor = OutputProcessor(TOY, 3)  # type: ignore[arg-type]
    _add(processor, kind, max_tokens=99, logprobs=0)
    sizes, seen = [], []
    for at, token in enumerate(ids):
        scores = [TokenLogprobs([token], [-1.0], 1)]
        finish = "length" if at == len(ids) - 1 else None
        step = EngineOutput("r", [token], logprobs=scores, finish_reason=finish)
        for result in processor.process([step])[0]:
            (one,) = result.outputs
            assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)
            sizes.append(len(one.token_ids))
            seen.append(one.text)
    want = {"delta": [1, 3, 3, 2], "cumulative": [1, 4, 7, 9], "final": [9]}[kind]
    assert sizes == want
    assert ("".join(seen) if kind == "delta" else seen[-1]) == "abcdefghi"


def test_stream_interval_of_each_completion() -> None:
    """Of n = 2: one that ends is shown at once with what it held back; so is an aborted one."""
    processor = OutputProcessor(TOY, 10)  # type: ignore[arg-type]
    done = _add(processor, "delta", max_tokens=99, n=2)
    first, second = (r.request_id for r in done.requests)
    assert len(processor.process([_out(first, "a"), _out(second, "A")])[0][0].outputs) == 2
    assert processor.process([_out(first, "b"), _out(second, "B")])[0] == []
    ((news,), _) = processor.process([_out(first, "c", "length"), _out(second, "C")])
    assert [(c.index, c.text) for c in news.outputs] == [(0, "bc")] and not news.finished
    last = processor.abort("r")
    assert last is not None and last.finished
    assert [(c.index, c.text, c.finish_reason) for c in last.outputs] == [(1, "BC", "abort")]


def test_n_is_put_together(processor: OutputProcessor) -> None:
    _add(processor, "final", n=3)
    results, _ = processor.process([_out("1_r", "b", "length"), _out("0_r", "a")])
    assert results == []
    results, _ = processor.process([_out("0_r", "A", "stop"), _out("2_r", "c", "length")])
    [result] = results
    assert [c.text for c in result.outputs] == ["aA", "b", "c"]
    assert [c.index for c in result.outputs] == [0, 1, 2]
    assert [c.finish_reason for c in result.outputs] == ["stop", "length", "length"]
    assert result.finished and len(processor) == 0
    assert usage([result]).completion_tokens == 4


def test_n_deltas_hold_only_news(processor: OutputProcessor) -> None:
    _add(processor, "delta", n=2)
    [first], _ = processor.process([_out("1_r", "b")])
    assert [(c.index, c.text) for c in first.outputs] == [(1, "b")]
    [second], _ = processor.process([_out("1_r", "B", "length"), _out("0_r", "a")])
    assert [(c.index, c.text) for c in second.outputs] == [(1, "B"), (0, "a")]
    assert not second.finished
    [third], _ = processor.process([_out("0_r", "A", "length")])
    assert third.finished and third.metrics.finished_time is not None


def test_b30_usage_counts_once(processor: OutputProcessor) -> None:
    _add(processor, "delta", n=3)
    processor.process(
        [_out("0_r", "aa", "length", num_cached_tokens=1), _out("1_r", "b", "length")]
    )
    # preempted and found again in the cache: not the request's saving
    [last], _ = processor.process([_out("2_r", "c", "length", num_cached_tokens=2)])
    total = usage([last, last])
    assert usage([last]).prompt_tokens == len(last.prompt_token_ids) == 2
    assert (total.prompt_tokens, total.completion_tokens, total.cached_tokens) == (4, 8, 2)
    assert total.total_tokens == 12


def test_abort_gives_the_last_output(processor: OutputProcessor) -> None:
    _add(processor, "delta", n=2, stop=["END"])
    processor.process([_out("0_r", "aEN"), _out("1_r", "END", None)])
    last = processor.abort("r")
    assert last is not None and last.finished
    assert [(c.index, c.text, c.finish_reason) for c in last.outputs] == [(0, "EN", "abort")]
    assert processor.abort("r") is None
    assert processor.process([_out("0_r", "late", "length")]) == ([], [])


def test_abort_of_a_final_request_has_everything(processor: OutputProcessor) -> None:
    _add(processor, "final", n=2)
    processor.process([_out("0_r", "ab", "length"), _out("1_r", "c")])
    last = processor.abort("r")
    assert last is not None
    assert [(c.text, c.finish_reason) for c in last.outputs] == [("ab", "length"), ("c", "abort")]


def test_error_carries_its_text(processor: OutputProcessor) -> None:
    _add(processor, "delta")
    [result], abort = processor.process([_out("r", "", "error", error="NaN in the logits")])
    assert result.outputs[0].finish_reason == "error"
    assert result.error == "NaN in the logits" and abort == []
    _add(processor, "delta")
    failed = processor.fail("r", "engine died")
    assert failed is not None and failed.error == "engine died"


def test_ids_are_free_again_and_duplicates_are_not(processor: OutputProcessor) -> None:
    _add(processor, "final")
    with pytest.raises(ValueError, match="in use"):
        _add(processor, "final")
    processor.process([_out("r", "a", "length")])
    _add(processor, "final")
    assert processor.request_ids() == ["r"]


def test_metrics(processor: OutputProcessor) -> None:
    _add(processor, "delta")
    [first], _ = processor.process([_out("r", "a", times=(5.0, 5.5))])
    metrics = first.metrics
    assert metrics.queue_time == 0.5
    assert metrics.first_token_latency is not None and metrics.first_token_latency >= 0
    processor.process([_out("r", "b", "length")])
    assert metrics.finished_time is not None and metrics.last_token_time is not None
    assert metrics.first_token_time is not None
    assert metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time


def test_merge_deltas_equals_no_merge(processor: OutputProcessor) -> None:
    for merged in (True, False):
        _add(processor, "delta", n=2, logprobs=1)
        seen: list[RequestOutput] = []
        for at, (a, b) in enumerate(zip("abcd", "wxyz", strict=True)):
            finish = "length" if at == 3 else None
            step = []
            for name, text in (("0_r", a), ("1_r", b)):
                rows = [TokenLogprobs([_ids(text)[0], 2], [-0.5, -1.0], 1)]
                step.append(_out(name, text, finish, logprobs=rows))
            seen += processor.process(step)[0]
        if merged:
            total = seen[0]
            for newer in seen[1:]:
                total = merge_deltas(total, newer)
            assert [c.text for c in total.outputs] == ["abcd", "wxyz"]
            assert [c.token_ids for c in total.outputs] == [_ids("abcd"), _ids("wxyz")]
            assert [len(c.logprobs or ()) for c in total.outputs] == [4, 4]
            assert [c.finish_reason for c in total.outputs] == ["length", "length"]
            assert total.finished
            assert total.outputs[0].cumulative_logprob == pytest.approx(-2.0)
        else:
            assert joined(seen) == "awbxcydz"


def test_b09_impossible_alternatives_have_a_finite_floor(processor: OutputProcessor) -> None:
    _add(processor, "final", logprobs=3, top_k=1, temperature=1.0)
    entry = TokenLogprobs([5, 5, 6, 7], [-0.25, -0.25, -math.inf, math.nan], 1)
    out = EngineOutput(request_id="r", new_token_ids=[5], logprobs=[entry], finish_reason="length")
    [result], _ = processor.process([out])
    [position] = result.outputs[0].logprobs or []
    assert {t: p.logprob for t, p in position.items()} == {5: -0.25, 6: FLOOR, 7: FLOOR}
    assert [p.rank for p in position.values()] == [1, 2, 3]
    assert result.outputs[0].cumulative_logprob == -0.25
    json.dumps([p.logprob for p in position.values()], allow_nan=False)


def test_logprobs_follow_the_asked_count_and_the_stop(processor: OutputProcessor) -> None:
    _add(processor, "final", logprobs=1, stop=["b"])
    ids = _ids("abc")
    rows = [TokenLogprobs([i, 1, 2, 3], [-3.0, -1.0, -2.0, -2.5], 9) for i in ids]
    out = EngineOutput(request_id="r", new_token_ids=ids, logprobs=rows)
    [result], abort = processor.process([out])
    completion = result.outputs[0]
    assert abort == ["r"] and completion.token_ids == ids[:2]
    assert [list(p) for p in completion.logprobs or []] == [[ids[0], 1], [ids[1], 1]]
    assert (completion.logprobs or [])[0][ids[0]].rank == 9
    assert completion.cumulative_logprob == -6.0


def test_prompt_logprobs_come_once(processor: OutputProcessor) -> None:
    done = _add(processor, "delta", prompt_logprobs=1)
    rows: list[TokenLogprobs | None] = [None]
    rows += [TokenLogprobs([i, 3, 4], [-2.0, -1.0, -1.5], 5) for i in done.prompt_token_ids[1:]]
    [first], _ = processor.process([_out("r", "a", prompt_logprobs=rows)])
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(done.prompt_token_ids)
    scored = first.prompt_logprobs[1]
    assert scored is not None and list(scored) == [done.prompt_token_ids[1], 3]
    assert scored[done.prompt_token_ids[1]].decoded_token == "p"
    [second], _ = processor.process([_out("r", "b", "length")])
    assert second.prompt_logprobs is None


def test_texts_of_single_tokens() -> None:
    texts = TokenTexts(TOY.tk)
    smile = [TOY.tk.token_to_id(byte_char(b)) for b in "🙂".encode()]
    before = _ids("ab")
    assert texts(_ids("a")[0], []) == "a"
    for at in range(3):
        assert texts(smile[at], [*before, *smile[:at]]) == ""
    assert texts(smile[3], [*before, *smile[:3]]) == "🙂"
    assert texts(TOY.eos_ids[0], []) == "</s>"
    sp = sp_tokenizer()
    assert TokenTexts(sp.tk)(sp.tk.token_to_id("▁Hello"), []) == " Hello"
    assert TokenTexts(sp.tk)(sp.tk.token_to_id("▁▁"), []) == "  "
    assert TokenTexts(None)(5, []) is None
    row = position_logprobs(TokenLogprobs([5], [-1.0], 2), 0, TokenTexts(None), [])
    assert (row[5].rank, row[5].decoded_token) == (2, None)


def test_detokenize_false_and_no_tokenizer(processor: OutputProcessor) -> None:
    _add(processor, "final", detokenize=False)
    [result], _ = processor.process([_out("r", "ab", "length")])
    assert (result.outputs[0].text, result.outputs[0].token_ids) == ("", _ids("ab"))
    bare = OutputProcessor(None)
    bare.add(InputProcessor(None, Limits(64, 300)).process("r", [1, 2]), "final")
    [result], _ = bare.process([_out("r", "ab", "length")])
    assert (result.outputs[0].text, result.prompt) == ("", None)


def test_fast_enough(processor: OutputProcessor) -> None:
    """25,000 tokens a second on one core, with room for the rest of the front; the bound is
    loose, for loaded machines."""
    names = [str(i) for i in range(64)]
    for name in names:
        processor.add(INPUTS.process(name, "p", SamplingParams(max_tokens=None)), "delta")
    ids = _ids("some text")
    began = time.process_time()
    for step in range(100):
        outputs = [EngineOutput(request_id=n, new_token_ids=[ids[step % 9]]) for n in names]
        processor.process(outputs)
    rate = 6400 / (time.process_time() - began)
    assert rate > 25_000, rate
