"""The front's end of one engine process: start it, talk to it, notice when it dies or falls
silent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from jaxengine.config import EngineConfig
from jaxengine.engine.fault.silence import Silence
from jaxengine.engine.process import EngineLaunch, run_engine
from jaxengine.front.messages_in import MOST_OUTPUTS, answer_call, fail_all, join_outputs
from jaxengine.front.ranks.spawning import error_class, spawn_environment, without_main
from jaxengine.wire import frames as wire
from jaxengine.wire.messages import (
    EngineOutputs,
    EngineReady,
    EngineRequest,
    FaultToleranceRequest,
    FaultToleranceResult,
    RankStatus,
    Siblings,
    UtilityCall,
)

log = logging.getLogger(__name__)

_decode_status = msgspec.msgpack.Decoder(RankStatus).decode
_decode_order_result = msgspec.msgpack.Decoder(FaultToleranceResult).decode


class EngineDeadError(RuntimeError):
    """The engine process is gone; nothing that was running can be finished. `kind`: class of the
    exception that it died of, or ProcessDied."""

    def __init__(self, message: str, kind: str = "ProcessDied") -> None:
        super().__init__(message)
        self.kind = kind


class EngineStartError(RuntimeError):
    """The engine process could not start. `user_error`: the configuration is at fault."""

    def __init__(self, message: str, *, user_error: bool = False, trace: str = "") -> None:
        super().__init__(message)
        self.user_error = user_error
        self.trace = trace


class EngineClient:
    """One engine process over ZMQ. Every method is called from the event loop's thread.

    `environment` is set for the process on top of this one's; `on_status` hears what the engine
    says of its health, `on_wave` what a coupled rank says of waves.
    """

    def __init__(
        self,
        config: EngineConfig,
        core: str = wire.DEFAULT_CORE,
        index: int = 0,
        environment: Mapping[str, str] | None = None,
        on_status: Callable[[RankStatus], None] | None = None,
        on_wave: Callable[[int, wire.WaveNotice], None] | None = None,
    ) -> None:
        self._config = config
        self._core = core
        self._index = index
        self._identity = index.to_bytes(2, "little")
        self._environment = environment or {}
        self._on_status = on_status
        self._on_wave = on_wave
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._orders: dict[str, asyncio.Future[FaultToleranceResult]] = {}
        self._next_call = 0
        self._folder: str | None = None
        self._context: zmq.asyncio.Context | None = None
        self._input: zmq.Socket[bytes] | None = None
        self._output: zmq.asyncio.Socket | None = None
        self._process: BaseProcess | None = None
        self._exited: asyncio.Event | None = None
        self._ended: asyncio.Event | None = None  # nothing more is waited for: it exited or is lost
        self._lost: EngineDeadError | None = None  # why it was given up while it was there
        self._silence = Silence()
        self._closing = False
        self._held: list[bytes] | None = None  # a message received, not handled yet
        self.ready = EngineReady()

    @property
    def alive(self) -> bool:
        """One that was given up is not, though its end may take a moment."""
        return self._process is not None and self._lost is None and self._process.is_alive()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> EngineReady:
        """Spawn the process and wait until it can serve. Raises EngineStartError."""
        self._folder = tempfile.mkdtemp(prefix="jaxengine-")
        self._context = zmq.asyncio.Context()
        # The input side is a plain socket: without a high-water mark its sends never block.
        shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        self._input = shadow.socket(zmq.ROUTER)
        self._output = self._context.socket(zmq.PULL)
        for socket, option in ((self._input, zmq.SNDHWM), (self._output, zmq.RCVHWM)):
            socket.setsockopt(option, 0)
            socket.setsockopt(zmq.LINGER, 0)
        self._input.setsockopt(zmq.ROUTER_MANDATORY, 1)
        input_address, output_address = (f"ipc://{self._folder}/{n}" for n in ("in", "out"))
        self._input.bind(input_address)
        self._output.bind(output_address)
        launch = EngineLaunch(
            config=self._config,
            input_address=input_address,
            output_address=output_address,
            core=self._core,
            index=self._index,
            parent_pid=os.getpid(),
            die_with_parent=threading.current_thread() is threading.main_thread(),
        )
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(
            target=run_engine, args=(launch,), name=f"jaxengine-engine{self._index}"
        )
        with spawn_environment(self._environment), without_main():
            self._process.start()
        loop = asyncio.get_running_loop()
        self._exited, self._ended = asyncio.Event(), asyncio.Event()
        loop.add_reader(self._process.sentinel, self._on_exit)
        try:
            self.ready = await self._handshake()
        except BaseException:
            await self.close(grace=0)
            raise
        return self.ready

    async def _handshake(self) -> EngineReady:
        while (message := await self._receive())[0] == wire.STATUS:
            log.debug("engine %d reported its state while starting", self._index)
        kind, payload = message
        if kind != wire.READY:
            failure = wire.decode_failure(payload)
            raise EngineStartError(
                f"the engine could not start: {failure.message}",
                user_error=failure.user_error,
                trace=failure.traceback,
            )
        assert self._input is not None
        for _ in range(1000):  # the hello frame follows READY by milliseconds
            if self._input.poll(0):
                self._input.recv_multipart()
                self._remove_folder()  # both ends are connected: nothing is left after a kill -9
                return wire.decode_ready(payload)
            await asyncio.sleep(0.01)
        raise EngineStartError("the engine started but does not read its messages")

    def _on_exit(self) -> None:
        assert self._process is not None and self._exited is not None
        assert self._ended is not None
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._exited.set()
        self._ended.set()

    async def _receive(self) -> tuple[bytes, bytes]:
        """The next message; raises EngineDeadError (EngineStartError before READY) at the end."""
        assert self._output is not None and self._ended is not None
        ended = self._ended
        if not ended.is_set():
            message = asyncio.ensure_future(self._output.recv_multipart())
            death = asyncio.ensure_future(ended.wait())
            try:
                await asyncio.wait({message, death}, return_when=asyncio.FIRST_COMPLETED)
                if message.done():
                    kind, payload = message.result()
                    return kind, payload
            finally:
                death.cancel()
                if not message.done():
                    message.cancel()
        if self._lost is not None:
            raise self._lost
        if await self._output.poll(100):  # last words
            kind, payload = await self._output.recv_multipart()
            return kind, payload
        code = None if self._process is None else self._process.exitcode
        if not self.ready.vocab_size:
            raise EngineStartError(f"the engine process ended while starting (exit code {code})")
        raise EngineDeadError(f"the engine process ended (exit code {code})")

    async def receive(self) -> EngineOutputs:
        """The next outputs; answers of utility calls are handed to their callers on the way.

        Raises EngineDeadError once the process is gone, was given up or has announced its failure.
        """
        while True:
            assert self._output is not None
            frames, self._held = self._held, None
            try:  # usually there is one already: no tasks, no waiting
                frames = frames or await self._output.recv_multipart(zmq.NOBLOCK)
                kind, payload = frames
            except zmq.Again:
                kind, payload = await self._receive()
            self._silence.heard()
            if kind == wire.OUTPUTS:
                return await self._joined(wire.decode_outputs(payload))
            if kind == wire.RESULT:
                answer_call(self._calls, wire.decode_result(payload))
            elif kind == wire.STATUS:
                self._take_status(payload)
            elif kind == wire.WAVE:
                if self._on_wave is not None:
                    self._on_wave(self._index, wire.decode_wave(payload))
            elif kind == wire.ORDER_RESULT:
                self._take_order_result(payload)
            elif kind == wire.FAILED:
                failure = wire.decode_failure(payload)
                log.error("engine %d failed:\n%s", self._index, failure.traceback)
                raise EngineDeadError(f"the engine failed: {failure.message}", error_class(failure))

    async def _joined(self, news: EngineOutputs) -> EngineOutputs:
        """With the outputs that are there already."""
        assert self._output is not None
        while len(news.outputs) < MOST_OUTPUTS:
            try:
                frames = await self._output.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if frames[0] != wire.OUTPUTS:
                self._held = frames
                break
            news = join_outputs(news, wire.decode_outputs(frames[1]))
        return news

    def _take_status(self, payload: bytes) -> None:
        if self._on_status is not None:
            self._on_status(_decode_status(payload))

    def _take_order_result(self, payload: bytes) -> None:
        result = _decode_order_result(payload)
        future = self._orders.pop(result.request_id, None)
        if future is not None and not future.done():
            future.set_result(result)

    def _send(self, kind: bytes, payload: bytes) -> None:
        if self._input is None or self._closing:
            raise EngineDeadError("the engine is shut down")
        try:
            self._input.send_multipart([self._identity, kind, payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineDeadError(f"the engine process cannot be reached ({error})") from None

    def add(self, requests: list[EngineRequest]) -> None:
        """Send sequences of one request. Raises EngineDeadError."""
        self._send(wire.ADD, wire.encode(Siblings.of(requests)))

    def abort(self, request_ids: list[str]) -> None:
        """Idempotent; a dead engine has nothing left to abort."""
        if request_ids:
            with contextlib.suppress(EngineDeadError):
                self._send(wire.ABORT, wire.encode(request_ids))

    def start_wave(self, notice: wire.WaveNotice) -> None:
        """Wake a coupled rank. A dead one hears nothing."""
        with contextlib.suppress(EngineDeadError):
            self._send(wire.START_WAVE, wire.encode(notice))

    def group_broke(self, port: int) -> None:
        """Tell a coupled rank that its group at `port` broke. A dead one hears nothing."""
        with contextlib.suppress(EngineDeadError):
            self._send(wire.GROUP_BROKE, wire.encode(port))

    def ping(self) -> None:
        """Ask for a sign of life. A dead one hears nothing."""
        with contextlib.suppress(EngineDeadError):
            self._send(wire.PING, b"")

    def look(self) -> float:
        """For how many seconds an answer has been owed; asks for the next one. To be called every
        `silence.TICK` seconds while somebody receives."""
        return self._silence.look(self.ping)

    def give_up(self, why: EngineDeadError) -> None:
        """Kill the process (one that stands still hears nothing else); `receive` raises `why`."""
        self._lost = why
        if self._process is not None and self._process.is_alive():
            self._process.kill()
        if self._ended is not None:
            self._ended.set()

    async def call(self, method: str, *args: Any) -> Any:
        """Run `method` in the engine. Raises RuntimeError with its message, or EngineDeadError."""
        self._next_call += 1
        call = UtilityCall(call_id=self._next_call, method=method, args=list(args))
        future = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = future
        try:
            self._send(wire.UTILITY, wire.encode(call))
            return await future
        finally:
            self._calls.pop(call.call_id, None)

    async def order(self, request: FaultToleranceRequest) -> FaultToleranceResult:
        """The engine's answer to an order. Raises EngineDeadError when it dies before."""
        future = asyncio.get_running_loop().create_future()
        self._orders[request.request_id] = future
        try:
            self._send(wire.ORDER, wire.encode(request))
            return await future
        finally:
            self._orders.pop(request.request_id, None)

    def fail_calls(self, error: Exception) -> None:
        """End every waiting `call` with `error`."""
        fail_all(self._calls.values(), error)

    def fail_orders(self, error: Exception) -> None:
        """End every waiting `order` with `error`."""
        fail_all(self._orders.values(), error)

    async def close(self, grace: float = 5.0) -> None:
        """Stop the process: asked for `grace` seconds, then terminated, then killed. Idempotent."""
        if self._process is not None and self._exited is not None:
            if self._process.is_alive() and grace > 0:
                with contextlib.suppress(EngineDeadError):
                    self._send(wire.SHUTDOWN, b"")
                await self._wait_exit(grace)
            if self._process.is_alive():
                self._process.terminate()
                await self._wait_exit(1.0)
            if self._process.is_alive():
                self._process.kill()
                await self._wait_exit(5.0)
            if not self._exited.is_set():
                asyncio.get_running_loop().remove_reader(self._process.sentinel)
            if self._exited.is_set() or not self._process.is_alive():
                self._process.join(timeout=5)
            else:  # not even that ends a call of the kernel that hangs
                log.error("engine %d: process %d cannot be killed", self._index, self._process.pid)
        self._closing = True
        self.fail_calls(EngineDeadError("the engine is shut down"))
        self.fail_orders(EngineDeadError("the engine is shut down"))
        if self._input is not None:
            self._input.close()
        if self._output is not None:
            self._output.close()
        if self._context is not None:
            self._context.term()
            self._context = None
        self._remove_folder()

    def kill(self) -> None:
        """End the process at once, without an event loop (second signal, interpreter exit)."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def _wait_exit(self, seconds: float) -> None:
        assert self._exited is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exited.wait(), seconds)
