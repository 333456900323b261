"""What an engine process and its worker say to each other: msgpack frames over a socket pair."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from jaxengine.config import EngineConfig
from jaxengine.executor.facts import Facts
from jaxengine.offload.jobs import Done, OffloadStep
from jaxengine.offload.layout import KVLayout
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import Int32, StepResult
from jaxengine.sched.shapes import ProgramKey, sampler_of
from jaxengine.settings.faults import Fault

# -- arrays ---------------------------------------------------------------------------------


_BYTES = 1  # code of msgpack's extension type for an array's bytes, which is read without a copy


def _to_wire(value: Any) -> tuple[str, tuple[int, ...], msgspec.msgpack.Ext]:
    """Type, shape and bytes of an array."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} does not go over the socket")
    flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return value.dtype.str, value.shape, msgspec.msgpack.Ext(_BYTES, flat.data)


def _from_wire(kind: Any, value: Any) -> NDArray[Any]:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape)


def _bytes(code: int, data: memoryview) -> memoryview:
    assert code == _BYTES
    return data


encode = msgspec.msgpack.Encoder(enc_hook=_to_wire).encode


def decoder(kinds: Any) -> Callable[[Any], Any]:
    """Reads messages of these kinds (a union); their arrays are views of the message."""
    return msgspec.msgpack.Decoder(kinds, dec_hook=_from_wire, ext_hook=_bytes).decode


# -- engine -> worker -----------------------------------------------------------------------


class Start(msgspec.Struct, tag=True):
    """The first message."""

    config: EngineConfig
    parent_pid: int


class Submit(msgspec.Struct, tag=True):
    step: int
    batch: Batch
    fault: Fault | None = None  # to fail of, for drills


class Sample(msgspec.Struct, tag=True):
    step: int
    mask: Int32


class Call(msgspec.Struct, tag=True):
    """reset | sleep | wake_up | wait_warm; answered by `Answer`."""

    call: int
    method: str
    args: list[int] = []
    fault: Fault | None = None


class Compile(msgspec.Struct, tag=True):
    key: ProgramKey


class Stop(msgspec.Struct, tag=True):
    pass


class OpenSpeculation(msgspec.Struct, tag=True):
    """`Verifier.open_speculation`; answered by `Answer`."""

    call: int
    shapes: list[tuple[int, int]]
    lookup: tuple[int, int]
    warmup: str


class Pool(msgspec.Struct, array_like=True):
    """A host pool in shared memory (`offload.host_pool`)."""

    address: str
    num_slots: int
    page_bytes: int


class OpenTransfers(msgspec.Struct, tag=True):
    """Answered by `Answer`."""

    call: int
    pools: list[Pool]  # by shard
    layout: KVLayout


class Transfer(msgspec.Struct, tag=True):
    """KV offload's jobs ahead of a step; counted as a step of its own."""

    step: int
    shards: list[OffloadStep | None]


Command = (
    Start | Submit | Sample | Call | Compile | Stop | OpenSpeculation | OpenTransfers | Transfer
)


# -- worker -> engine -----------------------------------------------------------------------


class Started(msgspec.Struct, tag=True):
    """Sent once, when the worker is ready."""

    facts: Facts


class StartFailed(msgspec.Struct, tag=True):
    """`user_error`: the configuration is at fault."""

    message: str
    traceback: str
    user_error: bool


class StepDone(msgspec.Struct, tag=True):
    step: int
    results: list[StepResult]


class StepFailed(msgspec.Struct, tag=True):
    """The step raised. It and all that were submitted after it are lost, until a reset."""

    step: int
    kind: str  # class of the exception
    message: str


class Answer(msgspec.Struct, tag=True):
    call: int
    kind: str | None = None  # class of the exception, if it failed
    message: str = ""


class Programs(msgspec.Struct, tag=True):
    """Sent at every change: the programs that are compiled now, each with what a drafter runs in
    the same steps ("verify" for all of a step with drafts), and the executor's figures."""

    ready: list[ProgramKey]
    figures: dict[str, float]


class TransfersDone(msgspec.Struct, tag=True):
    shards: list[list[Done]]


class Alive(msgspec.Struct, tag=True):
    """Sent every second: the process runs, whatever its device does."""


Reply = Started | StartFailed | StepDone | StepFailed | Answer | Programs | TransfersDone | Alive


_LENGTH = struct.Struct("<Q")


class Channel[Received]:
    """Frames over a stream socket. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket, received: Any) -> None:
        """`received`: the union of messages that come in."""
        self._socket = sock
        self._lock = threading.Lock()
        self._decode = decoder(received)

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError when the other end is gone, or does not read for too long."""
        payload = encode(message)
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)

    def receive(self) -> Received:
        """Waits. Raises EOFError when the other end is gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        message: Received = self._decode(self._read(length))
        return message

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytearray:
        buffer = bytearray(length)
        view, done = memoryview(buffer), 0
        while done < length:
            try:
                count = self._socket.recv_into(view[done:])
            except OSError as error:
                raise EOFError(str(error)) from error
            if not count:
                raise EOFError("the other end closed the connection")
            done += count
        return buffer


def keys_of(batch: Batch, ready: Callable[[ProgramKey], bool]) -> Sequence[ProgramKey]:
    """The programs that a batch runs, as `Programs` names them, and `ready` knows them."""
    keys: list[ProgramKey] = [("verify", batch.bucket)]
    if not batch.bucket.drafts:
        keys = [("forward", batch.bucket), sampler_of(batch, ready)]
    if batch.seeds:
        keys.append(("seed", 0))
    if batch.prompt_rows:
        keys.append(("score", batch.bucket.tokens))
    if batch.pool_index is not None:
        keys.append(("pool", batch.bucket.tokens))
    return keys
