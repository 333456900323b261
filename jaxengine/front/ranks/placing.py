"""Sequences to ranks: chosen, remembered, and moved when their rank fails."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from jaxengine.config import EngineConfig
from jaxengine.front.admission import UnavailableError
from jaxengine.front.client import EngineClient, EngineDeadError
from jaxengine.front.ranks.balancer import ANYWHERE, Balancer, Placement, prefix_key
from jaxengine.front.ranks.routes import Route, Routes
from jaxengine.validation import RequestError
from jaxengine.wire.health import Board
from jaxengine.wire.messages import EngineOutput, EngineRequest

_NOWHERE = -1  # the rank of a sequence that is parked

log = logging.getLogger(__name__)


class Watcher(Protocol):
    """What counts the ranks' fortunes (`metrics.ranks.RankMetrics`)."""

    def state(self, rank: int, state: str) -> None: ...
    def fault(self, rank: int, kind: str) -> None: ...
    def recovery(self, rank: int, ok: bool) -> None: ...
    def aborted(self, rank: int) -> None: ...
    def replayed(self, rank: int) -> None: ...


class Placer:
    """Sends sequences to ranks. `clients` by rank is its owner's, which may replace some."""

    def __init__(
        self,
        config: EngineConfig,
        clients: Mapping[int, EngineClient],
        board: Board,
        watcher: Watcher,
    ) -> None:
        self._clients = clients
        self._board = board
        self._watcher = watcher
        self._ranks = list(board.ranks)
        self._fault_tolerant = config.fault.enable_fault_tolerance
        self._affinity = config.data_parallel.data_parallel_affinity
        self.balancer = Balancer(self._ranks)
        self._routes = Routes(config.fault.retry_aborted_requests)
        # a lone engine without fault tolerance has nowhere to move a sequence to
        self._direct = len(self._ranks) == 1 and not self._fault_tolerant
        self._aborting = 0  # orders under way that abort what is in flight
        # Sequences wait here for a rank while `parking`: all failed, and are on their way back.
        self.parking = False
        self._parked: list[tuple[Route, EngineOutput]] = []  # with the end if none takes it

    def check(self, placement: Placement = ANYWHERE) -> None:
        """Raises RequestError for a rank that is not here, UnavailableError when no rank, or not
        the chosen one, takes requests."""
        rank = placement.rank
        if rank is not None and rank not in self._ranks:
            first, last = self._ranks[0], self._ranks[-1]
            here = f"rank {first} is" if first == last else f"ranks {first} to {last} are"
            raise RequestError(
                "data_parallel_rank",
                f"data_parallel_rank {rank} is not served here ({here})",
            )
        healthy = self._board.healthy()
        if not healthy:
            raise UnavailableError(f"no engine can take requests: {self._board.describe()}")
        if rank is not None and rank not in healthy:
            state = self._board.ranks[rank].state
            raise UnavailableError(f"data_parallel_rank {rank} takes no requests: it is {state}")

    def add(self, requests: list[EngineRequest], placement: Placement = ANYWHERE) -> list[int]:
        """Send the sequences of one request to ranks, a message to each; returns which. Raises as
        `check`, or EngineDeadError; some may have been sent then."""
        self.check(placement)
        if self._direct:
            rank = self._ranks[0]
            self._clients[rank].add(requests)
            return [rank] * len(requests)
        key = None
        if self._affinity == "session":
            key = placement.session
        elif self._affinity == "prefix":
            key = prefix_key(requests[0].prompt_token_ids)
        pinned, aborted = placement.rank is not None, self._aborting > 0
        routes = [Route(one, -1, pinned, key, abort_expected=aborted) for one in requests]
        among = self._board.healthy() if placement.rank is None else [placement.rank]
        if not self._place(routes, requests, among):
            raise UnavailableError("no engine can be reached")
        return [route.rank for route in routes]

    def _place(self, routes: list[Route], requests: list[EngineRequest], among: list[int]) -> bool:
        """Send `requests` for `routes` to ranks of `among`; False when none can be reached."""
        left, unsent = set(among), list(zip(routes, requests, strict=True))
        while left and unsent:
            by_rank: dict[int, list[tuple[Route, EngineRequest]]] = {}
            for one in unsent:
                by_rank.setdefault(self.balancer.choose(left, one[0].key), []).append(one)
            unsent = []
            for rank, sent in by_rank.items():
                try:
                    self._clients[rank].add([request for _, request in sent])
                except EngineDeadError as error:
                    if not self._fault_tolerant:
                        raise
                    log.warning("rank %d: %s", rank, error)
                    left.discard(rank)
                    unsent += sent
                    continue
                for route, _ in sent:
                    route.rank = rank
                    self._routes.enter(route)
                    self.balancer.entered(rank)
        return not unsent

    def abort(self, request_ids: list[str]) -> None:
        """Idempotent; goes to the ranks that have the sequences."""
        if self._direct:
            self._clients[self._ranks[0]].abort(request_ids)
            return
        by_rank: dict[int, list[str]] = {}
        for request_id in request_ids:
            route = self._routes.leave(request_id)
            if route is not None and route.rank != _NOWHERE:
                self.balancer.left(route.rank)
                by_rank.setdefault(route.rank, []).append(request_id)
        for rank, ids in by_rank.items():
            self._clients[rank].abort(ids)

    def sift(self, rank: int, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """What of a rank's outputs goes to the streams; sequences that can go on elsewhere do."""
        if self._direct:
            return outputs
        sifted = self._routes.sift(rank, outputs)
        kept = sifted.outputs
        kept += [
            last
            for moving, last in sifted.moving
            if not self._move(moving) and not self._park(moving, last)
        ]
        for output in kept:
            if output.finish_reason is None:
                continue
            route = self._routes.leave(output.request_id)
            if route is None:
                continue
            self.balancer.left(rank)
            if output.finish_reason == "abort" and not route.abort_expected:
                self._watcher.aborted(rank)
        return kept

    def _move(self, route: Route) -> bool:
        """Go on with a sequence on another rank; False (and it stays where it is) without one."""
        before = route.rank
        among = [rank for rank in self._board.healthy() if rank != before]
        if not among or not self._place([route], [route.next_request()], among):
            return False
        self.balancer.left(before)
        self._watcher.replayed(before)
        return True

    def _park(self, route: Route, last: EngineOutput) -> bool:
        if not self.parking:
            return False
        self.balancer.left(route.rank)
        route.rank = _NOWHERE
        self._parked.append((route, last))
        return True

    def unpark(self) -> list[EngineOutput]:
        """Parked sequences go on, where a rank takes them; returns the ends of the others."""
        self.parking = False
        parked, self._parked = self._parked, []
        ends = []
        for route, last in parked:
            if not self._routes.has(route):
                continue  # aborted meanwhile
            among = self._board.healthy()
            if among and self._place([route], [route.next_request()], among):
                self._watcher.replayed(route.rank)
            else:
                self._routes.leave(last.request_id)
                ends.append(last)
        return ends

    def lose(self, rank: int) -> list[EngineOutput]:
        """The rank's process is gone: last outputs of what cannot go on elsewhere."""
        lost = [
            EngineOutput(route.request.request_id, [], finish_reason="abort")
            for route in self._routes.on(rank)
        ]
        return self.sift(rank, lost)

    def expect_aborts(self, more: int) -> None:
        """+1 when an order goes out that aborts what is in flight, -1 when it is answered."""
        self._aborting += more
        self._routes.expect_aborts()
