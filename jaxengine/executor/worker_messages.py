"""What an engine process and its worker say to each other: msgpack frames over a socket pair."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from jaxengine.config import EngineConfig
from jaxengine.executor.facts import Facts
from jaxengine.offload.jobs import Done, OffloadStep
from jaxengine.offload.layout import KVLayout
from jaxengine.sched.batch import Bucket
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import StepResult
from jaxengine.sched.shapes import ProgramKey, sampler_of
from jaxengine.settings.faults import Fault


class Array(msgspec.Struct, array_like=True):
    """A NumPy array as raw bytes; reading one makes no copy."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @staticmethod
    def of(array: NDArray[Any]) -> Array:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return Array(array.dtype.str, array.shape, flat.data)

    def numpy(self) -> NDArray[Any]:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class WireBatch(msgspec.Struct, array_like=True):
    """`sched.executor.Batch`."""

    bucket: Bucket
    blob: Array
    sampler_rows: int
    rows_blob: Array
    num_rows: tuple[int, ...]
    seeds: list[Array]
    want_logprobs: bool
    masked: bool
    prompt_rows: list[tuple[int, int, int, int]]
    prompt_targets: Array | None
    pool_index: Array | None

    @staticmethod
    def of(batch: Batch) -> WireBatch:
        targets, index = batch.prompt_targets, batch.pool_index
        return WireBatch(
            batch.bucket,
            Array.of(batch.blob),
            batch.sampler_rows,
            Array.of(batch.rows_blob),
            batch.num_rows,
            [Array.of(seed) for seed in batch.seeds],
            batch.want_logprobs,
            batch.masked,
            batch.prompt_rows,
            None if targets is None else Array.of(targets),
            None if index is None else Array.of(index),
        )

    def batch(self) -> Batch:
        targets, index = self.prompt_targets, self.pool_index
        return Batch(
            self.bucket,
            self.blob.numpy(),
            self.sampler_rows,
            self.rows_blob.numpy(),
            self.num_rows,
            [seed.numpy() for seed in self.seeds],
            self.want_logprobs,
            self.masked,
            self.prompt_rows,
            None if targets is None else targets.numpy(),
            None if index is None else index.numpy(),
        )


class WireResult(msgspec.Struct, array_like=True):
    """`sched.plan.StepResult`: its arrays in the order of the fields, and the prompt's by row."""

    arrays: list[Array | None]
    prompt: list[tuple[int, Array, Array, Array]]

    @staticmethod
    def of(result: StepResult) -> WireResult:
        arrays = [getattr(result, name) for name in _RESULT_ARRAYS]
        return WireResult(
            [None if array is None else Array.of(array) for array in arrays],
            [(row, *map(Array.of, part)) for row, part in result.prompt_logprobs.items()],  # type: ignore[misc]
        )

    def result(self) -> StepResult:
        arrays = [None if array is None else array.numpy() for array in self.arrays]
        fields: dict[str, Any] = dict(zip(_RESULT_ARRAYS, arrays, strict=True))
        prompt = {row: (a.numpy(), b.numpy(), c.numpy()) for row, a, b, c in self.prompt}
        return StepResult(**fields, prompt_logprobs=prompt)


# All of its arrays: a field that is missing here would be lost on the way.
_RESULT_ARRAYS = tuple(f.name for f in fields(StepResult) if f.name != "prompt_logprobs")


# -- engine -> worker -----------------------------------------------------------------------


class Start(msgspec.Struct, tag=True):
    """The first message."""

    config: EngineConfig
    parent_pid: int


class Submit(msgspec.Struct, tag=True):
    step: int
    batch: WireBatch
    fault: Fault | None = None  # to fail of, for drills


class Sample(msgspec.Struct, tag=True):
    step: int
    mask: Array


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
    results: list[WireResult]


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
_encode = msgspec.msgpack.Encoder().encode


class Channel[Received]:
    """Frames over a stream socket. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket, received: Any) -> None:
        """`received`: the union of messages that come in."""
        self._socket = sock
        self._lock = threading.Lock()
        self._decode = msgspec.msgpack.Decoder(received).decode

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError when the other end is gone, or does not read for too long."""
        payload = _encode(message)
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
