"""From settings to a connector with its tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxengine.offload.config import OffloadConfig
from jaxengine.offload.connector import OffloadingConnector
from jaxengine.offload.counters import Counters
from jaxengine.offload.host_pool import PagePool
from jaxengine.offload.keys import namespace_key
from jaxengine.offload.layout import KVLayout
from jaxengine.offload.manager import OffloadManager
from jaxengine.offload.policies import make_policy
from jaxengine.offload.tiers.fs import FsStore
from jaxengine.offload.tiers.host import HostTier
from jaxengine.offload.tiers.object_store import ObjectStore, open_store
from jaxengine.offload.tiers.p2p import PeerStore
from jaxengine.offload.tiers.p2p_server import PeerServer
from jaxengine.offload.tiers.worker import TierWorker
from jaxengine.sched.config import SchedulerSizes


@dataclass(frozen=True)
class Offload:
    """Everything of one engine. `pool` is what the device side maps or shares."""

    connector: OffloadingConnector
    pool: PagePool
    layout: KVLayout
    server: PeerServer | None

    def close(self) -> None:
        """Threads end within seconds, what they were given is written."""
        if self.server is not None:
            self.server.close()
        self.connector.close()
        self.pool.close()


def build_offload(
    config: OffloadConfig,
    layout: KVLayout,
    sched_sizes: SchedulerSizes,
    facts: Mapping[str, object],
    shared: bool = False,
) -> Offload:
    """The connector and what is behind it; `connector.bind` is left to the caller.

    facts: what the KV of equal tokens depends on besides `layout` and `sched_sizes`: model,
    revision, rope, weights' type. shared: a worker process maps the host pool.
    Raises ValueError that names the setting, OSError for folder or memory.
    """
    if not sched_sizes.enable_prefix_caching:
        raise ValueError("KV offload needs enable_prefix_caching: blocks are found by their hash")
    if config.shares_hashes and sched_sizes.prefix_caching_hash_algo == "xxhash":
        if not sched_sizes.hash_seed:
            raise ValueError(
                "prefix_caching_hash_algo xxhash without a hash seed names blocks differently in "
                "every process: use sha256, or host memory only"
            )
    if len(sched_sizes.groups) != layout.num_groups:
        raise ValueError(
            f"the scheduler has {len(sched_sizes.groups)} KV groups, the layout {layout.num_groups}"
        )
    if sched_sizes.block_size != layout.block_size:
        raise ValueError(
            f"block_size is {sched_sizes.block_size} for the scheduler, "
            f"{layout.block_size} in the layout"
        )
    num_slots = config.cpu_bytes // layout.slot_bytes
    if num_slots < 1:
        raise ValueError(
            f"cpu_bytes_to_use is {config.cpu_bytes}, but one block needs {layout.slot_bytes}"
        )
    policy = make_policy(config.eviction_policy, num_slots)
    namespace = namespace_key(
        {
            **facts,
            "layout": layout.facts(),
            "windows": [group.window for group in sched_sizes.groups],
            "hash": [sched_sizes.prefix_caching_hash_algo, sched_sizes.hash_seed],
        }
    )
    counters = Counters()
    pool = PagePool(num_slots, layout.slot_bytes, shared)
    tiers: list[TierWorker] = []
    try:
        host = HostTier(pool, policy)
        server = None
        tiers += _tiers(config, namespace, layout.slot_bytes, counters)
        if config.p2p is not None and config.p2p.bind is not None:
            server = PeerServer(
                config.p2p.bind, host, namespace, layout.page_bytes, counters, config.p2p.lease
            )
    except BaseException:
        for tier in tiers:
            tier.close()
        pool.close()
        raise
    manager = OffloadManager(host, tiers, layout.page_bytes, counters)
    return Offload(OffloadingConnector(config, sched_sizes, manager), pool, layout, server)


def _tiers(
    config: OffloadConfig, namespace: bytes, page_bytes: int, counters: Counters
) -> list[TierWorker]:
    """Nearest first: a neighbour's memory is asked before the object store."""
    stores: list[tuple[str, FsStore | PeerStore | ObjectStore]] = []
    if config.fs_path is not None:
        stores.append(("fs", FsStore(config.fs_path, namespace, config.fs_bytes, counters)))
    if config.p2p is not None and config.p2p.peers:
        stores.append(("p2p", PeerStore(config.p2p, namespace, counters, page_bytes)))
    if config.object_store_url is not None:
        opened = open_store(
            config.object_store_url, config.object_store_options, config.object_store_timeout
        )
        stores.append(("object", ObjectStore(opened, namespace, counters)))
    limits = {"threads": config.io_threads, "max_queue": config.max_queue}
    return [TierWorker(name, store, counters, **limits) for name, store in stores]
