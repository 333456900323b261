"""Engine outputs -> users' `RequestOutput`s: text, stop strings, log-probabilities, n > 1."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxengine.text.detokenizer import make_detokenizer, token_bytes
from jaxengine.text.logprobs import PositionLogprobs, TokenTexts, prompt_logprobs
from jaxengine.text.outputs import OutputKind, RequestMetrics, RequestOutput
from jaxengine.text.processor import ProcessedRequest
from jaxengine.text.sequence import Completion
from jaxengine.text.stop import StopChecker
from jaxengine.wire.messages import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from jaxengine.text.reasoning import AnswerGate
    from jaxengine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Request:
    processed: ProcessedRequest
    kind: OutputKind
    metrics: RequestMetrics
    completions: dict[str, Completion]  # by engine id, in order of index
    running: int
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int | None = None


class OutputProcessor:
    """Holds the requests in flight. Not thread-safe; one per event loop or LLM.

    Kinds of output: "delta" what is new since the last one; "cumulative" everything so far;
    "final" nothing until all n completions ended. Of a completion that runs, "delta" and
    "cumulative" give the first token at once, and then `stream_interval` tokens at a time, or more
    if the request asks for that.
    """

    def __init__(self, tokenizer: Tokenizer | None, stream_interval: int = 1) -> None:
        self._interval = stream_interval
        self._tk = None if tokenizer is None else tokenizer.tk
        self._table = None if self._tk is None else token_bytes(self._tk)
        self._texts = TokenTexts(self._tk)
        self._specials: dict[str, int] = {}  # text of special tokens
        if self._tk is not None:
            added = self._tk.get_added_tokens_decoder()
            self._specials = {t.content: i for i, t in added.items() if t.special}
        self._requests: dict[str, _Request] = {}
        self._by_child: dict[str, _Request] = {}

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._requests)

    def add(self, processed: ProcessedRequest, kind: OutputKind = "final") -> None:
        """Expect outputs for this request. Raises ValueError for an id in flight."""
        if processed.request_id in self._requests:
            raise ValueError(f"request id {processed.request_id!r} is in use")
        taken = [r.request_id for r in processed.requests if r.request_id in self._by_child]
        if taken:
            raise ValueError(f"request id {taken[0]!r} is in use")
        completions = {
            r.request_id: self._completion(i, r, processed.gate)
            for i, r in enumerate(processed.requests)
        }
        request = _Request(
            processed, kind, RequestMetrics(processed.arrival_time), completions, len(completions)
        )
        self._requests[processed.request_id] = request
        for child in completions:
            self._by_child[child] = request

    def process(self, outputs: Iterable[EngineOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Returns what users get of a step, and the engine ids to abort (a stop string ended
        them, the engine does not know). Outputs of requests not in flight are dropped."""
        now = time.time()
        touched: dict[str, dict[int, Completion]] = {}
        abort: list[str] = []
        for output in outputs:
            request = self._by_child.get(output.request_id)
            if request is None:
                continue
            completion = request.completions[output.request_id]
            self._take_in(request, completion, output, now)
            if completion.finish_reason is not None:
                del self._by_child[output.request_id]
                request.running -= 1
                if output.finish_reason is None:
                    abort.append(output.request_id)
            news = touched.setdefault(request.processed.request_id, {})
            news[completion.index] = completion
        results = []
        for request_id, news in touched.items():
            request = self._requests[request_id]
            interval = max(self._interval, request.processed.params.stream_interval or 1)
            due = [c for c in news.values() if c.is_due(interval)]
            result = self._emit(request, due, now) if due else None
            if result is not None:
                results.append(result)
        return results, abort

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at once, with finish reason "abort". Returns its last output, or None if
        it is not in flight. The engine is to be told by the caller (ids of `ProcessedRequest.
        requests`; it ignores those that ended)."""
        return self._end(request_id, "abort", None)

    def fail(self, request_id: str, error: str) -> RequestOutput | None:
        """As `abort`, with finish reason "error" and its text (the engine died, say)."""
        return self._end(request_id, "error", error)

    def request_ids(self) -> list[str]:
        """Requests in flight, oldest first."""
        return list(self._requests)

    def _end(self, request_id: str, reason: str, error: str | None) -> RequestOutput | None:
        request = self._requests.get(request_id)
        if request is None:
            return None
        ended = [c for c in request.completions if c in self._by_child]
        for child in ended:
            request.completions[child].finish(reason, None, error)
            del self._by_child[child]
        request.running = 0
        completions = [request.completions[c] for c in ended]
        return self._emit(request, completions, time.time())

    def _take_in(
        self, request: _Request, completion: Completion, output: EngineOutput, now: float
    ) -> None:
        metrics = request.metrics
        if request.num_cached_tokens is None:
            # the first admission's: what a preempted request finds again was its own work
            request.num_cached_tokens = output.num_cached_tokens
        if metrics.queued_ts is None and output.times is not None:
            metrics.queued_ts, metrics.scheduled_ts = output.times
        if output.prompt_logprobs is not None:
            request.prompt_logprobs = self._prompt_logprobs(request, output)
        kept = completion.add(output)
        if kept:
            metrics.num_generation_tokens += kept
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now

    def _emit(
        self, request: _Request, completions: list[Completion], now: float
    ) -> RequestOutput | None:
        finished = request.running == 0
        processed = request.processed
        if finished:
            request.metrics.finished_time = now
            del self._requests[processed.request_id]
        if request.kind == "final":
            if not finished:
                return None
            completions = list(request.completions.values())
        elif request.kind == "cumulative":
            completions = list(request.completions.values())
        scores = request.prompt_logprobs
        if request.kind == "delta":
            request.prompt_logprobs = None
        return RequestOutput(
            processed.request_id,
            processed.prompt,
            processed.prompt_token_ids,
            scores,
            [c.take(keep=request.kind == "cumulative") for c in completions],
            finished,
            request.metrics,
            request.num_cached_tokens or 0,
        )

    def _prompt_logprobs(
        self, request: _Request, output: EngineOutput
    ) -> list[PositionLogprobs | None] | None:
        count = request.processed.params.prompt_logprobs
        if count is None or output.prompt_logprobs is None:
            return None
        ids = request.processed.prompt_token_ids
        return prompt_logprobs(output.prompt_logprobs, count, self._texts, ids)

    def _completion(
        self, index: int, request: EngineRequest, gate: Callable[[], AnswerGate] | None
    ) -> Completion:
        params = request.params
        words = params.stop_strings
        detokenizer = None
        if self._tk is not None and params.detokenize:
            detokenizer = make_detokenizer(
                self._tk, self._table, request.prompt_token_ids, params.skip_special_tokens
            )
        return Completion(
            index=index,
            detokenizer=detokenizer,
            stops=StopChecker(words, params.include_stop_str_in_output) if words else None,
            gate=gate() if words and gate is not None else None,
            in_answer=gate is None,
            stop_ids={self._specials[w]: w for w in words if w in self._specials},
            silent_ids=frozenset((*request.eos_token_ids, *(params.stop_token_ids or ()))),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            num_logprobs=params.logprobs,
            texts=self._texts,
            logprobs=None if params.logprobs is None else [],
        )
