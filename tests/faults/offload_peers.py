"""What the tests of sharing between engines have in common: blocks, a server, a client."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxengine.offload.config import PeerConfig
from jaxengine.offload.counters import Counters
from jaxengine.offload.host_pool import PagePool
from jaxengine.offload.keys import make_key, namespace_key
from jaxengine.offload.policies import make_policy
from jaxengine.offload.tiers.host import HostTier
from jaxengine.offload.tiers.p2p import PeerStore
from jaxengine.offload.tiers.p2p_server import PeerServer

PAGE = 4096
SPACE = namespace_key({"model": "test"})


def key_of(i: int) -> bytes:
    return make_key(i.to_bytes(32, "big"), 0)


def page_of(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, PAGE, np.uint8)


def host_with(count: int, size: int = PAGE) -> HostTier:
    """Slots of `size` bytes, all taken; each begins with its page."""
    host = HostTier(PagePool(count, size), make_policy("lru", count))
    reserved = host.reserve([key_of(i) for i in range(count)])
    assert reserved is not None
    for i, slot in enumerate(reserved.slots):
        host.pool.view(slot)[:PAGE] = page_of(i)
    host.commit(reserved.slots, True)
    return host


def serve(
    host: HostTier,
    space: bytes = SPACE,
    lease: float = 30.0,
    page_bytes: int = PAGE,
    bind: str = "tcp://127.0.0.1:*",
    **limits: Any,
) -> PeerServer:
    counters = Counters()
    return PeerServer(bind, host, space, lambda group: page_bytes, counters, lease, **limits)


def client(*peers: str, retry_after: float = 30.0, patience: float = 0.3) -> PeerStore:
    """`patience`: seconds for a lookup; a fetch has a little more."""
    config = PeerConfig(
        peers=peers,
        lookup_timeout=patience,
        fetch_timeout=patience + 0.2,
        retry_after=retry_after,
    )
    return PeerStore(config, SPACE, Counters(), PAGE)


def count(store: PeerStore, name: str) -> float:
    return store._counters.get(name)


def fetch(store: PeerStore, numbers: range) -> list[bool]:
    pages = [np.zeros(PAGE, np.uint8) for _ in numbers]
    found = store.read([key_of(i) for i in numbers], pages)
    for i, there, page in zip(numbers, found, pages, strict=True):
        assert not there or (page == page_of(i)).all()
    return found


def keys(numbers: range) -> list[bytes]:
    return [key_of(i) for i in numbers]


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
