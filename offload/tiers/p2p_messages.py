"""What engines say to each other: one msgpack frame, then one frame a page."""

from __future__ import annotations

from typing import Annotated

import msgspec
import xxhash

from jaxengine.offload.host_pool import Bytes
from jaxengine.offload.keys import GROUP_BYTES, MAX_KEY_BYTES, OffloadKey

MAX_KEYS = 65_536
MAX_CONTROL_BYTES = 16 * 2**20  # of the msgpack frame
MAX_ANSWER_BYTES = 256 * 2**20  # of the pages of one answer, unless a single page is bigger

Key = Annotated[bytes, msgspec.Meta(min_length=GROUP_BYTES + 1, max_length=MAX_KEY_BYTES)]
Name = Annotated[bytes, msgspec.Meta(max_length=64)]
Number = Annotated[int, msgspec.Meta(ge=0)]


class Lookup(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Which of these blocks do you have? What is there is kept for the lease, for a Fetch."""

    number: Number
    client: Name  # the same in all connections of an engine
    namespace: Name
    keys: list[Key]


class Found(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A `State` for each key, as a byte."""

    number: Number
    states: bytes


class Fetch(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Pages, please: each key once, and no more than MAX_ANSWER_BYTES of them."""

    number: Number
    client: Name
    namespace: Name
    keys: list[Key]


class Pages(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Digests of the pages that follow as frames; empty for a key that is not there (no frame)."""

    number: Number
    digests: list[bytes]


class Refused(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The request makes no sense to this peer, nor will it later."""

    number: Number
    reason: str


Message = Lookup | Found | Fetch | Pages | Refused


class BadMessage(ValueError):
    """A frame that is none of the messages."""


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def decode(frame: bytes) -> Message:
    """Raises BadMessage, whatever the frame holds."""
    try:
        return _decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:  # arrays in arrays in arrays ...
        raise BadMessage(str(error)) from error


def page_digest(key: OffloadKey, page: Bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128(key)
    digest.update(memoryview(page))
    return digest.digest()
