"""The data-parallel engines behind one front: start, place, watch, recover.

Dense ranks are independent: each has its own process, scheduler and KV pool, and the front, which
sees all stats, is the only one that knows of the others. Ranks that share experts are not
(`coupled.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from jaxengine.config import EngineConfig
from jaxengine.engine.fault.silence import SILENT, TICK
from jaxengine.front.admission import UnavailableError
from jaxengine.front.client import EngineClient, EngineDeadError, EngineStartError
from jaxengine.front.ranks.coupled import Coupled
from jaxengine.front.ranks.placing import Placer, Watcher
from jaxengine.settings.coupling import check_coupled, is_coupled, member_config
from jaxengine.settings.fault import fault_settings, silence_limit
from jaxengine.settings.ranks import count_gpus, local_ranks, rank_config, rank_environment
from jaxengine.wire import frames as wire
from jaxengine.wire.health import DEAD, DRAINING, HEALTHY, STARTING, UNHEALTHY, Board
from jaxengine.wire.merge import merge_ready, merge_results
from jaxengine.wire.messages import (
    EngineOutput,
    EngineOutputs,
    EngineReady,
    EngineStats,
    FaultToleranceRequest,
    FaultToleranceResult,
    RankStatus,
)

log = logging.getLogger(__name__)

_RESTART_DELAYS = (0.0, 1.0, 5.0)  # seconds before each try to start a dead rank again

MakeClient = Callable[[int], EngineClient]
Take = Callable[[int, EngineOutputs], Awaitable[None]]


class EngineGroup:
    """One or more engine processes with the face of one. Used by one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        watcher: Watcher,
        core: str = wire.DEFAULT_CORE,
        make_client: MakeClient | None = None,
    ) -> None:
        """Raises ValueError for settings that do not go together."""
        self.ranks = local_ranks(config.data_parallel)
        self._config = config
        self._core = core
        self._watcher = watcher
        self._fault_tolerant = config.fault.enable_fault_tolerance
        self._settings = fault_settings(config.fault)
        self._silence_limit = silence_limit(config.fault)
        self._make = make_client or self._make_client
        self._gpus = 0 if make_client else count_gpus()
        self._clients: dict[int, EngineClient] = {}
        self._watched: dict[EngineClient, int] = {}  # ranks that are to be heard of
        self._first_epoch = dict.fromkeys(self.ranks, 0)  # of the rank's present process
        self.board = Board(self.ranks, self._changed)
        self._coupled: Coupled | None = None
        if is_coupled(config) and core == wire.DEFAULT_CORE:
            check_coupled(config)
            automatic = self._settings.auto_recover == "respawn"
            self._coupled = Coupled(
                self._clients, self.board, self._restart, automatic, self._group_settled
            )
        self._clients.update({rank: self._make(rank) for rank in self.ranks})
        self.placer = Placer(config, self._clients, self.board, watcher)
        self._paused = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._take: Take | None = None
        self._fatal: asyncio.Future[None] | None = None

    def _make_client(self, rank: int) -> EngineClient:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        position = self.ranks.index(rank)
        environment = rank_environment(self._config, position, visible, self._gpus)
        if self._coupled is None:
            config = rank_config(self._config, rank)
            return EngineClient(config, self._core, rank, environment, self._on_status)
        config = member_config(self._config, rank, self._coupled.port)
        wave = self._coupled.on_wave
        return EngineClient(config, self._core, rank, environment, self._on_status, wave)

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> EngineReady:
        """Start all ranks side by side. Raises EngineStartError: one that fails ends all."""
        tasks = [asyncio.ensure_future(self._start_rank(rank)) for rank in self.ranks]
        try:
            return merge_ready(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close(grace=0)
            raise

    async def _start_rank(self, rank: int) -> EngineReady:
        try:
            ready = await self._clients[rank].start()
        except EngineStartError as error:
            if len(self.ranks) == 1:
                raise
            raise EngineStartError(
                f"data-parallel rank {rank}: {error}",
                user_error=error.user_error,
                trace=error.trace,
            ) from None
        self._set(rank, HEALTHY)
        return ready

    async def run(self, take: Take) -> None:
        """Hand every rank's messages to `take` until the server cannot go on: raises
        EngineDeadError then, or whatever `take` raises."""
        self._take = take
        self._fatal = asyncio.get_running_loop().create_future()
        try:
            for rank in self.ranks:
                self._spawn(self._pump(rank))
            self._spawn(self._watch())
            await self._fatal
        finally:
            await self._stop_tasks()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._fatal is not None and not self._fatal.done():
            self._fatal.set_exception(error)

    async def _stop_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, rank: int) -> None:
        client, take = self._clients[rank], self._take
        assert take is not None
        self._watched[client] = rank
        try:
            while True:
                message = await client.receive()
                if (stats := message.stats) is not None:
                    self.placer.balancer.update(
                        rank, stats.num_waiting, stats.num_running, stats.kv_usage
                    )
                if self._coupled is not None:
                    self._coupled.made_progress(message.outputs)
                if message.outputs:
                    message.outputs = self.placer.sift(rank, message.outputs)
                await take(rank, message)
        except EngineDeadError as error:
            self._watched.pop(client, None)
            if not self._fault_tolerant:
                raise self._named(rank, error) from None
            await self._rank_died(rank, client, error)

    async def _watch(self) -> None:
        """An engine process that stands still says nothing of it."""
        while True:
            await asyncio.sleep(TICK)
            self.look()

    def look(self) -> None:
        """Give up the ranks that have owed a sign of life for too long, and ask the others."""
        silent = [c for c in self._watched if c.look() >= self._silence_limit]
        for client in silent:
            rank = self._watched.pop(client)
            if self._fault_tolerant and self.board.ranks[rank].state in (HEALTHY, DRAINING):
                self._set(rank, UNHEALTHY, SILENT)  # no request goes there from here on
            client.give_up(
                EngineDeadError(
                    f"the engine process said nothing for {self._silence_limit:g} s; it was killed",
                    SILENT,
                )
            )

    def _named(self, rank: int, error: EngineDeadError) -> EngineDeadError:
        if len(self.ranks) == 1:
            return error
        return EngineDeadError(
            f"data-parallel rank {rank}: {error}; without --enable-fault-tolerance the server "
            "ends with it",
            error.kind,
        )

    async def close(self, grace: float = 5.0) -> None:
        """Stop all processes, side by side. Idempotent."""
        if self._coupled is not None:  # first: it starts ranks, and tasks for them
            await self._coupled.close()
        await self._stop_tasks()
        await asyncio.gather(*(client.close(grace) for client in self._clients.values()))

    def kill(self) -> None:
        """End all processes at once, without an event loop."""
        for client in self._clients.values():
            client.kill()

    @property
    def pid(self) -> int | None:
        """Of the first rank's process."""
        return self._clients[self.ranks[0]].pid

    def pids(self) -> dict[int, int | None]:
        return {rank: client.pid for rank, client in self._clients.items()}

    # -- calls of the engines --------------------------------------------------------------------

    async def call(self, method: str, *args: Any) -> Any:
        """Run `method` on every rank that can; see `merge_results`. Raises RuntimeError with the
        first refusal, UnavailableError, or EngineDeadError."""
        aborts = method == "sleep" or (method == "pause" and args[:1] == ("abort",))
        ranks = [r for r, h in self.board.ranks.items() if h.state in (HEALTHY, DRAINING)]
        if not ranks:
            raise UnavailableError(f"no engine can answer: {self.board.describe()}")
        if aborts:
            self.placer.expect_aborts(1)
        if method in ("pause", "resume"):
            self._paused = method == "pause"
        try:
            calls = (self._clients[rank].call(method, *args) for rank in ranks)
            results = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            if aborts:
                self.placer.expect_aborts(-1)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return merge_results(list(results))

    def fail_calls(self, error: Exception) -> None:
        """End every waiting `call` with `error`."""
        for client in self._clients.values():
            client.fail_calls(error)

    # -- faults --------------------------------------------------------------------------------

    def _on_status(self, status: RankStatus) -> None:
        """An engine's own words. Its process counts epochs from 0."""
        rank = status.rank
        if rank in self.board.ranks:
            self._update(replace(status, epoch=self._first_epoch[rank] + status.epoch))

    def _update(self, status: RankStatus) -> None:
        if self._coupled is None or not self._coupled.holds(status):
            self.board.update(status)

    def _set(self, rank: int, state: str, fault: str | None = None) -> None:
        """What the front sees of a rank: its process started, or is gone."""
        epoch = self.board.ranks[rank].epoch
        self._update(RankStatus(rank, state, epoch, fault, time.time()))

    def _changed(self, rank: int, before: str, after: str) -> None:
        health = self.board.ranks[rank]
        self._watcher.state(rank, after)
        if after in (UNHEALTHY, DEAD):
            if self._coupled is not None:
                self._coupled.failed(rank)
            log.warning("engine %d is %s: %s", rank, after, health.fault_info)
            self.placer.balancer.emptied(rank)
            if before not in (UNHEALTHY, DEAD, STARTING):
                self._watcher.fault(rank, health.fault_info or "unknown")
            # the loop that would answer them stands still
            self._clients[rank].fail_calls(UnavailableError(f"engine {rank} failed meanwhile"))
        elif after == HEALTHY and (before != STARTING or health.epoch > 0):
            log.warning("engine %d is healthy again", rank)
            if before != DRAINING:
                self._watcher.recovery(rank, True)
            if self._paused:
                self._spawn(self._pause_again(rank))

    async def _pause_again(self, rank: int) -> None:
        """A recovered engine has forgotten that the server is paused."""
        with contextlib.suppress(EngineDeadError, UnavailableError):
            await self._clients[rank].call("pause", "keep")

    async def _rank_died(self, rank: int, client: EngineClient, error: EngineDeadError) -> None:
        """The process of a rank is gone, while others may live."""
        log.error("rank %d: %s", rank, error)
        self._set(rank, DEAD, error.kind)
        client.fail_orders(error)
        assert self._take is not None
        # stats of nothing: its gauges fall to 0
        await self._take(rank, EngineOutputs(rank, self.placer.lose(rank), EngineStats()))
        await client.close(grace=0)
        if self._settings.auto_recover == "respawn" and self._coupled is None:
            self._spawn(self._recover(rank))

    async def _recover(self, rank: int) -> None:
        for delay in _RESTART_DELAYS:
            await asyncio.sleep(delay)
            if self.board.ranks[rank].state != DEAD or await self._restart(rank) is None:
                return
        log.error("rank %d stays dead: it could not be started again", rank)

    async def _restart(self, rank: int) -> str | None:
        """A new process for a rank whose process is gone. Returns what went wrong, or None."""
        epoch = self._first_epoch[rank] = self.board.ranks[rank].epoch + 1
        self._update(RankStatus(rank, STARTING, epoch, None, time.time()))
        await self._clients[rank].close(grace=0)
        client = self._clients[rank] = self._make(rank)
        try:
            await client.start()
        except (EngineStartError, EngineDeadError, OSError) as error:
            log.error("rank %d could not be started again: %s", rank, error)
            self._set(rank, DEAD, type(error).__name__)
            self._watcher.recovery(rank, False)
            return str(error)
        self._spawn(self._pump(rank))
        self._set(rank, HEALTHY)
        return None

    def _group_settled(self, settled: bool) -> None:
        """Coupled ranks: between a fault and the new group, sequences that can be replayed wait."""
        if not settled:
            self.placer.parking = self._config.fault.retry_aborted_requests
        elif (ends := self.placer.unpark()) and self._take is not None:
            self._spawn(self._deliver(ends))

    async def _deliver(self, ends: list[EngineOutput]) -> None:
        assert self._take is not None
        await self._take(self.ranks[0], EngineOutputs(self.ranks[0], ends))

    async def order(self, rank: int, order: FaultToleranceRequest) -> FaultToleranceResult:
        """Have a rank carry out an order; never raises for what the rank does with it."""
        state = self.board.ranks[rank].state
        if self._coupled is not None and order.instruction in ("retry", "respawn"):
            reason = await self._coupled.order(rank, order)
            if reason is not None and order.instruction == "respawn":
                self._watcher.recovery(rank, False)
        elif state == STARTING:
            reason = f"engine {rank} is starting"
        elif self._clients[rank].alive:
            reason = await self._ordered(rank, order)
            if reason is not None and state in (UNHEALTHY, DEAD):
                self._watcher.recovery(rank, False)
        elif order.instruction == "respawn" and state == DEAD:
            reason = await self._restart(rank)
        else:
            reason = f"the process of engine {rank} is gone; respawn starts a new one"
        self.board.ordered(rank, order.request_id, order.instruction, reason)
        return FaultToleranceResult(order.request_id, rank, reason is None, reason or "")

    async def _ordered(self, rank: int, order: FaultToleranceRequest) -> str | None:
        try:
            result = await self._clients[rank].order(order)
        except EngineDeadError as error:
            return f"engine {rank} died meanwhile: {error}"
        return None if result.success else result.reason or "the engine refused"
