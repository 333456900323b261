"""The settings inside `kv_events_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxengine.json_setting import json_object
from jaxengine.offload.addresses import check_address

MAX_REQUEST_BYTES = 1024  # of a frame


_NAME = "kv_events_config"


_ALIASES = {"enable_kv_cache_events": "enable"}


@dataclass(frozen=True)
class KVEventsConfig:
    """Settings of the publisher. Port numbers are raised by the data-parallel rank."""

    enable: bool = False
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches held for replay
    hwm: int = 100_000  # batches that wait for one slow subscriber; more are lost to it
    max_queue_size: int = 100_000  # batches that wait for the publishing thread; more are lost
    topic: str = ""


def parse_kv_events_config(value: str | Mapping[str, Any] | None) -> KVEventsConfig:
    """From JSON text or a dict. Raises ValueError naming the key at fault."""
    if value is None:
        return KVEventsConfig()
    given = {_ALIASES.get(key, key): item for key, item in json_object(value, _NAME).items()}
    publisher = given.pop("publisher", None)
    if publisher not in ("zmq", "null", None):
        raise ValueError(f'{_NAME}.publisher must be "zmq" or "null", got {publisher!r}')
    defaults = KVEventsConfig()
    known = {f.name for f in fields(defaults)}
    for key, item in given.items():
        if key not in known:
            raise ValueError(f"{_NAME}.{key} is not known; known are {', '.join(sorted(known))}")
        default = getattr(defaults, key)
        kind = str if default is None else type(default)
        if key == "replay_endpoint" and item is None:
            continue
        if type(item) is not kind:
            raise ValueError(f"{_NAME}.{key} must be {kind.__name__}, got {item!r}")
        if isinstance(item, int) and item < 1 and kind is int:
            raise ValueError(f"{_NAME}.{key} must be at least 1, got {item}")
        if key == "topic" and len(item.encode()) >= MAX_REQUEST_BYTES:
            raise ValueError(f"{_NAME}.topic must have less than {MAX_REQUEST_BYTES} bytes")
        if key.endswith("endpoint"):
            check_address(item, f"{_NAME}.{key}", bind=True)
    if publisher == "null":
        given["enable"] = False
    return KVEventsConfig(**given)
