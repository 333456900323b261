"""A limit for how long a model thinks: after so many tokens of thought their end is forced.

The limit is a grammar that allows everything until the limit is reached and then one token after
the other of the end. The scheduler asks for its masks only from the output token on at which that
may begin (`Request.grammar_from`), and forgets it once the thought is over: a request far from its
limit costs no mask and no wait. Counting follows vLLM's `thinking_token_budget`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxengine.sampling_params import ThinkingBudget
from jaxengine.sched.grammar import Grammar
from jaxengine.sched.plan import Int32

_TAIL = 16  # tokens in which the end of a thought is looked for, where it is no token of its own

Decode = Callable[[Sequence[int]], str]


class State(NamedTuple):
    """phase: before (nothing decided), inside, header (between two messages), aside (in a message
    that is no thought), over."""

    phase: str
    since: int = 0  # tokens before the thought, or before the header
    used: int = 0  # tokens of thought before this message
    forced: int = 0  # of `end`, that were forced or came by themselves


class ThoughtLimit:
    """Implements `jaxengine.sched.grammar.Grammar`; `inner` constrains the whole answer beside."""

    def __init__(
        self, budget: ThinkingBudget, decode: Decode, inner: Grammar | None = None
    ) -> None:
        """`decode` gives the text of ids, special tokens included."""
        self._budget = budget
        self._decode = decode
        self._inner = inner
        self._ids: list[int] = []
        first = "inside" if budget.inside else "header" if budget.channels else "before"
        self._states = [self._limited(State(first))]  # after each token

    @property
    def first(self) -> int:
        """The output token at which masks may be needed for the first time."""
        return 0 if self._inner is not None else self._budget.tokens

    @property
    def ready(self) -> bool:
        return self._inner is None or self._inner.ready

    @property
    def failure(self) -> str | None:
        """As `Matcher.failure`."""
        return None if self._inner is None else self._inner.failure

    @property
    def over(self) -> bool:
        """See `Grammar.over`."""
        return self._inner is None and self._states[-1].phase == "over"

    @property
    def terminated(self) -> bool:
        return self._inner is not None and self._inner.terminated

    def accept(self, token_ids: Sequence[int]) -> bool:
        for token in token_ids:
            if self._next_forced() not in (None, token):
                return False
            self._ids.append(token)
            self._states.append(self._limited(self._after(self._states[-1], token)))
        return self._inner is None or self._inner.accept(token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        count = len(token_ids) if self._inner is None else self._inner.validate(token_ids)
        before, allowed = len(self._ids), 0
        for token in token_ids[:count]:
            if self._next_forced() not in (None, token):
                break
            self._ids.append(token)
            self._states.append(self._limited(self._after(self._states[-1], token)))
            allowed += 1
        del self._ids[before:], self._states[before + 1 :]
        return allowed

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= len(self._ids):
            raise ValueError(f"cannot undo {num_tokens} of {len(self._ids)} accepted tokens")
        kept = len(self._ids) - num_tokens
        del self._ids[kept:], self._states[kept + 1 :]
        if self._inner is not None:
            self._inner.rollback(num_tokens)

    def fill_bitmask(self, row: Int32) -> None:
        if self._inner is None:
            row[:] = -1
        else:
            self._inner.fill_bitmask(row)
        token = self._next_forced()
        if token is not None:
            word = row[token >> 5] & _bit(token)
            row[:] = 0
            row[token >> 5] = word

    # -- the thought ------------------------------------------------------------------------

    def _next_forced(self) -> int | None:
        state = self._states[-1]
        spent = state.used + len(self._ids) - state.since
        if state.phase != "inside" or spent - state.forced < self._budget.tokens:
            return None
        return self._budget.end[state.forced]

    def _limited(self, state: State) -> State:
        """With the tokens of the end that stand there already, when the limit is reached."""
        if state.phase != "inside" or state.forced:
            return state
        spent = len(self._ids) - state.since
        if state.used + spent < self._budget.tokens:
            return state
        end = self._budget.end
        for count in range(min(len(end) - 1, spent), 0, -1):
            if self._ids[-count:] == end[:count]:
                return state._replace(forced=count, used=state.used + count)
        return state

    def _after(self, state: State, token: int) -> State:
        if state.phase == "over":
            return state
        if state.phase == "inside" and self._next_is(state, token):
            done = state.forced + 1 == len(self._budget.end)
            return State("over") if done else state._replace(forced=state.forced + 1)
        if self._budget.channels:
            return self._after_in_channels(state, token)
        if state.phase == "before":
            return self._begun()
        return State("over") if self._ended(state, token) else state

    def _next_is(self, state: State, token: int) -> bool:
        """The token before `token` was followed by a forced one, and this is it."""
        spent = state.used + len(self._ids) - 1 - state.since
        forced = spent - state.forced >= self._budget.tokens
        return forced and token == self._budget.end[state.forced]

    def _begun(self) -> State:
        text = self._decode(self._ids).lstrip()
        begin = self._budget.begin_text
        if text.startswith(begin):
            return State("inside", since=len(self._ids))
        return State("before") if begin.startswith(text) else State("over")

    def _ended(self, state: State, token: int) -> bool:
        if len(self._budget.end) == 1:
            return token == self._budget.end[0]
        tail = self._ids[max(state.since, len(self._ids) - _TAIL) :]
        return self._budget.end_text in self._decode(tail)

    def _after_in_channels(self, state: State, token: int) -> State:
        budget, count = self._budget, len(self._ids)
        if state.phase == "inside":
            if token != budget.end[0]:
                return state
            return State("header", since=count, used=state.used + count - 1 - state.since)
        if state.phase == "aside":
            return State("header", count, state.used) if token == budget.end[0] else state
        if token != budget.begin[0]:
            return state
        header = self._decode(self._ids[state.since :])
        if "to=functions." in header or "final" in header:
            return State("over")
        thought = "analysis" in header or "to=" in header
        return State("inside" if thought else "aside", count, state.used)


def _bit(token: int) -> int:
    """As int32."""
    bit = 1 << (token & 31)
    return bit - (1 << 32) if token & 31 == 31 else bit
