"""The stored form of a block, the same for files and objects: a header, then the page.

Header, little endian: magic "JXKV", version (2 bytes), key length (2), namespace (16), page length
(8), digest (16), key. The digest is xxh3-128 over everything else, the page included: it tells
damage, it is no defence against someone who may write to the store.
"""

from __future__ import annotations

import struct

import xxhash

from jaxengine.offload.host_pool import Bytes
from jaxengine.offload.keys import MAX_KEY_BYTES, NAMESPACE_BYTES, OffloadKey

MAGIC = b"JXKV"
VERSION = 1
_FIELDS = struct.Struct("<4sHH16sQ")
_DIGEST_BYTES = 16
MAX_HEADER_BYTES = _FIELDS.size + _DIGEST_BYTES + MAX_KEY_BYTES


class PageError(ValueError):
    """Stored bytes that are not the wanted page. The text says why."""


def header_size(key: OffloadKey) -> int:
    return _FIELDS.size + _DIGEST_BYTES + len(key)


def header_of(namespace: bytes, key: OffloadKey, page: Bytes | memoryview) -> bytes:
    """The header of a page. Raises ValueError for a key or namespace of a wrong size."""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, got {len(key)}")
    if len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"a namespace has {NAMESPACE_BYTES} bytes, got {len(namespace)}")
    fields = _FIELDS.pack(MAGIC, VERSION, len(key), namespace, page.nbytes)
    return fields + _digest(fields, key, page) + key


def check_page(header: bytes, namespace: bytes, key: OffloadKey, page: Bytes | memoryview) -> None:
    """Raises PageError unless `header` is this page's, and nothing was changed."""
    expected = header_size(key)
    if len(header) != expected:
        raise PageError(f"header of {len(header)} bytes instead of {expected}")
    fields = header[: _FIELDS.size]
    magic, version, key_length, stored_namespace, length = _FIELDS.unpack(fields)
    if magic != MAGIC or version != VERSION:
        raise PageError("not a page file of this version")
    if stored_namespace != namespace:
        raise PageError("page of another namespace")
    if key_length != len(key) or header[_FIELDS.size + _DIGEST_BYTES :] != key:
        raise PageError("page of another key")
    if length != page.nbytes:
        raise PageError(f"page of {length} bytes instead of {page.nbytes}")
    if header[_FIELDS.size : _FIELDS.size + _DIGEST_BYTES] != _digest(fields, key, page):
        raise PageError("checksum does not match")


def parse_whole(data: bytes) -> tuple[bytes, OffloadKey]:
    """(namespace, key) of a whole stored block, checked. Raises PageError."""
    if len(data) < _FIELDS.size + _DIGEST_BYTES:
        raise PageError("shorter than a header")
    key_length = _FIELDS.unpack(data[: _FIELDS.size])[2]
    start = _FIELDS.size + _DIGEST_BYTES + key_length
    key, namespace = data[_FIELDS.size + _DIGEST_BYTES : start], data[8:24]
    if len(key) != key_length:
        raise PageError("shorter than its key")
    check_page(data[:start], namespace, key, memoryview(data)[start:])
    return namespace, key


def _digest(fields: bytes, key: OffloadKey, page: Bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128(fields)
    digest.update(key)
    digest.update(memoryview(page))
    return digest.digest()
