"""One request's walk through a grammar: which tokens may come next.

Fail-closed: whenever the matcher is not sure, no token is legal, and the sampler ends the row of
such a request with an error. End tokens never reach the library: exactly the request's own set is
legal where the text may end.

The time is bounded: a matcher whose masks may be slow, or were, is *measured*. Its masks are worked
out under guard, one may use MASK_SECONDS of CPU, and all of them EARNED seconds for each token with
ALLOWANCE in hand; beyond that the request ends. What `accept` and `validate` ask of the library
holds the interpreter and cannot be left behind, so a measured matcher asks it only where a mask has
been before: a mask follows every legal token to its end, and costs about as much.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import llguidance
import numpy as np

from jaxengine.sched.grammar import Grammar
from jaxengine.sched.plan import Int32
from jaxengine.structured import guard
from jaxengine.structured.sandbox import first_sentence

log = logging.getLogger(__name__)
PARALLEL_FROM = 4  # matchers; below that threads cost more than they bring

MASK_SECONDS = 0.25  # of CPU, for one mask
ALLOWANCE = 0.5  # seconds of CPU in hand
EARNED = 0.01  # seconds of CPU for each token; usual masks take a tenth of a millisecond
WATCHED = 64  # masks that are measured after one that took longer than EARNED


@dataclass
class Compiled:
    """A grammar ready to be copied for each request. The copies share the library's lexer."""

    prototype: llguidance.LLMatcher
    compiled_eos: tuple[int, ...]  # end tokens that the library may set in its masks
    num_ids: int  # ids that the library knows
    width: int  # of the logits
    field: str = "structured_outputs"
    wild: bool = False  # nothing is known of how long a mask may take
    refused: str | None = None  # why it may be used no more: a mask that does not end has its lexer
    worn: bool = False  # its lexer has failed: whoever comes next needs another one


CompiledFuture = Future[Compiled]


class Ahead(NamedTuple):
    """A look ahead from the present state: how many of `drafts` are legal in a row, and the masks
    before the first of them and after each."""

    drafts: list[int]
    allowed: int
    masks: Int32


