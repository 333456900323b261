"""The front's side of ranks that share experts: it wakes them, breaks them, and brings them back.

They are one fault domain. When one fails the front tells the others at once, because they could
only find out by waiting for it in vain; all end their requests and their workers. Then nothing but
a new group at new ports helps, and the front, which all of them hear, is who forms it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping

from jaxengine.engine.coupled import waves
from jaxengine.executor.coupling import free_port
from jaxengine.front.client import EngineClient, EngineDeadError
from jaxengine.wire import frames as wire
from jaxengine.wire.health import DEAD, DRAINING, HEALTHY, STARTING, UNHEALTHY, Board
from jaxengine.wire.messages import EngineOutput, FaultToleranceRequest, RankStatus

log = logging.getLogger(__name__)

_GRACE = 3.0  # seconds in which a rank must stand still after its group broke
_DELAYS = (0.0, 1.0, 5.0)  # seconds before each automatic try
_MOST_IN_VAIN = 3  # automatic recoveries in a row without a token in between


class Coupled:
    """Used by one event loop. `clients` by rank is its owner's, which may replace some."""

    def __init__(
        self,
        clients: Mapping[int, EngineClient],
        board: Board,
        restart: Callable[[int], Awaitable[str | None]],
        automatic: bool,
        settled: Callable[[bool], None],
    ) -> None:
        """`restart` starts the process of a rank anew, and says what went wrong. `settled` hears
        False when the group broke and will be formed again unasked, True when it was, or when that
        was given up."""
        self.port = free_port()
        self._clients = clients
        self._board = board
        self._restart = restart
        self._automatic = automatic
        self._settled = settled
        self._coordinator = waves.Coordinator()
        self._broken = False
        self._in_vain = 0
        self._recovery: asyncio.Task[str | None] | None = None
        self._real: dict[int, str] = {}  # states; the board may hear of them later
        self._back: dict[int, RankStatus] = {}  # ranks that are back before the others
        self._tasks: set[asyncio.Task[None]] = set()

    # -- waves ---------------------------------------------------------------------------------

    def on_wave(self, rank: int, notice: wire.WaveNotice) -> None:
        """A rank found work while all slept, or rank 0 says that the wave is over."""
        if notice.port != self.port:
            return
        if not notice.running:
            self._coordinator = waves.wave_complete(self._coordinator, notice.wave)
            return
        self._coordinator, start = waves.wave_started(self._coordinator, notice.wave, rank)
        if start is not None:
            for other, client in self._clients.items():
                if other != start.exclude:
                    client.start_wave(wire.WaveNotice(self.port, start.wave))

    # -- faults --------------------------------------------------------------------------------

    def failed(self, rank: int) -> None:
        """A rank of the group is not healthy any more: neither are the others."""
        if self._broken:
            return
        if self._recovering:  # whoever forms the group decides what comes next
            self._give_up()
            return
        self._broken = True
        log.error("rank %d failed, and the ranks that share its experts with it", rank)
        if self._automatic and self._in_vain < _MOST_IN_VAIN:
            self._in_vain += 1
            self._settled(False)
            self._spawn(self._recover())
        elif self._automatic:
            log.error("%d recoveries in a row were in vain; waiting for an order", _MOST_IN_VAIN)
        self._break_others(rank)

    def _break_others(self, rank: int) -> None:
        for other, health in self._board.ranks.items():
            if other != rank and health.state not in (UNHEALTHY, DEAD, STARTING):
                # before the rank says so itself: no request may go there
                news = RankStatus(other, UNHEALTHY, health.epoch, "PeerFailed", time.time())
                self._board.update(news)
        for client in self._clients.values():
            client.group_broke(self.port)
        self._spawn(self._stop_all(self.port))

    async def _stop_all(self, port: int) -> None:
        """A rank that does not stand still in time hangs: its process is killed."""
        end = time.monotonic() + _GRACE
        while port == self.port:
            moving = [r for r, state in self._real.items() if state not in (DEAD, STARTING)]
            if not moving:
                return
            if time.monotonic() > end:
                for rank in moving:
                    log.error("rank %d does not stand still; its process is killed", rank)
                    self._clients[rank].kill()
                return
            await asyncio.sleep(0.01)

    def made_progress(self, outputs: Iterable[EngineOutput]) -> None:
        """What a rank gave out."""
        if self._in_vain and any(output.new_token_ids for output in outputs):
            self._in_vain = 0

    # -- recovery ------------------------------------------------------------------------------

    async def order(self, rank: int, order: FaultToleranceRequest) -> str | None:
        """Carry out a retry or respawn; returns why not, or what went wrong."""
        if order.params:
            return f"params: {order.instruction} has no {sorted(order.params)[0]!r}"
        if order.instruction == "retry":
            return (
                "rejecting retry: ranks that share experts fail together, their workers too; "
                "respawn replaces them all"
            )
        if not self._recovering and self._board.ranks[rank].state not in (UNHEALTHY, DEAD):
            return f"rejecting respawn: the engine is {self._board.ranks[rank].state}"
        return await self.respawn()

    @property
    def _recovering(self) -> bool:
        return self._recovery is not None and not self._recovery.done()

    async def respawn(self) -> str | None:
        """Form a new group; whoever asks meanwhile waits for the same. What went wrong, or None."""
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._respawn())
        return await asyncio.shield(self._recovery)

    async def _respawn(self) -> str | None:
        began = time.monotonic()
        while not all(state == DEAD for state in self._real.values()):
            if time.monotonic() > began + 3 * _GRACE:
                return f"the ranks do not stand still: {self._board.describe()}"
            await asyncio.sleep(0.01)
        try:
            self.port = free_port()
        except OSError as error:
            return str(error)
        self._coordinator = waves.Coordinator()
        self._broken = False
        self._back.clear()
        log.warning("forming a new group of %d ranks", len(self._clients))
        tasks = [asyncio.ensure_future(self._bring_back(rank)) for rank in self._clients]
        reason = None
        try:
            for task in asyncio.as_completed(tasks):
                found = await task
                if found is not None and reason is None:
                    reason = found
                    self._give_up()
        finally:
            for running in tasks:  # none is left but of a front that closes
                running.cancel()
        if reason is None and self._broken:
            reason = "a rank failed again while the group was formed"
        if reason is None:
            for status in self._back.values():
                self._board.update(status)
            log.warning("all ranks are back after %.2f s", time.monotonic() - began)
            self._settled(True)
        return reason

    def holds(self, status: RankStatus) -> bool:
        """Whether the board is not to hear of it yet: a rank is healthy when all are. One that
        fails again meanwhile breaks the new group."""
        self._real[status.rank] = status.state
        if not self._recovering:
            return False
        if status.state in (HEALTHY, DRAINING):
            self._back[status.rank] = status
            return True
        if self._back.pop(status.rank, None) is not None and not self._broken:
            self._give_up()
        return False

    async def _bring_back(self, rank: int) -> str | None:
        """What went wrong, or None. Never raises: the other ranks wait for this one."""
        client = self._clients[rank]
        try:
            if not client.alive:
                reason = await self._restart(rank)
            else:
                order = FaultToleranceRequest(uuid.uuid4().hex, "respawn", {"port": self.port})
                result = await client.order(order)
                reason = None if result.success else result.reason or "the engine refused"
        except EngineDeadError as error:
            reason = f"the engine died meanwhile: {error}"
        except Exception as error:
            log.exception("rank %d could not be brought back", rank)
            reason = f"{type(error).__name__}: {error}"
        return None if reason is None else f"rank {rank}: {reason}"

    def _give_up(self) -> None:
        """One rank cannot join: the others would wait for it."""
        self._broken = True
        for rank, state in self._real.items():
            if state == STARTING:  # hears nothing yet
                self._clients[rank].kill()
        self._break_others(-1)

    async def _recover(self) -> None:
        for delay in _DELAYS:
            await asyncio.sleep(delay)
            if all(health.state == HEALTHY for health in self._board.ranks.values()):
                return
            try:
                reason = await self.respawn()
            except Exception as error:
                log.exception("the group could not be formed")
                reason = f"{type(error).__name__}: {error}"
            if reason is None:
                return
            log.error("the group could not be formed again: %s", reason)
            for rank in self._clients:
                self._board.ordered(rank, "automatic", "respawn", reason)
        self._settled(True)

    # -- life ----------------------------------------------------------------------------------

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """No more recoveries."""
        tasks: list[asyncio.Task[None] | asyncio.Task[str | None]] = [*self._tasks]
        if self._recovery is not None:
            tasks.append(self._recovery)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
