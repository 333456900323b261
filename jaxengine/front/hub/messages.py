"""What API processes and their supervisor say to each other (ZMQ frames of msgpack)."""

from __future__ import annotations

import msgspec

from jaxengine.wire.messages import (
    EngineOutputs,
    EngineReady,
    Siblings,
    UtilityCall,
    UtilityResult,
)

# API process -> supervisor
HELLO = b"\x20"
ADD = b"\x21"
ABORT = b"\x22"  # list of sequence ids
CALL = b"\x23"
REPORT = b"\x24"
PONG = b"\x25"  # a sign of life, as any other message is

# supervisor -> API process
READY = b"\x30"
OUTPUTS = b"\x31"
RESULT = b"\x32"
COLLECT = b"\x33"  # asks for a Report
DEAD = b"\x34"
PING = b"\x35"  # asks for a PONG

# calls that the supervisor answers itself
FIGURES = "figures"  # with `Figures`
SERVING = "serving"  # "I take requests now"


class Add(msgspec.Struct, array_like=True):
    """The sequences of one request, and where it wants to run."""

    siblings: Siblings
    rank: int | None = None
    session: str | None = None


class _Named(msgspec.Struct):
    """The least of an `EngineRequest`."""

    request_id: str


class _SiblingsNamed(msgspec.Struct, array_like=True):
    """The least of `Siblings`."""

    first: _Named
    rest: list[tuple[str, int | None]] = []


class _AddNamed(msgspec.Struct, array_like=True):
    """The least of an `Add`."""

    siblings: _SiblingsNamed


class Report(msgspec.Struct, array_like=True):
    """An API process's own metrics as text, and the requests it is answering."""

    text: bytes
    num_requests: int


class Dead(msgspec.Struct, array_like=True):
    """The engines are gone."""

    message: str
    kind: str


Figures = Report  # of all API processes together

encode = msgspec.msgpack.Encoder().encode
decode_add = msgspec.msgpack.Decoder(Add).decode
decode_ids = msgspec.msgpack.Decoder(list[str]).decode
decode_call = msgspec.msgpack.Decoder(UtilityCall).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_ready = msgspec.msgpack.Decoder(EngineReady).decode
decode_outputs = msgspec.msgpack.Decoder(EngineOutputs).decode
decode_result = msgspec.msgpack.Decoder(UtilityResult).decode
decode_dead = msgspec.msgpack.Decoder(Dead).decode
_decode_named = msgspec.msgpack.Decoder(_AddNamed).decode


def names_of(payload: bytes) -> list[str]:
    """The sequences' ids in an `Add` that may be malformed otherwise."""
    try:
        named = _decode_named(payload).siblings
    except (msgspec.MsgspecError, RecursionError):
        return []
    return [named.first.request_id, *(request_id for request_id, _ in named.rest)]
