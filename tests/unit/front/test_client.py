"""The front's end of an engine process that does not do what it is told."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from jaxengine.config import EngineConfig
from jaxengine.front.client import EngineClient, EngineDeadError


class Unkillable:
    """A process in a call of the kernel that never returns."""

    pid = 4711
    sentinel = 0

    def __init__(self) -> None:
        self.told: list[str] = []

    def is_alive(self) -> bool:
        return True

    def terminate(self) -> None:
        self.told.append("terminate")

    def kill(self) -> None:
        self.told.append("kill")

    def join(self, timeout: float | None = None) -> None:
        raise AssertionError("the event loop would stand still meanwhile")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> EngineClient:
    made = EngineClient(EngineConfig(), index=3)

    async def at_once(seconds: float) -> None:
        """Nothing came of it."""

    monkeypatch.setattr(made, "_wait_exit", at_once)
    return made


async def test_a_process_that_cannot_be_killed_holds_nobody_up(
    client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    process: Any = Unkillable()
    client._process = process
    client._exited, client._ended = asyncio.Event(), asyncio.Event()
    with caplog.at_level(logging.ERROR):
        await client.close()
    assert process.told == ["terminate", "kill"]
    assert "engine 3: process 4711 cannot be killed" in caplog.text


async def test_who_is_given_up_is_not_waited_for(client: EngineClient) -> None:
    """The process may be there still: whoever receives learns of it at once."""
    import zmq
    import zmq.asyncio

    process: Any = Unkillable()
    client._process = process
    client._exited, client._ended = asyncio.Event(), asyncio.Event()
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as socket:
        client._output = socket
        receiving = asyncio.create_task(client.receive())
        await asyncio.sleep(0)
        assert client.alive
        why = EngineDeadError("it said nothing", "EngineSilent")
        client.give_up(why)
        with pytest.raises(EngineDeadError) as raised:
            await asyncio.wait_for(receiving, 20)
    assert raised.value is why and process.told == ["kill"]
    assert process.is_alive() and not client.alive  # no order is sent there
