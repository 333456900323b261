"""The settings of offload: `--kv-transfer-config` and its short form."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxengine.json_setting import json_object
from jaxengine.offload.addresses import check_address, numbered

GIB = 2**30


class OffloadPolicy(enum.Enum):
    """When blocks are stored: each as soon as it is full and computed, or all of a request, hits
    included, when it ends."""

    BLOCK_LEVEL = "BLOCK_LEVEL"
    REQUEST_LEVEL = "REQUEST_LEVEL"


@dataclass(frozen=True)
class PeerConfig:
    """Sharing with other engines. Addresses are ZMQ endpoints, as tcp://127.0.0.1:5710."""

    bind: str | None = None  # serve our host memory here, on this interface only
    peers: tuple[str, ...] = ()  # ask these, in this order
    lookup_timeout: float = 1.0  # seconds
    fetch_timeout: float = 5.0
    retry_after: float = 30.0  # a peer that did not answer is left alone for so long
    lease: float = 30.0  # found blocks are kept for so long


@dataclass(frozen=True)
class OffloadConfig:
    """Checked settings. Sizes in bytes, times in seconds."""

    cpu_bytes: int
    eviction_policy: str = "lru"
    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL
    offload_prompt_only: bool = False
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    stores: bool = True  # of kv_role: whether this engine stores, and whether it loads
    loads: bool = True
    fs_path: str | None = None
    fs_bytes: int = 16 * GIB
    object_store_url: str | None = None
    object_store_options: dict[str, str] = field(default_factory=dict)
    object_store_timeout: float = 5.0
    p2p: PeerConfig | None = None
    io_threads: int = 2  # per tier and direction
    max_queue: int = 1024  # tasks that may wait for a tier, per direction
    lookup_timeout: float = 10.0  # longest that a request waits for tiers before it computes

    def share(self, count: int, shard: int = 0, rank: int = 0) -> OffloadConfig:
        """The settings of a shard of an engine with `count` of them, which divide the host memory.
        Each shard of each rank listens on a port of its own."""
        p2p = self.p2p
        if p2p is not None and p2p.bind is not None:
            p2p = replace(p2p, bind=numbered(p2p.bind, rank * count + shard))
        return replace(self, cpu_bytes=self.cpu_bytes // count, p2p=p2p)

    @property
    def shares_hashes(self) -> bool:
        """Whether block hashes must mean the same in other processes."""
        return bool(self.fs_path or self.object_store_url or self.p2p)


_TOP = {
    "kv_connector",
    "kv_role",
    "kv_connector_extra_config",
    "kv_load_failure_policy",
}
_ROLES = {
    "kv_both": (True, True),
    "kv_producer": (True, False),
    "kv_consumer": (False, True),
}
_EXTRA: dict[str, type | tuple[type, ...]] = {
    "cpu_bytes_to_use": int,
    "eviction_policy": str,
    "offload_policy": str,
    "offload_prompt_only": bool,
    "fs_path": str,
    "fs_bytes": int,
    "object_store_url": str,
    "object_store_options": dict,
    "object_store_timeout": (int, float),
    "p2p": dict,
    "io_threads": int,
    "max_queue": int,
    "lookup_timeout": (int, float),
}
_PEER: dict[str, type | tuple[type, ...]] = {
    "bind": (str, int),
    "peers": list,
    "lookup_timeout": (int, float),
    "fetch_timeout": (int, float),
    "retry_after": (int, float),
    "lease": (int, float),
}


def parse_offload(
    kv_transfer_config: str | Mapping[str, Any] | None, kv_offloading_size: float | None = None
) -> OffloadConfig | None:
    """The settings, or None when offload is not asked for.

    kv_offloading_size: GiB of host memory; the short form of an OffloadingConnector with only
    that. Raises ValueError with a sentence that names the field.
    """
    if kv_transfer_config is None:
        if kv_offloading_size is None:
            return None
        if not 0 < kv_offloading_size < math.inf:
            raise ValueError(
                f"kv_offloading_size must be more than 0 GiB, got {kv_offloading_size}"
            )
        return OffloadConfig(cpu_bytes=int(kv_offloading_size * GIB))
    if kv_offloading_size is not None:
        raise ValueError("give kv_offloading_size or kv_transfer_config, not both")
    top = json_object(kv_transfer_config, "kv_transfer_config")
    _refuse_unknown(top, _TOP, "kv_transfer_config")
    connector = top.get("kv_connector")
    if connector not in ("OffloadingConnector", "P2PConnector"):
        raise ValueError(
            "kv_transfer_config: kv_connector must be OffloadingConnector or P2PConnector, "
            f"got {connector!r}"
        )
    role = top.get("kv_role")
    if role not in _ROLES:
        raise ValueError(
            f"kv_transfer_config: kv_role must be one of {', '.join(_ROLES)}, got {role!r}"
        )
    failure = top.get("kv_load_failure_policy", "recompute")
    if failure not in ("recompute", "fail"):
        raise ValueError(
            f"kv_transfer_config: kv_load_failure_policy must be recompute or fail, got {failure!r}"
        )
    if connector == "OffloadingConnector" and role != "kv_both":
        raise ValueError(
            f"kv_transfer_config: kv_role of an OffloadingConnector must be kv_both, got {role!r}"
        )
    stores, loads = _ROLES[role]
    extra = top.get("kv_connector_extra_config", {})
    config = _extra(extra, failure, stores=stores, loads=loads)
    if connector == "P2PConnector":
        _check_roles(config)
    return config


def _extra(
    extra: Any, failure: Literal["recompute", "fail"], *, stores: bool, loads: bool
) -> OffloadConfig:
    where = "kv_connector_extra_config"
    if not isinstance(extra, Mapping):
        raise ValueError(f"{where} must be an object, got {extra!r}")
    _refuse_unknown(extra, set(_EXTRA), where)
    values = _typed(extra, _EXTRA, where)
    if "cpu_bytes_to_use" not in values:
        raise ValueError(f"{where}: cpu_bytes_to_use is missing")
    cpu_bytes = values.pop("cpu_bytes_to_use")
    policy = values.pop("offload_policy", OffloadPolicy.BLOCK_LEVEL.value)
    if policy.upper() not in OffloadPolicy.__members__:
        known = ", ".join(OffloadPolicy.__members__).lower()
        raise ValueError(f"{where}: offload_policy must be one of {known}, got {policy!r}")
    if "object_store_options" in values:
        options = values["object_store_options"]
        values["object_store_options"] = {str(k): str(v) for k, v in options.items()}
    if "p2p" in values:
        values["p2p"] = _peers(values["p2p"])
    for name, value in {**values, "cpu_bytes_to_use": cpu_bytes}.items():
        if type(value) in (int, float) and not 0 < value < math.inf:
            raise ValueError(f"{where}: {name} must be more than 0, got {value}")
    return OffloadConfig(
        cpu_bytes=cpu_bytes,
        policy=OffloadPolicy[policy.upper()],
        load_failure_policy=failure,
        stores=stores,
        loads=loads,
        **values,
    )


def _peers(fields: Mapping[str, Any]) -> PeerConfig:
    _refuse_unknown(fields, set(_PEER), "p2p")
    values = _typed(fields, _PEER, "p2p")
    peers, bind = values.pop("peers", []), values.pop("bind", None)
    if not all(isinstance(peer, str) for peer in peers):
        raise ValueError(f"p2p: peers must be a list of addresses, got {peers!r}")
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"p2p: {name} must be more than 0 seconds, got {value}")
    if isinstance(bind, int):  # a port alone: nobody but this machine
        bind = f"tcp://127.0.0.1:{bind}"
    if bind is not None:
        check_address(bind, "p2p: bind", bind=True)
    for peer in peers:
        check_address(peer, "p2p: peers", bind=False)
    if not peers and bind is None:
        raise ValueError("p2p: give bind, to serve others, or peers, to ask them")
    return PeerConfig(bind=bind, peers=tuple(peers), **values)


def _check_roles(config: OffloadConfig) -> None:
    """A P2PConnector has somebody to give to, or somebody to take from."""
    peer = config.p2p
    if config.stores and (peer is None or peer.bind is None):
        raise ValueError("P2PConnector: a kv_producer needs p2p.bind, its address for consumers")
    if config.loads and (peer is None or not peer.peers):
        raise ValueError("P2PConnector: a kv_consumer needs p2p.peers, the producers' addresses")


def _refuse_unknown(fields: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(
            f"{where}: unknown field {unknown[0]!r}; there are {', '.join(sorted(known))}"
        )


def _typed(
    fields: Mapping[str, Any], types: Mapping[str, type | tuple[type, ...]], where: str
) -> dict[str, Any]:
    for name, value in fields.items():
        # bool is an int to Python, but not to whoever writes JSON.
        wrong = isinstance(value, bool) != (types[name] is bool)
        if wrong or not isinstance(value, types[name]):
            raise ValueError(f"{where}: {name} has the wrong type: {value!r}")
    return dict(fields)
