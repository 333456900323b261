"""One request's outputs on their way to its consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Literal

from jaxengine.text.outputs import RequestOutput, merge_deltas

Kind = Literal["delta", "cumulative", "final"]


class RequestStream:
    """The outputs of one admitted request: an async iterator with a single slot.

    A slow consumer finds deltas merged, so memory stays bounded. Closing it early aborts the
    request; `async with` does that.
    """

    def __init__(
        self, drop: Callable[[str], None], request_id: str, internal_id: str, kind: Kind
    ) -> None:
        self.request_id = request_id
        self.internal_id = internal_id
        self.kind = kind
        self.prompt_len = 0
        self.child_ids: list[str] = []  # its sequences in the engine
        self._drop = drop  # aborts by internal id; nothing for one that is finished
        self._slot: RequestOutput | None = None
        self._error: Exception | None = None
        self._event = asyncio.Event()
        self._done = False

    def poll(self) -> RequestOutput | None:
        """What is there by now, if anything. Raises what `fail` was given, after the outputs."""
        if self._slot is None:
            if self._error is not None and not self._done:
                self._done = True
                raise self._error
            return None
        output, self._slot = self._slot, None
        self._done = output.finished
        output.request_id = self.request_id
        return output

    def wake(self, event: asyncio.Event) -> None:
        """Set `event`, which streams may share, when there is something to poll."""
        self._event = event

    def put(self, output: RequestOutput) -> None:
        if self._slot is not None and self.kind == "delta":
            output = merge_deltas(self._slot, output)
        self._slot = output
        self._event.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._event.set()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        while (output := self.poll()) is None:
            self._event.clear()
            try:
                await self._event.wait()
            except asyncio.CancelledError:
                self.close()
                raise
        return output

    def close(self) -> None:
        """Abort unless finished. Idempotent."""
        self._done = True
        self._drop(self.internal_id)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
