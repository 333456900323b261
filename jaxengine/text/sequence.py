"""One of a request's n completions while it runs: its text, tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxengine.text.detokenizer import Detokenizer
from jaxengine.text.logprobs import PositionLogprobs, TokenTexts, position_logprobs
from jaxengine.text.outputs import CompletionOutput
from jaxengine.text.stop import StopChecker
from jaxengine.wire.messages import EngineOutput

if TYPE_CHECKING:
    from jaxengine.text.reasoning import AnswerGate

_CONTEXT = 4


@dataclass(slots=True)
class Completion:
    """`text`, `token_ids` and `logprobs` hold what was not taken yet (`take`)."""

    index: int
    detokenizer: Detokenizer | None  # None: no text
    stops: StopChecker | None
    stop_ids: Mapping[int, str]  # ids of special tokens whose text is a stop string
    silent_ids: frozenset[int]  # EOS and stop ids: no text when they end the output
    include_stop: bool
    min_tokens: int
    num_logprobs: int | None
    texts: TokenTexts
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    gate: AnswerGate | None = None  # stop strings count in the answer alone, not in thoughts
    in_answer: bool = True  # the latest text is answer; kept with a gate
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    num_tokens: int = 0
    num_taken: int = 0  # of these, by the last `take`
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    embedding: bytes | None = None
    context: list[int] = field(default_factory=list)  # last ids, for texts of split characters

    def add(self, output: EngineOutput) -> int:
        """Take a step's output in; returns how many of its tokens belong to the completion
        (fewer where a stop string completed before the last)."""
        ids = output.new_token_ids
        matched = None
        self.embedding = output.embedding
        if self.detokenizer is None:
            kept = len(ids)
        else:
            kept, matched = self._add_text(ids, output.finish_reason)
            if kept < len(ids):
                ids = ids[:kept]
        self.token_ids += ids
        self.num_tokens += kept
        if self.num_logprobs is not None and output.logprobs is not None:
            self._add_logprobs(ids, output)
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
        elif output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason, output.error)
        return kept

    def finish(self, reason: str, stop_reason: int | str | None, error: str | None) -> None:
        """End without a stop string: what was held back comes out (and may still hold one)."""
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
        if self.detokenizer is None:
            return
        text = self.detokenizer.flush()
        if self.stops is None:
            self.text.append(text)
            return
        matched = self._search(text, self.num_tokens > self.min_tokens, ended=True)
        if matched is None:
            self.text.append(self.stops.flush())
        elif reason in ("stop", "length"):
            self.finish_reason, self.stop_reason = "stop", matched

    def is_due(self, interval: int) -> bool:
        """Is it time to show the news: nothing was shown yet, it ended, or so many tokens came?"""
        if self.finish_reason is not None or self.num_taken == 0:
            return True
        return self.num_tokens - self.num_taken >= interval

    def take(self, *, keep: bool) -> CompletionOutput:
        """The news, or with `keep` everything so far (the lists are copies)."""
        self.num_taken = self.num_tokens
        output = CompletionOutput(
            self.index,
            "".join(self.text),
            self.token_ids,
            self.cumulative_logprob,
            self.logprobs,
            self.finish_reason,
            self.stop_reason,
            self.error,
            self.embedding,
        )
        if keep:
            self.text = [output.text]
            output.token_ids = list(self.token_ids)
            output.logprobs = None if self.logprobs is None else list(self.logprobs)
        else:
            self.text, self.token_ids = [], []
            self.logprobs = None if self.num_logprobs is None else []
        return output

    def _add_text(self, ids: Sequence[int], finish_reason: str | None) -> tuple[int, str | None]:
        """Detokenize and search; returns (tokens kept, stop string found)."""
        detokenizer, stops = self.detokenizer, self.stops
        assert detokenizer is not None
        silent = (
            finish_reason == "stop"
            and not self.include_stop
            and bool(ids)
            and ids[-1] in self.silent_ids
        )
        if stops is None:
            text = detokenizer.push(ids[:-1] if silent else ids)
            if text:
                self.text.append(text)
            return len(ids), None
        for at, token_id in enumerate(ids):
            search = self.num_tokens + at + 1 > self.min_tokens
            stop = self.stop_ids.get(token_id) if search and self.in_answer else None
            if stop is not None:
                return at + 1, self._stop_at_special(stop)
            if silent and at == len(ids) - 1:
                break
            matched = self._search(detokenizer.push((token_id,)), search)
            if matched is not None:
                return at + 1, matched
        return len(ids), None

    def _search(self, text: str, search: bool, ended: bool = False) -> str | None:
        """Give out new text, up to a stop string in the answer, which is returned."""
        assert self.stops is not None
        pieces = [(text, True)]
        if self.gate is not None:
            pieces = self.gate.push(text) if text else []
            pieces += self.gate.flush() if ended else []
        for piece, self.in_answer in pieces:
            released, matched = self.stops.push(piece, search=search and self.in_answer)
            if released:
                self.text.append(released)
            if matched is not None:
                return matched
        return None

    def _stop_at_special(self, stop: str) -> str:
        """A special token named as a stop string: it has no text to be found in. What was still
        unfinished before it may hold another stop string, which then came first."""
        assert self.detokenizer is not None and self.stops is not None
        earlier = self._search(self.detokenizer.flush(), True, ended=True)
        if earlier is not None:
            return earlier
        self.text.append(self.stops.flush())
        if self.include_stop:
            self.text.append(stop)
        return stop

    def _add_logprobs(self, ids: Sequence[int], output: EngineOutput) -> None:
        assert self.num_logprobs is not None and output.logprobs is not None
        if self.logprobs is None:
            self.logprobs = []
        total = self.cumulative_logprob or 0.0
        for token_id, entry in zip(ids, output.logprobs, strict=False):
            shown = position_logprobs(entry, self.num_logprobs, self.texts, self.context)
            self.logprobs.append(shown)
            total += shown[token_id].logprob
            self.context = [*self.context[1 - _CONTEXT :], token_id]
        self.cumulative_logprob = total
