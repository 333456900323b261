"""The engine process's outputs socket. Any thread may send."""

from __future__ import annotations

import threading
from typing import Any

import zmq

from jaxengine.wire import frames as wire
from jaxengine.wire.messages import EngineOutput, EngineOutputs, EngineStats


class Outbox:
    """With `open_requests` set, the ids of requests that were given an end leave it."""

    def __init__(self, socket: zmq.Socket[bytes], index: int) -> None:
        self._socket = socket
        self._index = index
        self._lock = threading.Lock()  # a ZMQ socket may change threads, but never be shared
        self.open_requests: set[str] | None = None
        self.made_progress = False  # tokens went out; kept only with `open_requests`

    def send(self, kind: bytes, message: Any) -> None:
        with self._lock:
            self._socket.send_multipart([kind, wire.encode(message)])

    def publish(self, outputs: list[EngineOutput], stats: EngineStats | None) -> None:
        self.send(wire.OUTPUTS, EngineOutputs(self._index, outputs, stats))
        if self.open_requests is not None:
            for output in outputs:
                if output.finish_reason is not None:
                    self.open_requests.discard(output.request_id)
                self.made_progress |= bool(output.new_token_ids)
