"""Requests under a grammar: held back until it is ready, masked from where it begins."""

from __future__ import annotations

from collections.abc import Sequence

from planning import answer, config, names, planned, request

from jaxengine.sched.plan import Int32
from jaxengine.sched.scheduler import Scheduler


class DigitGrammar:
    """Allows tokens below 10; `ready` by hand."""

    def __init__(self) -> None:
        self.ready, self.terminated, self.over = False, False, False
        self.accepted: list[int] = []

    def accept(self, token_ids: Sequence[int]) -> bool:
        self.accepted += token_ids
        return all(token < 10 for token in token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        return sum(token < 10 for token in token_ids)

    def rollback(self, num_tokens: int) -> None:
        del self.accepted[-num_tokens:]

    def fill_bitmask(self, row: Int32) -> None:
        row[:] = 0x3FF


def test_a_grammar_that_begins_late_and_ends_early() -> None:
    """Its masks are asked for from its first token on, and it sees the tokens before too; when it
    is over it is forgotten."""
    scheduler = Scheduler(config())
    grammar = DigitGrammar()
    grammar.ready = True
    scheduler.add(request("g", grammar=grammar, grammar_from=3))
    flight = [planned(scheduler)]
    constrained = []
    for _ in range(6):
        flight.append(planned(scheduler))
        answer(scheduler, flight[0])
        constrained.append(flight.pop(0).has_grammar)
        if len(constrained) == 5:
            assert len(grammar.accepted) == 5
            grammar.over = True
    assert constrained == [False, False, False, True, True, True]
    assert len(grammar.accepted) == 6
    answer(scheduler, flight.pop())
    assert len(grammar.accepted) == 6 and not planned(scheduler).has_grammar


def test_grammar_holds_its_request_back_and_sees_every_kept_token() -> None:
    scheduler = Scheduler(config())
    grammar = DigitGrammar()
    scheduler.add(request("g", grammar=grammar))
    scheduler.add(request("plain"))
    plan = planned(scheduler)
    assert names(plan) == ["plain"] and not plan.has_grammar
    answer(scheduler, plan)
    grammar.ready = True
    one = planned(scheduler)
    assert one.has_grammar and not one.pending_grammar
    two = planned(scheduler)
    assert two.pending_grammar
    answer(scheduler, one, 7)
    answer(scheduler, two, 8)
    assert grammar.accepted == [7, 8]
    updates = answer(scheduler, planned(scheduler), 70)
    assert [(u.request.request_id, u.finish_reason) for u in updates] == [
        ("plain", None),
        ("g", "error"),
    ]
