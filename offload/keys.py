"""Names of stored blocks.

An OffloadKey is one bytes object: the block's hash, then its KV group as 4 bytes big endian.
Tuples would say the same, but millions of them burden the garbage collector.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

OffloadKey = bytes

GROUP_BYTES = 4
NAMESPACE_BYTES = 16
MAX_KEY_BYTES = 128


def group_suffix(group: int) -> bytes:
    return group.to_bytes(GROUP_BYTES, "big")


def make_key(block_hash: bytes, group: int) -> OffloadKey:
    return block_hash + group_suffix(group)


def group_of(key: OffloadKey) -> int:
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def namespace_key(facts: Mapping[str, object]) -> bytes:
    """[16 bytes] names everything besides the tokens on which a block's bytes depend.

    `facts` is JSON-able: model, revision, dtype, rope, layout, block size, hash function and seed.
    Engines with different namespaces never share a block. Raises TypeError for other values.
    """
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES).digest()
