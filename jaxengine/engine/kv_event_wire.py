"""KV events in the form that vLLM's subscribers read: an array of time, events and rank, each event
a map by field name whose `type` names it."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from jaxengine.sched.kv_events import BlockStored, KVEvent

_encode = msgspec.msgpack.Encoder().encode


def encode_batch(at: float, events: list[KVEvent], rank: int) -> bytes:
    """The payload of one message. `at`: seconds since the epoch."""
    return _encode([at, [_fields(event) for event in events], rank])


def _fields(event: KVEvent) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(event).__name__, **dataclasses.asdict(event)}
    if isinstance(event, BlockStored):  # there are no adapters, but subscribers want the fields
        fields["lora_id"] = fields["lora_name"] = None
    return fields
