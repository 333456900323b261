"""The requests in flight: engine outputs find their streams, ended requests leave no trace."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from jaxengine.front.admission import WaitingRoom
from jaxengine.front.ranks.balancer import ANYWHERE, Placement
from jaxengine.front.stream import Kind, RequestStream
from jaxengine.metrics.prometheus import Metrics
from jaxengine.text.output_processor import OutputProcessor
from jaxengine.text.outputs import RequestOutput
from jaxengine.text.processor import ProcessedRequest
from jaxengine.wire.messages import EngineOutput, EngineRequest


class Sender(Protocol):
    """Sends sequences to engines (`dp.placing.Placer`)."""

    def add(self, requests: list[EngineRequest], placement: Placement = ANYWHERE) -> list[int]: ...
    def abort(self, request_ids: list[str]) -> None: ...


class InFlight:
    """Streams by internal id. Used by one event loop."""

    def __init__(
        self,
        placer: Sender,
        outputs: OutputProcessor,
        metrics: Metrics,
        waiting: WaitingRoom,
    ) -> None:
        self._placer = placer
        self._outputs = outputs
        self._metrics = metrics
        self._waiting = waiting
        self._streams: dict[str, RequestStream] = {}
        self._unstarted: dict[str, RequestStream] = {}  # by child id, until the first output
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._streams)

    def add(
        self,
        processed: ProcessedRequest,
        request_id: str,
        kind: Kind,
        clock: float,
        placement: Placement = ANYWHERE,
    ) -> RequestStream:
        """Send the request to the engine. `clock`: time.monotonic() of its arrival.
        Raises EngineDeadError, UnavailableError. Whatever is raised, nothing is kept."""
        internal_id = processed.request_id
        stream = RequestStream(self.drop, request_id, internal_id, kind)
        stream.prompt_len = len(processed.prompt_token_ids)
        stream.child_ids = [request.request_id for request in processed.requests]
        self._outputs.add(processed, kind)
        self._streams[internal_id] = stream
        self._unstarted.update(dict.fromkeys(stream.child_ids, stream))
        self.idle.clear()
        for _ in stream.child_ids:
            self._waiting.enter(stream.prompt_len)
        try:
            ranks = self._placer.add(processed.requests, placement)
            self._metrics.added(processed.requests, clock, ranks)
        except BaseException:
            self.drop(internal_id)
            raise
        return stream

    def deliver(self, outputs: list[EngineOutput], rank: int = 0) -> None:
        """Hand the outputs of a rank's step to their streams."""
        self._metrics.outputs(outputs, time.monotonic(), rank)
        for done in outputs:
            if done.finish_reason is not None:
                self._metrics.finished(done.request_id, done.finish_reason)
        results, stopped = self._outputs.process(outputs)
        if stopped:  # a stop string was found in the text; the engine does not know yet
            self._placer.abort(stopped)
            for child_id in stopped:
                self._metrics.finished(child_id, "stop")
        if self._unstarted:
            for output in outputs:
                self._mark_started(output.request_id)
        for result in results:
            stream = self._streams.get(result.request_id)
            if stream is None:
                continue
            if result.finished:
                self._forget(stream, "stop")
            stream.put(result)

    def abort(self, request_id: str) -> None:
        """End every request that a user named so, with a last output of reason "abort"."""
        for stream in [s for s in self._streams.values() if s.request_id == request_id]:
            output = self._abort_stream(stream)
            if output is not None:
                stream.put(output)

    def drop(self, internal_id: str) -> None:
        """The consumer is gone: abort without a last output. Unknown ids are finished ones."""
        stream = self._streams.get(internal_id)
        if stream is not None:
            self._abort_stream(stream)

    def fail_all(self, error: Exception, reason: str) -> None:
        """End every stream by raising `error`; they are counted under `reason`."""
        for stream in list(self._streams.values()):
            self._outputs.abort(stream.internal_id)
            self._placer.abort(stream.child_ids)
            self._forget(stream, reason)
            stream.fail(error)

    def _abort_stream(self, stream: RequestStream) -> RequestOutput | None:
        output = self._outputs.abort(stream.internal_id)
        self._placer.abort(stream.child_ids)
        self._forget(stream, "abort")
        return output

    def _forget(self, stream: RequestStream, reason: str) -> None:
        """The stream ends; sequences that have not ended yet are counted under `reason`."""
        for child_id in stream.child_ids:
            self._metrics.finished(child_id, reason)
        if self._streams.pop(stream.internal_id, None) is not None:
            for child_id in stream.child_ids:
                self._mark_started(child_id)
        if not self._streams:
            self.idle.set()

    def _mark_started(self, child_id: str) -> None:
        stream = self._unstarted.pop(child_id, None)
        if stream is not None:
            self._waiting.leave(stream.prompt_len)
