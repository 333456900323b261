"""Work that may not end: given up by its own clock, and nobody else's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from jaxengine.structured import guard
from jaxengine.structured.guard import Job


def spin(until: Callable[[], bool]) -> None:
    while not until():
        pass


@pytest.fixture
def stop() -> threading.Event:
    return threading.Event()


def test_what_is_done_has_its_seconds() -> None:
    done: list[int] = []

    def burn(i: int) -> None:
        end = time.thread_time() + 0.02
        spin(lambda: time.thread_time() > end)
        done.append(i)

    jobs = [Job(lambda i=i: burn(i), group=i % 3) for i in range(7)]  # type: ignore[misc]
    guard.run(jobs, limit=30)
    assert sorted(done) == list(range(7))
    assert all(job.seconds is not None and job.seconds >= 0.02 for job in jobs)


def test_who_waits_or_sleeps_is_not_late() -> None:
    """A busy machine looks like this: time passes, and the thread's clock does not move."""
    job = Job(lambda: time.sleep(0.3), group=1)
    guard.run([job], limit=0.05)
    assert job.seconds is not None and job.seconds < 0.05


def test_who_does_not_end_is_left_and_the_others_are_done(stop: threading.Event) -> None:
    done: list[str] = []
    before = list(guard._left)
    late = Job(lambda: spin(stop.is_set), group="a")
    jobs = [
        Job(lambda: done.append("first"), group="a"),
        late,
        Job(lambda: done.append("behind it"), group="a"),
        *(Job(lambda name=name: done.append(name), group=name) for name in "bcdefgh"),  # type: ignore[misc]
    ]
    try:
        guard.run(jobs, limit=0.05)
        assert late.seconds is None and jobs[2].seconds is None
        assert sorted(done) == ["b", "c", "d", "e", "f", "first", "g", "h"]
        [left] = [thread for thread in guard._left if thread not in before]
        assert left.is_alive and guard.num_left() >= 1
        again = Job(lambda: done.append("again"), group="a")
        guard.run([again], limit=0.05)
        assert done[-1] == "again"
    finally:
        stop.set()
    while left.is_alive:
        time.sleep(0.01)
    assert late.seconds is None and "behind it" not in done


def test_an_error_is_the_caller_s() -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        guard.run([Job(fail, group=1), Job(lambda: None, group=2)], limit=1)
    job = Job(lambda: None, group=1)
    guard.run([job], limit=1)
    assert job.seconds is not None
