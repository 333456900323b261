"""Which rank has which sequence, and what becomes of the sequences of a rank that fails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from jaxengine.front.ranks.replay import continuation, drop_first, replayable
from jaxengine.wire.messages import UNAVAILABLE, EngineOutput, EngineRequest


@dataclass(slots=True)
class Route:
    """One sequence on its way through an engine."""

    request: EngineRequest
    rank: int
    pinned: bool  # its client chose the rank
    key: str | None  # affinity
    tokens: list[int] = field(default_factory=list)  # given out; kept only for replays
    num_tokens: int = 0
    scored: bool = False  # the prompt's log-probabilities were given out
    skip: int = 0  # tokens of a replay from the start that are still to be dropped
    abort_expected: bool = False  # by order of the front: no fault

    def next_request(self) -> EngineRequest:
        """What another rank is to be sent."""
        request, self.skip = continuation(self.request, self.tokens, self.scored)
        return request


@dataclass(frozen=True)
class Sifted:
    """Outputs for the streams, and sequences that can go on elsewhere."""

    outputs: list[EngineOutput]
    moving: list[tuple[Route, EngineOutput]]  # with the output to deliver if no rank takes it


class Routes:
    """Sequences in flight by id. With `replays`, their tokens are kept."""

    def __init__(self, replays: bool) -> None:
        self._replays = replays
        self._routes: dict[str, Route] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def enter(self, route: Route) -> None:
        self._routes[route.request.request_id] = route

    def leave(self, request_id: str) -> Route | None:
        """The sequence ended; None when that was known."""
        return self._routes.pop(request_id, None)

    def has(self, route: Route) -> bool:
        """Whether the sequence has not ended."""
        return self._routes.get(route.request.request_id) is route

    def on(self, rank: int) -> list[Route]:
        """The sequences that `rank` has."""
        return [route for route in self._routes.values() if route.rank == rank]

    def expect_aborts(self) -> None:
        """Whatever is in flight may be aborted by an order of the front."""
        for route in self._routes.values():
            route.abort_expected = True

    def sift(self, rank: int, outputs: Iterable[EngineOutput]) -> Sifted:
        """What of `rank`'s outputs goes to the streams. Outputs of sequences that the rank no
        longer has are dropped."""
        kept: list[EngineOutput] = []
        moving: list[tuple[Route, EngineOutput]] = []
        for output in outputs:
            route = self._routes.get(output.request_id)
            if route is None or route.rank != rank:
                continue
            if output.prompt_logprobs is not None:
                route.scored = True
            if output.new_token_ids:
                self._take(route, output)
                output = self._without_skipped(route, output)
            if output.finish_reason is not None and self._may_move(route, output):
                if output.new_token_ids:
                    kept.append(replace(output, finish_reason=None, stop_reason=None, error=None))
                moving.append((route, _end_of(route, output)))
            elif output.new_token_ids or output.finish_reason is not None or output.prompt_logprobs:
                kept.append(output)
        return Sifted(kept, moving)

    def _take(self, route: Route, output: EngineOutput) -> None:
        new = output.new_token_ids[route.skip :]
        route.num_tokens += len(new)
        if self._replays:
            route.tokens += new

    def _without_skipped(self, route: Route, output: EngineOutput) -> EngineOutput:
        if not route.skip:
            return output
        count = min(route.skip, len(output.new_token_ids))
        route.skip -= count
        return drop_first(output, count)

    def _may_move(self, route: Route, output: EngineOutput) -> bool:
        if route.pinned:
            return False
        goes_on = self._replays and replayable(route.request.params, route.num_tokens)
        if output.finish_reason == "error":
            # the rank failed while the sequence was on its way to it: it was not begun there
            return output.stop_reason == UNAVAILABLE and (route.num_tokens == 0 or goes_on)
        return goes_on and output.finish_reason == "abort" and not route.abort_expected


def _end_of(route: Route, output: EngineOutput) -> EngineOutput:
    """For a sequence that no rank takes. One that had begun elsewhere was cut off."""
    last = replace(output, new_token_ids=[], logprobs=None)
    if output.finish_reason == "error" and route.num_tokens:
        last = replace(last, finish_reason="abort", stop_reason=None, error=None)
    return last
