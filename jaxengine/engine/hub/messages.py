"""What API processes and their supervisor say to each other (ZMQ frames of msgpack)."""

from __future__ import annotations

import msgspec

from jaxengine.engine.messages import (
    EngineOutputs,
    EngineReady,
    EngineRequest,
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
    """A sequence, and where it wants to run."""

    request: EngineRequest
    rank: int | None = None
    session: str | None = None


class _Named(msgspec.Struct):
    """The least of an `EngineRequest`."""

    request_id: str


class _AddNamed(msgspec.Struct, array_like=True):
    """The least of an `Add`."""

    request: _Named


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


def name_of(payload: bytes) -> str | None:
    """The sequence's id in an `Add` that may be malformed otherwise."""
    try:
        return _decode_named(payload).request.request_id
    except (msgspec.MsgspecError, RecursionError):
        return None
