"""Limits of what may wait."""

from __future__ import annotations

import pytest

from jaxengine.config import SchedulerConfig
from jaxengine.front.admission import OverloadedError, WaitingRoom


def test_requests() -> None:
    room = WaitingRoom(SchedulerConfig(max_num_queued_reqs=2))
    for _ in range(2):
        room.check(10)
        room.enter(10)
    with pytest.raises(OverloadedError, match="2 requests wait already .the limit is 2"):
        room.check(1)
    room.leave(10)
    room.check(1)


def test_tokens() -> None:
    room = WaitingRoom(SchedulerConfig(max_num_queued_tokens=100))
    room.check(1000)  # alone it could otherwise never run
    room.enter(60)
    room.check(40)
    with pytest.raises(OverloadedError, match="60 prompt tokens wait already .the limit is 100"):
        room.check(41)
    room.leave(60)
    assert (room.num_requests, room.num_tokens) == (0, 0)


def test_no_limits() -> None:
    room = WaitingRoom(SchedulerConfig())
    for _ in range(1000):
        room.check(1000)
        room.enter(1000)
    assert room.num_tokens == 1_000_000
