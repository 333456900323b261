"""Compiles constraints to grammars, off the step loop, cached."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import numpy as np

from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.structured import guard
from jaxengine.structured.matcher import Compiled, CompiledFuture, Matcher, fill_measured
from jaxengine.structured.probe import limits
from jaxengine.structured.sandbox import (
    GrammarError,
    GrammarTooComplexError,
    Sandbox,
    first_sentence,
)
from jaxengine.structured.schema import MAX_BYTES
from jaxengine.structured.spec import Kind, Spec, check_structured

log = logging.getLogger(__name__)
TIME_LIMIT = 10.0
CACHE_SIZE = 128
NUM_THREADS = 2
# Masks of longer schemas may be slow: 60 alternatives, which 2,048 characters hold, take 0.03 s of
# CPU at the worst, and the time grows with their cube. Those of a grammar know no bound at all.
TAME_SCHEMA = 2048
CHECKED_AT_ONCE = 4096  # characters of a constraint; the check of a longer one takes milliseconds
MAX_LEFT = 8  # threads that work on in vain (`guard`); with so many, no grammar is built


class Cache[T]:
    """Futures by spec, least recently used out first; one build for equal specs. Thread-safe."""

    def __init__(self, build: Callable[[Spec], T], num_threads: int, size: int) -> None:
        self._build = build
        self._size = size
        self._lock = threading.Lock()
        self._futures: OrderedDict[tuple[Kind, str], Future[T]] = OrderedDict()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")

    def get(self, spec: Spec) -> Future[T]:
        with self._lock:
            found = self._futures.get(spec.key)
            if found is not None:
                self._futures.move_to_end(spec.key)
                return found
            future = self._pool.submit(self._build, spec)
            self._futures[spec.key] = future
            while len(self._futures) > self._size:
                self._futures.popitem(last=False)
        future.add_done_callback(lambda done: self._forget_if_late(spec, done))
        return future

    def _forget_if_late(self, spec: Spec, done: Future[T]) -> None:
        """The same text may pass on a less busy machine; other failures are for good."""
        if done.cancelled() or isinstance(done.exception(), GrammarTooComplexError):
            self.forget(spec, done)

    def forget(self, spec: Spec, future: Future[T]) -> None:
        """Build it anew when it is asked for again."""
        with self._lock:
            if self._futures.get(spec.key) is future:
                del self._futures[spec.key]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Validator:
    """Says whether constraints can be enforced, without a tokenizer: for the API process.

    A constraint gets half of `time_limit` seconds here; the other half is for building it again
    beside the engine.
    """

    def __init__(
        self,
        time_limit: float = TIME_LIMIT,
        num_threads: int = NUM_THREADS,
        cache_size: int = CACHE_SIZE,
    ) -> None:
        self._sandbox = Sandbox(time_limit / 2)
        self._cache = Cache(self._sandbox.build, num_threads, cache_size)

    def submit(self, spec: Spec) -> Future[str]:
        """The grammar's text, later; or GrammarError (a ValueError), which is the client's fault.
        In asyncio: `await asyncio.wrap_future(validator.submit(spec))`."""
        return self._cache.get(spec)

    def check(self, spec: Spec) -> None:
        """Block until it is known. Raises GrammarError."""
        self.submit(spec).result()

    def close(self) -> None:
        self._cache.close()
        self._sandbox.close()


class GrammarCompiler:
    """Grammars of one tokenizer. `vocab_size` is the width of the logits: ids beyond the
    tokenizer's are never legal. The tokenizer is prepared once, by the first compilation."""

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_ids: Sequence[int],
        *,
        time_limit: float = TIME_LIMIT,
        num_threads: int = NUM_THREADS,
        cache_size: int = CACHE_SIZE,
        validator: Validator | None = None,
    ) -> None:
        """Raises ValueError when there is no end token or one outside the logits."""
        if not eos_ids:
            raise ValueError("structured output needs an end token, and the model has none")
        if not all(0 <= token < vocab_size for token in eos_ids):
            raise ValueError(f"end tokens {list(eos_ids)} are not all below {vocab_size}")
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = list(dict.fromkeys(eos_ids))
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._validator = validator or Validator(time_limit, num_threads, cache_size)
        self._cache = Cache(self._build, num_threads, cache_size)
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="constraint")

    def compile(self, spec: Spec) -> CompiledFuture:
        """The compiled grammar, later; at once when cached. Fails with GrammarError."""
        future = self._cache.get(spec)
        if future.done() and not future.cancelled() and not future.exception():
            if future.result().worn:
                self._cache.forget(spec, future)
                return self._cache.get(spec)
        return future

    def validate(self, spec: Spec) -> None:
        """Block until it is known whether `spec` can be enforced. Raises GrammarError."""
        self._validator.check(spec)

    def matcher(self, spec: Spec, eos_ids: Sequence[int] | None = None) -> Matcher:
        """A request's Grammar, `ready` when compiled; its `failure` says why it never will be."""
        return Matcher(self.compile(spec), self._eos_ids if eos_ids is None else eos_ids)

    def matcher_of(
        self, asked: StructuredOutputsParams, eos_ids: Sequence[int] | None = None
    ) -> Matcher:
        """`matcher` of a constraint as the request has it. A long one is checked in a thread, and
        its faults are `failure`s. Raises ValueError for those of a short one."""
        if _length(asked) <= CHECKED_AT_ONCE:
            return self.matcher(_spec_of(asked), eos_ids)
        later: CompiledFuture = Future()

        def check() -> None:
            try:
                compiled = self.compile(_spec_of(asked))
            except Exception as error:  # noqa: BLE001 - raised to whoever asks
                later.set_exception(error)
            else:
                compiled.add_done_callback(hand_on)

        def hand_on(compiled: CompiledFuture) -> None:
            if compiled.cancelled():
                later.cancel()
            elif error := compiled.exception():
                later.set_exception(error)
            else:
                later.set_result(compiled.result())

        self._checks.submit(check)
        return Matcher(later, self._eos_ids if eos_ids is None else eos_ids)

    def close(self) -> None:
        """Take no more work and end the child processes."""
        self._checks.shutdown(wait=False, cancel_futures=True)
        self._cache.close()
        self._validator.close()

    def prepare(self) -> llguidance.LLTokenizer:
        """Build the vocabulary now (0.5 s for 49k tokens) instead of with the first grammar."""
        with self._lock:
            if self._tokenizer is None:
                start = time.perf_counter()
                self._tokenizer = self._prepare()
                log.info("structured output: vocabulary in %.2f s", time.perf_counter() - start)
            return self._tokenizer

    def _prepare(self) -> llguidance.LLTokenizer:
        # the library wants room for every id of the tokenizer, even where the logits end sooner
        sized = llguidance.LLTokenizer(self._tokenizer_json, eos_token=self._eos_ids)
        if sized.vocab_size >= self._vocab_size:
            return sized
        return llguidance.LLTokenizer(
            self._tokenizer_json, n_vocab=self._vocab_size, eos_token=self._eos_ids
        )

    def _build(self, spec: Spec) -> Compiled:
        if guard.num_left() >= MAX_LEFT:
            raise GrammarTooComplexError(
                f"{spec.field} cannot be checked now: earlier constraints keep the engine busy"
            )
        grammar = self._validator.submit(spec).result()
        tokenizer = self.prepare()
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise GrammarError(
                f"{spec.field} cannot be enforced: {first_sentence(matcher.get_error())}"
            )
        compiled = Compiled(
            prototype=matcher,
            compiled_eos=tuple(tokenizer.eos_tokens),
            num_ids=tokenizer.vocab_size,
            width=self._vocab_size,
            field=spec.field,
            wild=_is_wild(spec),
        )
        self._try_first_mask(spec, compiled)
        return compiled

    def _try_first_mask(self, spec: Spec, compiled: Compiled) -> None:
        done: CompiledFuture = Future()
        done.set_result(compiled)
        row = np.zeros(-(-self._vocab_size // 32), np.int32)
        first = Matcher(done, self._eos_ids)
        if first.ready:
            fill_measured([(first, row)])
        if first.failure is not None:
            raise GrammarError(first.failure)
        if not row.any():
            raise GrammarError(f"{spec.field} cannot be enforced: no token can begin it")


def _spec_of(asked: StructuredOutputsParams) -> Spec:
    spec = check_structured(asked)
    assert spec is not None
    return spec


def _length(asked: StructuredOutputsParams) -> int:
    """In characters; of an object, which would have to be walked, more than any."""
    if isinstance(asked.json, dict) or isinstance(asked.structural_tag, dict):
        return MAX_BYTES
    texts = (asked.json, asked.regex, asked.grammar, asked.structural_tag, *(asked.choice or ()))
    return sum(len(text) for text in texts if isinstance(text, str))


def _is_wild(spec: Spec) -> bool:
    """Nothing bounds its masks but the guard. Regular expressions and choices are one lexeme, and
    what a lexeme may cost is limited (`probe.limits`)."""
    return spec.kind == "grammar" or (spec.kind == "json" and len(spec.text) > TAME_SCHEMA)
