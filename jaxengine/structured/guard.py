"""Work that may never end and cannot be interrupted, bounded for those who wait for it.

Some grammars keep the library busy with a single mask for seconds, or for hours. Such work is done
in a thread beside the waiting one; when it has used its share of CPU time nobody waits any longer,
and the thread goes on at idle priority until the library returns. The clock is that thread's own:
on a busy machine work takes longer, but nothing is given up.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

POLL = 0.02  # seconds between looks at the clock of a thread that has not answered
MAX_THREADS = max(1, min(32, (os.cpu_count() or 1) * 80 // 100))


@dataclass(eq=False)
class Job:
    """`group`: jobs of one group wait for each other inside the library, so they share a thread.
    `seconds` of CPU: None until it is done, and for good when it was given up."""

    work: Callable[[], None]
    group: object
    seconds: float | None = None
    error: BaseException | None = None


class _Thread:
    """Does the jobs of one caller after another, until it is left with one that does not end."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Sequence[Job]] = SimpleQueue()
        self._answers = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._at: tuple[Job, float] | None = None  # the job in work, and the clock at its start
        self._is_left = False
        self._thread = threading.Thread(target=self._serve, name="mask", daemon=True)
        self._thread.start()

    def start(self, jobs: Sequence[Job]) -> None:
        self._inbox.put(jobs)

    def has_finished(self) -> bool:
        """All jobs are done; waits a little for it."""
        return self._answers.acquire(timeout=POLL)

    def leave_late(self, limit: float) -> Job | None:
        """The job in work if it has used more than `limit` seconds; the thread is lost then."""
        with self._lock:
            if self._at is None:
                return None
            job, start = self._at
            assert self._thread.ident is not None
            clock = time.pthread_getcpuclockid(self._thread.ident)
            if time.clock_gettime(clock) - start <= limit:
                return None
            self._is_left = True
        _left.append(self)
        try:
            assert self._thread.native_id is not None
            os.sched_setscheduler(self._thread.native_id, os.SCHED_IDLE, os.sched_param(0))
        except OSError:  # it ended just now, or the system allows no idle priority
            return job
        return job

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            for job in self._inbox.get():
                start = time.thread_time()
                self._at = job, start
                try:
                    job.work()
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    job.error = error
                with self._lock:
                    self._at = None
                    if self._is_left:
                        return
                    job.seconds = time.thread_time() - start
            self._answers.release()


_idle: list[_Thread] = []
_left: list[_Thread] = []
os.register_at_fork(after_in_child=_idle.clear)  # a child has no threads but its first


def run(jobs: Sequence[Job], limit: float) -> None:
    """Do the jobs; wait until each is done or has used `limit` seconds of CPU (then the rest of
    its group is not begun). Raises what a job raised. Any thread may call it."""
    busy = [_begin(share) for share in _shares(jobs)]
    while busy:
        thread, share = busy.pop()
        while not thread.has_finished():
            late = thread.leave_late(limit)
            if late is None:
                continue
            at = next(i for i, job in enumerate(share) if job is late)
            rest = [job for job in share[at + 1 :] if job.group is not late.group]
            if not rest:
                break
            thread, share = _begin(rest)
        else:
            _idle.append(thread)
    for job in jobs:
        if job.error is not None:
            raise job.error


def num_left() -> int:
    """Threads that nobody waits for and that have not ended."""
    for thread in [thread for thread in _left if not thread.is_alive]:
        _left.remove(thread)
    return len(_left)


def _begin(jobs: Sequence[Job]) -> tuple[_Thread, Sequence[Job]]:
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Thread()
    thread.start(jobs)
    return thread, jobs


def _shares(jobs: Sequence[Job]) -> list[list[Job]]:
    """The jobs by thread."""
    if len(jobs) == 1:
        return [list(jobs)]
    groups: dict[int, list[Job]] = {}
    for job in jobs:
        groups.setdefault(id(job.group), []).append(job)
    shares: list[list[Job]] = [[] for _ in range(min(MAX_THREADS, len(groups)))]
    for i, group in enumerate(groups.values()):
        shares[i % len(shares)] += group
    return shares
