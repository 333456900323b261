"""What engines say to each other: one msgpack frame, then one frame a page."""

from __future__ import annotations

import msgspec
import xxhash

from jaxengine.offload.host_pool import Bytes
from jaxengine.offload.keys import OffloadKey

MAX_KEYS = 65_536
MAX_CONTROL_BYTES = 16 * 2**20


class Lookup(msgspec.Struct, frozen=True, tag=True):
    """Which of these blocks do you have? What is there is kept for the lease, for a Fetch."""

    number: int
    client: bytes  # the same in all connections of an engine
    namespace: bytes
    keys: list[bytes]


class Found(msgspec.Struct, frozen=True, tag=True):
    """A `State` for each key, as a byte."""

    number: int
    states: bytes


class Fetch(msgspec.Struct, frozen=True, tag=True):
    number: int
    client: bytes
    namespace: bytes
    keys: list[bytes]


class Pages(msgspec.Struct, frozen=True, tag=True):
    """Digests of the pages that follow as frames; empty for a key that is not there (no frame)."""

    number: int
    digests: list[bytes]


class Refused(msgspec.Struct, frozen=True, tag=True):
    number: int
    reason: str


Message = Lookup | Found | Fetch | Pages | Refused

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


def page_digest(key: OffloadKey, page: Bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128(key)
    digest.update(memoryview(page))
    return digest.digest()
