"""One request's walk through a grammar: which tokens may come next.

Fail-closed: whenever the matcher is not sure, no token is legal, and the sampler ends the row of
such a request with an error. End tokens never reach the library: exactly the request's own set is
legal where the text may end.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import llguidance
import numpy as np

from jaxengine.sched.grammar import Grammar
from jaxengine.sched.plan import Int32

log = logging.getLogger(__name__)
PARALLEL_FROM = 4  # matchers; below that threads cost more than they bring


@dataclass(frozen=True)
class Compiled:
    """A grammar ready to be copied for each request."""

    prototype: llguidance.LLMatcher
    compiled_eos: tuple[int, ...]  # end tokens that the library may set in its masks
    num_ids: int  # ids that the library knows
    width: int  # of the logits


CompiledFuture = Future[Compiled]


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

    @property
    def ready(self) -> bool:
        """The grammar is compiled. Never true after a failure: see `failure`."""
        if self._inner is None and self._future.done() and self.failure is None:
            self._compiled = self._future.result()
            self._inner = self._compiled.prototype.deep_copy()
        return self._inner is not None

    @property
    def failure(self) -> str | None:
        """Why the grammar did not compile; None while it compiles and when it did."""
        if not self._future.done():
            return None
        if self._future.cancelled():
            return "the grammar's compilation was cancelled"
        error = self._future.exception()
        return None if error is None else str(error)

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
        if inner is None or self._ended:
            return self._fail(f"tokens {list(token_ids)} cannot follow")
        if text and not (self._known(text) and inner.try_consume_tokens(text) == len(text)):
            return self._fail(f"tokens {text} are not allowed")
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
        if num_tokens and self._ended:
            self._ended = False
            num_tokens -= 1
        inner = self._working()
        if num_tokens and (inner is None or not inner.rollback(num_tokens)):
            self._fail("accepted tokens could not be undone")

    def fill_bitmask(self, row: Int32) -> None:
        """Write the allowed next tokens into `row` [ceil(V / 32)]; all zero when in doubt."""
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
        `finish_row` must follow)."""
        inner = None if self._ended else self._working()
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
        if self._inner is not None and self._inner.is_error():
            self._fail(self._inner.get_error().splitlines()[0])
            return None
        return self._inner

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
        matcher.fill_bitmask(out[i])
    if len(batch) < PARALLEL_FROM or not out.flags.c_contiguous:
        for matcher, i in rows:
            matcher.fill_bitmask(out[i])
        return
    try:
        _executor().unsafe_compute_mask_ptr(batch, out.ctypes.data, out.shape[1] * 4, len(out))
    except Exception:  # find the one at fault, alone
        log.exception("structured output: the masks could not be computed together")
        for matcher, i in rows:
            matcher.fill_bitmask(out[i])
        return
    for matcher, i in rows:
        matcher.finish_row(out[i])


def fill_draft_bitmasks(matcher: Grammar, drafts: Sequence[int], out: Int32) -> int:
    """Masks for a row with K drafts: `out` [1 + K, ceil(V / 32)], row k after k drafts.

    Returns how many drafts the grammar allows. Rows after the first refused draft repeat the mask
    that refused it: their tokens are never kept, and no row is ever left open.
    """
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
