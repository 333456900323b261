"""What a tier below host memory must do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxengine.offload.host_pool import Bytes
from jaxengine.offload.keys import OffloadKey


class BlockStore(Protocol):
    """Blocking and thread-safe; `TierWorker` calls it on its own threads.

    Nothing here raises for a block that is missing, damaged or cannot be stored: these are
    answers. Whatever is raised otherwise counts as "missing" and is logged by the worker.
    """

    writable: bool

    def contains(self, keys: Sequence[OffloadKey], stop_at_miss: bool) -> list[bool]:
        """Which keys look present. stop_at_miss: what follows the first missing key may be
        reported missing unseen."""
        ...

    def read(self, keys: Sequence[OffloadKey], into: Sequence[Bytes]) -> list[bool]:
        """Fill `into[i]` with block i. False: not there, or not whole; the bytes are undefined."""
        ...

    def write(self, key: OffloadKey, data: Bytes) -> bool:
        """Keep a block. False when it was not."""
        ...

    def delete(self, key: OffloadKey) -> None: ...

    def close(self) -> None: ...
