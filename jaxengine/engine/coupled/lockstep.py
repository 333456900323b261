"""One coupled rank, as its engine core sees it: when it takes part, and what all agree on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxengine.config import EngineConfig
from jaxengine.engine.coupled import waves
from jaxengine.engine.coupled.exchange import (
    Agreement,
    Choose,
    Combiner,
    Exchange,
    Plan,
    Wish,
)
from jaxengine.engine.packer import Prepared, step_sizes
from jaxengine.executor.coupling import Interrupted
from jaxengine.executor.worker import WorkerExecutor
from jaxengine.executor.worker_process import PeerFailed, WorkerDied
from jaxengine.sched.batch import Bucket
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import StepPlan
from jaxengine.sched.shapes import OverlapCounts, Overlapped, ProgramKey, ShapeChooser
from jaxengine.settings.coupling import Member
from jaxengine.settings.fault import fault_settings
from jaxengine.wire import frames as wire

Report = Callable[[wire.WaveNotice], None]


class Lockstep:
    """One thread uses it; `stop_waiting` and `broke` may be called by any."""

    def __init__(self, member: Member, config: EngineConfig, worker: WorkerExecutor) -> None:
        self._member = member
        self._worker = worker
        self._settings = fault_settings(config.fault)
        self._report: Report = _to_nobody
        self._stopping = threading.Event()
        self._next_port: int | None = None  # of the group that `rejoin` joins
        self.num_waves = 0
        self.num_dummies = 0  # steps without anything to run here
        self._overlapped = OverlapCounts()
        self._begin(member.port)

    def _begin(self, port: int) -> None:
        """Start over in a new group; nothing from the old one applies."""
        self._member = replace(self._member, port=port)
        self._wave = waves.RankWave(self._member.rank)
        self._round = 0
        self._told: frozenset[ProgramKey] | None = None  # programs that the others know of
        self._warm = False
        self._cold = False  # a program of the step agreed on last is still being compiled
        combiner = None
        if self._member.rank == 0:
            combiner = Combiner(self._member.size, self._make_choose)
        self._exchange = Exchange(self._member, combiner)

    def _make_choose(
        self, ready: Callable[[ProgramKey], bool], start: Callable[[ProgramKey], None]
    ) -> Choose:
        return ShapeChooser(self._worker.facts.step_shapes, ready, start).choose

    @property
    def running(self) -> bool:
        """A wave is under way."""
        return self._wave.running

    @property
    def port(self) -> int:
        return self._member.port

    def bind(self, report: Report) -> None:
        """`report` tells the front of waves, which wakes the other ranks."""
        self._report = report

    def start_wave(self, notice: wire.WaveNotice) -> None:
        """Another rank needs this one. A notice of an older group or wave changes nothing."""
        if notice.port == self.port:
            self._wave = waves.on_start(self._wave, notice.wave)

    def takes_part(self, work: bool) -> bool:
        """Decide before a step whether to take part; wakes the others when there is work here."""
        if work and not self.running:
            self._wave = waves.on_work(self._wave)
            self._report(wire.WaveNotice(self.port, self._wave.wave))
        return self.running

    def shape(self, plans: Sequence[StepPlan | None], work: bool) -> tuple[Bucket, int] | None:
        """Forward bucket and sampler rows of the step that all ranks run next, with these plans
        here; None when they run none. Raises as `agree`."""
        agreed = self.agree(plans, work)
        self._cold = agreed.cold
        return agreed.shape

    def submit(self, batch: Batch) -> int:
        """This rank's part of the step that was agreed on. Raises WorkerDied."""
        return self._worker.submit(batch, self._cold)

    def failed(self, error: Exception) -> None:
        """The step cannot go on here: the worker ends, which the others' workers wait for."""
        if not isinstance(error, WorkerDied):
            error = WorkerDied(f"a step failed: {error}")
        self._worker.abandon(error)

    def agree(self, plans: Sequence[StepPlan | None], work: bool) -> Agreement:
        """What all ranks do in the next step. Raises PeerLostError when one does not come,
        WorkerDied when this rank's worker ends meanwhile, Interrupted."""
        self._round += 1
        ready, warm = self._worker.ready_programs, self._worker.warm
        news = None if ready == self._told else list(ready)
        self._told = ready
        wish = Wish(self._round, self._wave.wave, work, _sizes(plans), news, warm)
        # Another rank may still wait for a program that it compiles.
        limits = self._settings
        limit = limits.step_timeout_sec if self._warm else limits.compile_timeout_sec
        agreed = self._exchange.agree(wish, self._look, limit)
        self._warm = agreed.warm
        for key in agreed.start:
            if key not in ready:
                self._worker.compile(key)
        if agreed.shape is not None:
            self.num_dummies += wish.plan is None
            self._overlapped.add(_outcome(agreed, agreed.shape[0]))
        self._settle(agreed)
        return agreed

    def _look(self) -> None:
        self._worker.check()
        if self._stopping.is_set():
            raise Interrupted

    def _settle(self, agreed: Agreement) -> None:
        """The vote that comes with every agreement: the wave ends when nobody has work."""
        ranks = [
            replace(self._wave, rank=rank, wave=wave) for rank, wave in enumerate(agreed.waves)
        ]
        after, ended = waves.sync(ranks, agreed.work)
        self._wave = after[self._member.rank]
        if ended is not None:
            self.num_waves += 1
            if self._member.rank == 0:
                self._report(wire.WaveNotice(self.port, ended, running=False))

    def stop_waiting(self) -> None:
        """The rank was told to stop: it waits for the others no more."""
        self._stopping.set()

    def broke(self, port: int) -> None:
        """A rank of the group at `port` failed: the worker is killed, and everything that waits
        for it learns of that."""
        self._worker.abandon(PeerFailed("another rank of the group failed"), port)

    def join(self, port: int) -> None:
        """The next `rejoin` joins the group at `port`."""
        self._next_port = port

    def check_sleep(self) -> None:
        """Raises ValueError: the others' steps would wait."""
        raise ValueError("ranks that share experts cannot sleep")

    def rejoin(self) -> bool:
        """Recover with a new worker in a new group. Raises ValueError when none was named by
        `join`."""
        port, self._next_port = self._next_port, None
        if port is None:
            raise ValueError("ranks that share experts are respawned together, in a new group")
        self.renew(port)
        self._worker.respawn(port)
        return True

    def renew(self, port: int) -> None:
        """The rank belongs to a new group from now on."""
        self.close()
        self._begin(port)

    def stats(self) -> dict[str, float]:
        """Counters; of dual-batch overlap too, which the ranks choose together."""
        stats = {"dp_waves": float(self.num_waves), "dp_dummy_steps": float(self.num_dummies)}
        if self._worker.facts.step_shapes.overlap is not None:
            stats |= self._overlapped.stats()
        return stats

    def close(self) -> None:
        self._exchange.close()


def _outcome(agreed: Agreement, bucket: Bucket) -> Overlapped:
    """What became of dual-batch overlap in an agreed step."""
    if bucket.dbo:
        return "steps"
    begun = any(isinstance(size, Bucket) and size.dbo for _, size in agreed.start)
    return "not_compiled" if begun else "below_threshold"


def _sizes(plans: Sequence[StepPlan | None]) -> Plan | None:
    """The step sizes of this rank's shards together; None when none has anything to run."""
    live = [plan for plan in plans if plan is not None]
    if not live:
        return None
    wires = [_prepared(r).wire for plan in live for r in plan.requests[plan.num_decode :]]
    kinds = ["score"] * any(wire.params.prompt_logprobs is not None for wire in wires)
    kinds += ["pool"] * any(wire.pooling is not None for wire in wires)
    return Plan(
        *step_sizes(plans),
        any(_prepared(r).needs_slot_record for plan in live for r in plan.new_requests),
        kinds,
    )


def _prepared(request: object) -> Prepared:
    prepared: Prepared = request.params  # type: ignore[attr-defined]
    return prepared


def _to_nobody(notice: wire.WaveNotice) -> None:
    """The report of a rank that is not bound yet."""