class Matcher:
    """Implements `jaxengine.sched.grammar.Grammar`. Not thread-safe: the step loop owns it."""

    def __init__(self, compiled: CompiledFuture, eos_ids: Sequence[int]) -> None:
        """`eos_ids`: the request's one set of end tokens. Raises ValueError when it is empty."""
        if not eos_ids:
            raise ValueError("structured output needs an end token, and the model has none")
        self._future = compiled
        self._eos = np.asarray(sorted(set(eos_ids)), np.int32)
        self._eos_set = frozenset(eos_ids)
        self._compiled: Compiled | None = None
        self._inner: llguidance.LLMatcher | None = None
        self._num_accepted = 0  # end token included
        self._ended = False
        self._broken = False
        self._reason: str | None = None  # why it broke, where that is the constraint's fault
        self._watched = 0  # masks to measure still
        self._in_hand = ALLOWANCE
        self._charged_at = 0  # `_num_accepted` when time was last charged
        self._ahead: Ahead | None = None

    @property
    def ready(self) -> bool:
        """The grammar is compiled. Never true after a failure: see `failure`."""
        if self._inner is None and self._future.done() and self.failure is None:
            self._compiled = self._future.result()
            self._inner = self._compiled.prototype.deep_copy()
        return self._inner is not None

    @property
    def failure(self) -> str | None:
        """Why the request must end, through a fault of its constraint: it did not compile, or asks
        too much of a step. None while it compiles and while all is well."""
        if self._reason is not None or not self._future.done():
            return self._reason
        if self._future.cancelled():
            return "the grammar's compilation was cancelled"
        error = self._future.exception()
        return self._future.result().refused if error is None else str(error)

    @property
    def measured(self) -> bool:
        """Its masks are worked out under guard, and charged."""
        return self._watched > 0 or (self._compiled is not None and self._compiled.wild)

    @property
    def terminated(self) -> bool:
        """Only an end token may follow."""
        if self._ended:
            return True
        inner = self._working()
        return inner is not None and bool(inner.is_stopped() and inner.is_accepting())

    @property
    def first(self) -> int:
        """The output token at which it may forbid something for the first time."""
        return 0

    @property
    def over(self) -> bool:
        """Never: an end token may be all that is left."""
        return False

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advance. False when a token is not allowed: from then on no token is."""
        inner = self._working()
        text, end = self._split(token_ids)
        if not token_ids:
            return not self._broken
        self._ahead = None
        if inner is None or self._ended:
            return self._fail(f"tokens {list(token_ids)} cannot follow")
        began = time.thread_time() if self.measured else 0.0
        if text and not (self._known(text) and inner.try_consume_tokens(text) == len(text)):
            if self._working() is None:  # the library has given up
                return False
            return self._fail(f"tokens {text} are not allowed")
        if began:
            self._in_hand -= time.thread_time() - began
        if end:
            if end > 1 or not inner.is_accepting():
                return self._fail("an end token is not allowed")
            self._ended = True
        self._num_accepted += len(token_ids)
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens are allowed in a row from here; does not advance."""
        inner = self._working()
        if inner is None or self._ended:
            return 0
        if self.measured:
            return self.look_ahead(token_ids).allowed
        text, end = self._split(token_ids)
        known = next((i for i, t in enumerate(text) if not self._known([t])), len(text))
        count = int(inner.validate_tokens(text[:known])) if known else 0
        if count < len(text) or not end or inner.is_error():
            return count
        if count and inner.try_consume_tokens(text) != count:
            self._fail("tokens were allowed and then were not")
            return 0
        may_end = inner.is_accepting()
        if count and not inner.rollback(count):
            self._fail("a look ahead could not be undone")
            return 0
        return count + 1 if may_end else count

    def rollback(self, num_tokens: int) -> None:
        """Undo the last accepted tokens. Raises ValueError for more than were accepted."""
        if not 0 <= num_tokens <= self._num_accepted:
            raise ValueError(f"cannot undo {num_tokens} of {self._num_accepted} accepted tokens")
        self._num_accepted -= num_tokens
        self._ahead = None
        if num_tokens and self._ended:
            self._ended = False
            num_tokens -= 1
        inner = self._working()
        if num_tokens and (inner is None or not inner.rollback(num_tokens)):
            self._fail("accepted tokens could not be undone")

    def fill_bitmask(self, row: Int32) -> None:
        """Write the allowed next tokens into `row` [ceil(V / 32)]; all zero when in doubt."""
        if self.measured:
            fill_measured([(self, row)])
            return
        began = time.perf_counter()
        self.compute(row)
        if time.perf_counter() - began > EARNED:
            self.watch()

    def look_ahead(self, token_ids: Sequence[int]) -> Ahead:
        """As `validate`, with the masks on the way. It is remembered: a second look at the same
        tokens, or at fewer, costs nothing."""
        drafts = list(token_ids)
        known = self._ahead
        if known is not None and known.drafts[: len(drafts)] == drafts:
            allowed = min(known.allowed, len(drafts))
            return Ahead(drafts, allowed, known.masks[: 1 + allowed])
        width = 0 if self._compiled is None else self._compiled.width
        masks: Int32 = np.zeros((1 + len(drafts), -(-width // 32)), np.int32)
        found: list[int] = []
        job = guard.Job(lambda: found.append(self._walk(drafts, masks)), self._compiled)
        if self.measured:
            guard.run([job], MASK_SECONDS)
            if not self.charge(job.seconds):
                return Ahead(drafts, 0, np.zeros_like(masks[:1]))
        else:
            began = time.perf_counter()
            job.work()
            if time.perf_counter() - began > EARNED * len(masks):
                self.watch()
        self._ahead = Ahead(drafts, found[0], masks[: 1 + found[0]])
        return self._ahead

    def _walk(self, drafts: list[int], masks: Int32) -> int:
        """How many of the drafts are legal in a row, with the masks; the state stays. It stops
        early where masks are slow."""
        began = time.thread_time()
        text, end = self._split(drafts)
        self.compute(masks[0])
        inner, taken = self._working(), 0
        if inner is None or self._ended:
            return 0
        for token in text:
            # the mask may have been the last, or nobody waits for this walk any longer
            if self._working() is None or time.thread_time() - began > MASK_SECONDS / 4:
                break
            if not self._known([token]) or inner.validate_tokens([token]) != 1:
                break
            if inner.try_consume_tokens([token]) != 1:
                self._fail("a token was allowed and then was not")
                break
            taken += 1
            self.compute(masks[taken])
        ends = taken == len(text) and end > 0 and inner.is_accepting()
        if ends:
            _allow(masks[taken + 1], self._eos)
        if taken and (self._working() is None or not inner.rollback(taken)):
            self._fail("a look ahead could not be undone")
            return 0
        return taken + 1 if ends else taken

    @property
    def group(self) -> object:
        """What it shares the library's lexer by: masks of one group wait for each other."""
        return self._compiled

    def watch(self) -> None:
        """A mask was slow: measure the next ones."""
        self._watched = WATCHED

    def charge(self, seconds: float | None) -> bool:
        """Take note of what a mask took, None for one that was given up. False when it was too
        much: from then on no token is allowed."""
        field = "" if self._compiled is None else self._compiled.field
        if seconds is None:
            self._reason = (
                f"{field} is too complex: one step's legal tokens take more than "
                f"{MASK_SECONDS:g} s to work out; make it smaller or less ambiguous"
            )
            if self._compiled is not None:
                self._compiled.refused = self._reason
            return self._fail(self._reason)
        earned = EARNED * max(0, self._num_accepted - self._charged_at)
        self._charged_at = self._num_accepted
        self._in_hand = min(ALLOWANCE, self._in_hand + earned) - seconds
        self._watched = WATCHED if seconds > EARNED else max(0, self._watched - 1)
        if self._in_hand < 0:
            self._reason = (
                f"{field} is too complex: the legal tokens take more than {EARNED * 1000:g} ms a "
                "token to work out; make it smaller or less ambiguous"
            )
            return self._fail(self._reason)
        return True

    def compute(self, row: Int32) -> None:
        """`fill_bitmask` without a bound."""
        row[:] = 0
        if self._ended:
            _allow(row, self._eos)
            return
        inner = self._working()
        if inner is None or self._compiled is None:
            return
        words = -(-self._compiled.num_ids // 32)
        direct = words == row.size and row.flags.c_contiguous
        target = row if direct else np.zeros(words, np.int32)
        try:
            inner.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        except Exception:  # one request's failure must not stop the step
            log.exception("structured output: the mask could not be computed")
            row[:] = 0
            self._broken = True
            return
        if not direct:
            shared = min(words, row.size)
            row[:shared] = target[:shared]
        self.finish_row(row)

    def batchable(self, words: int) -> llguidance.LLMatcher | None:
        """The library's matcher if it can write a mask of `words` words itself (`fill_bitmasks`;
        `finish_row` must follow). None where it must be measured."""
        inner = None if self._ended else self._working()
        if self.measured:
            return None
        fits = self._compiled is not None and -(-self._compiled.num_ids // 32) == words
        return inner if fits else None

    def finish_row(self, row: Int32) -> None:
        """The library's mask in `row` becomes ours: its end tokens out, the request's in."""
        inner = self._working()
        if inner is None or self._compiled is None:
            row[:] = 0
            return
        for token in {*self._compiled.compiled_eos, *self._eos_set}:
            row[token >> 5] &= ~_bit(token)
        if self._compiled.num_ids > self._compiled.width:
            _cut(row, self._compiled.width)
        if inner.is_accepting():
            _allow(row, self._eos)

    def _working(self) -> llguidance.LLMatcher | None:
        """The library's matcher, or None when it is not there or has failed."""
        if self._broken or not (self._inner is not None or self.ready):
            return None
        if self._compiled is not None and self._compiled.refused is not None:
            return None
        if self._inner is not None and self._inner.is_error():
            self._give_up(self._inner.get_error())
            return None
        return self._inner

    def _give_up(self, error: str) -> None:
        """The library has refused to go on: a limit of its own, or text that nothing can follow."""
        assert self._compiled is not None
        if error.startswith("NoExtension"):
            why = "no token of the model can follow the text so far"
        else:
            why = f"{first_sentence(error)}; make it smaller or less ambiguous"
        self._compiled.worn |= not error.startswith(("NoExtension", "parser error"))
        self._reason = f"{self._compiled.field} cannot be enforced to the end: {why}"
        self._fail(self._reason)

    def _fail(self, why: str) -> bool:
        if not self._broken:
            log.warning("structured output: %s; the request ends", why)
        self._broken = True
        return False

    def _split(self, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """The tokens before the first end token, and how many there are from it on."""
        ids = list(token_ids)
        at = next((i for i, t in enumerate(ids) if t in self._eos_set), len(ids))
        return ids[:at], len(ids) - at

    def _known(self, token_ids: list[int]) -> bool:
        # the library refuses all further work after an id out of range
        most = min(self._compiled.num_ids, self._compiled.width) if self._compiled else 0
        return 0 <= min(token_ids) and max(token_ids) < most


def fill_bitmasks(matchers: Sequence[Grammar | None], out: Int32) -> None:
    """Masks of several requests at once: row i of `out` [S, ceil(V / 32)] for matcher i.

    Rows without a matcher allow every token; rows beyond the matchers are left alone.
    """
    batch: list[tuple[llguidance.LLMatcher, int]] = []
    rows: list[tuple[Matcher, int]] = []
    measured: list[tuple[Matcher, Int32]] = []
    for i, matcher in enumerate(matchers):
        if matcher is None:
            out[i] = -1
            continue
        if isinstance(matcher, Matcher):
            inner = matcher.batchable(out.shape[1])
            if inner is not None:
                batch.append((inner, i))
                rows.append((matcher, i))
                continue
            if matcher.measured:
                measured.append((matcher, out[i]))
                continue
        matcher.fill_bitmask(out[i])
    if measured:
        fill_measured(measured)
    if len(batch) < PARALLEL_FROM or not out.flags.c_contiguous:
        for matcher, i in rows:
            matcher.fill_bitmask(out[i])
        return
    began = time.perf_counter()
    try:
        _executor().unsafe_compute_mask_ptr(batch, out.ctypes.data, out.shape[1] * 4, len(out))
    except Exception:  # find the one at fault, alone
        log.exception("structured output: the masks could not be computed together")
        for matcher, i in rows:
            matcher.fill_bitmask(out[i])
        return
    slow = time.perf_counter() - began > EARNED * max(1.0, len(batch) / guard.MAX_THREADS)
    for matcher, i in rows:
        matcher.finish_row(out[i])
        if slow:  # whose mask it was, the next ones will show
            matcher.watch()


def fill_measured(rows: Sequence[tuple[Matcher, Int32]]) -> None:
    """Masks of measured matchers, each within its bounds or all zero."""
    jobs = []
    for matcher, row in rows:
        # a thread that nobody waits for may write later than anybody reads
        mask: Int32 = np.zeros(row.size, np.int32)
        jobs.append((guard.Job(functools.partial(matcher.compute, mask), matcher.group), mask))
    guard.run([job for job, _ in jobs], MASK_SECONDS)
    for (matcher, row), (job, mask) in zip(rows, jobs, strict=True):
        row[:] = mask if matcher.charge(job.seconds) else 0


def fill_draft_bitmasks(matcher: Grammar, drafts: Sequence[int], out: Int32) -> int:
    """Masks for a row with K drafts: `out` [1 + K, ceil(V / 32)], row k after k drafts.

    Returns how many drafts the grammar allows. Rows after the first refused draft repeat the mask
    that refused it: their tokens are never kept, and no row is ever left open.
    """
    if isinstance(matcher, Matcher) and matcher.ready:
        _, allowed, masks = matcher.look_ahead(drafts)
        out[: allowed + 1] = masks
        out[allowed + 1 :] = out[allowed]
        return allowed
    allowed = matcher.validate(drafts)
    matcher.fill_bitmask(out[0])
    for k in range(allowed):
        if not matcher.accept(drafts[k : k + 1]):
            out[k + 1 :] = 0
            return k
        matcher.fill_bitmask(out[k + 1])
    matcher.rollback(allowed)
    out[allowed + 1 :] = out[allowed]
    return allowed


@functools.cache
def _executor() -> llguidance.LLExecutor:
    return llguidance.LLExecutor()


def _bit(token: int) -> np.int32:
    return np.int32(np.uint32(1 << (token & 31)).view(np.int32))


def _allow(row: Int32, tokens: Int32) -> None:
    for token in tokens.tolist():
        row[token >> 5] |= _bit(token)


def _cut(row: Int32, width: int) -> None:
    """No id from `width` on."""
    row[-(-width // 32) :] = 0
    if width % 32:
        row[width >> 5] &= np.int32((1 << (width & 31)) - 1)
