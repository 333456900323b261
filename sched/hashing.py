"""Hashes of full KV blocks. A block's hash names its tokens and everything before them.

    h[i] = H(h[i-1] + tokens of block i as raw int32 + tagged extras)

The parent and the tokens have fixed lengths and the extras come last, each with a tag and a
length, so two different blocks never feed the same bytes to H.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

import xxhash

from jaxengine.sched.plan import Int32

HashFunction = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


HASH_FUNCTIONS: dict[str, HashFunction] = {"sha256": sha256, "xxhash": xxh3_128}


def hash_function(name: str) -> HashFunction:
    """Raises ValueError for an unknown name."""
    if name not in HASH_FUNCTIONS:
        known = ", ".join(sorted(HASH_FUNCTIONS))
        raise ValueError(f"prefix_caching_hash_algo must be one of {known}, got {name!r}")
    return HASH_FUNCTIONS[name]


def root_hash(name: str, seed: str) -> bytes:
    """Parent of every first block.

    The same seed gives the same hashes in every process. Without a seed sha256 uses a fixed text;
    xxhash, for which collisions can be made on purpose, uses random bytes.
    """
    if name == "xxhash" and not seed:
        return os.urandom(16)
    return hash_function(name)(b"jaxengine block chain\0" + seed.encode())


def salt_extra(cache_salt: str | None) -> bytes:
    """Extra bytes of the first block: requests with different salts share nothing."""
    if cache_salt is None:
        return b""
    salt = cache_salt.encode()
    return b"salt" + len(salt).to_bytes(4, "big") + salt


def extend_hashes(
    hashes: list[bytes],
    token_ids: Int32,
    block_size: int,
    digest: HashFunction,
    root: bytes,
    first_extra: bytes = b"",
) -> None:
    """Append to `hashes` the hash of every full block of `token_ids` not yet there."""
    first, last = len(hashes), len(token_ids) // block_size
    if first >= last:
        return
    data = token_ids[first * block_size : last * block_size].tobytes()
    step = 4 * block_size
    if first == 0:
        hashes.append(digest(root + data[:step] + first_extra))
        data = data[step:]
    parent = hashes[-1]
    for start in range(0, len(data), step):
        parent = digest(parent + data[start : start + step])
        hashes.append(parent)
