"""Settings: the documented form, and one sentence for every mistake."""

from __future__ import annotations

import json
import pathlib
import socket
import threading
from typing import Any

import pytest
from offload_engine import config_for, layout_for, scheduler_sizes

from jaxengine.offload.addresses import is_local
from jaxengine.offload.build import build_offload
from jaxengine.offload.config import GIB, OffloadPolicy, PeerConfig, parse_offload

GOOD: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 17179869184, "eviction_policy": "lru"},
}


def with_extra(**extra: Any) -> dict[str, Any]:
    return {**GOOD, "kv_connector_extra_config": {"cpu_bytes_to_use": 1024, **extra}}


def test_the_documented_forms() -> None:
    config = parse_offload(json.dumps(GOOD))
    assert config is not None and config.cpu_bytes == 16 * GIB
    assert config.policy is OffloadPolicy.BLOCK_LEVEL and config.load_failure_policy == "recompute"
    assert parse_offload(None, 16) == config
    assert parse_offload(None) is None
    full = parse_offload(
        with_extra(
            fs_path="kv",
            fs_bytes=10,
            object_store_url="s3://bucket/kv",
            p2p={"bind": "tcp://127.0.0.1:5710", "peers": ["tcp://127.0.0.1:5711"], "lease": 3},
            offload_policy="REQUEST_LEVEL",
            offload_prompt_only=True,
        )
    )
    assert full is not None and full.policy is OffloadPolicy.REQUEST_LEVEL
    assert full.p2p is not None and full.p2p.lease == 3 and full.offload_prompt_only
    roles = {}
    for role in ("kv_producer", "kv_consumer"):
        p2p = {"bind": "tcp://127.0.0.1:1", "peers": ["tcp://127.0.0.1:2"]}
        made = parse_offload(
            {**with_extra(p2p=p2p), "kv_connector": "P2PConnector", "kv_role": role}
        )
        assert made is not None
        roles[role] = (made.stores, made.loads)
    assert roles == {"kv_producer": (True, False), "kv_consumer": (False, True)}


@pytest.mark.parametrize(
    "config, text",
    [
        ("{", "kv_transfer_config is not JSON"),
        ("[]", "must be a JSON object"),
        ({**GOOD, "kv_rolle": 1}, "unknown field 'kv_rolle'"),
        ({**GOOD, "kv_connector": "Nixl"}, "kv_connector must be"),
        ({**GOOD, "kv_role": "both"}, "kv_role must be one of"),
        ({**GOOD, "kv_role": "kv_producer"}, "kv_role of an OffloadingConnector must be kv_both"),
        ({**GOOD, "kv_load_failure_policy": "retry"}, "kv_load_failure_policy must be"),
        ({**GOOD, "kv_connector_extra_config": {}}, "cpu_bytes_to_use is missing"),
        (with_extra(fs_bites=1), "unknown field 'fs_bites'"),
        (with_extra(fs_bytes="1"), "fs_bytes has the wrong type"),
        (with_extra(fs_bytes=True), "fs_bytes has the wrong type"),
        (with_extra(fs_bytes=0), "fs_bytes must be more than 0"),
        (with_extra(offload_policy="ALL"), "offload_policy must be one of"),
        (with_extra(p2p={"bnd": ""}), "p2p: unknown field 'bnd'"),
        (with_extra(p2p={}), "p2p: give bind"),
        (with_extra(p2p={"bind": "x", "lease": -1}), "p2p: lease must be more than 0"),
        (with_extra(p2p={"bind": 5710, "lease": float("nan")}), "p2p: lease must be more than 0"),
        (with_extra(lookup_timeout=float("inf")), "lookup_timeout must be more than 0"),
        (with_extra(p2p={"bind": "x"}), "p2p: bind must be an address like tcp://127.0.0.1:5710"),
        (with_extra(p2p={"bind": 70_000}), "p2p: bind: 70000 is no port"),
        (with_extra(p2p={"bind": True}), "p2p: bind has the wrong type"),
        (with_extra(p2p={"peers": ["a:5710"]}), "p2p: peers must be an address"),
        (with_extra(p2p={"peers": ["tcp://a"]}), "p2p: peers must be an address"),
        (with_extra(p2p={"peers": ["tcp://a:*"]}), "p2p: peers: \\* is no port"),
        (with_extra(p2p={"peers": [5710]}), "p2p: peers must be a list of addresses"),
        ({**with_extra(), "kv_connector": "P2PConnector"}, "needs p2p.bind"),
    ],
)
def test_mistakes_are_named(config: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_offload(config)
    with pytest.raises(ValueError, match="not both"):
        parse_offload(GOOD, 1.0)


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
def test_sizes_that_are_none(size: float) -> None:
    with pytest.raises(ValueError, match="more than 0 GiB"):
        parse_offload(None, size)


@pytest.mark.parametrize("policy", OffloadPolicy)
def test_policies_in_any_spelling(policy: OffloadPolicy) -> None:
    for spelling in (policy.value, policy.value.lower(), policy.value.capitalize()):
        config = parse_offload(with_extra(offload_policy=spelling))
        assert config is not None and config.policy is policy


def test_peers_share_on_this_machine_unless_told_otherwise() -> None:
    addresses = {
        5710: "tcp://127.0.0.1:5710",
        "tcp://127.0.0.1:*": "tcp://127.0.0.1:*",
        "tcp://*:5710": "tcp://*:5710",
        "ipc:///run/kv": "ipc:///run/kv",
    }
    for given, used in addresses.items():
        config = parse_offload(with_extra(p2p={"bind": given}))
        assert config is not None and config.p2p is not None and config.p2p.bind == used
    config = parse_offload(with_extra(p2p={"peers": ["tcp://node-1:5710", "tcp://[::1]:1"]}))
    assert config is not None and config.p2p is not None and config.p2p.bind is None


def test_who_is_let_in() -> None:
    local = ["tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///run/kv"]
    assert all(is_local(address) for address in local)
    others = ["tcp://*:1", "tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "tcp://127.0.0.1.example:1"]
    assert not any(is_local(address) for address in others)


def test_a_start_that_fails_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    sched_sizes = scheduler_sizes(8)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        p2p = PeerConfig(bind=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        config = config_for(4, sched_sizes, fs_path=str(tmp_path), p2p=p2p)
        with pytest.raises(ValueError, match=r"p2p\.bind: cannot listen on"):
            build_offload(config, layout_for(sched_sizes), sched_sizes, {})
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-fs")]


def test_what_cannot_work_together(tmp_path: pathlib.Path) -> None:
    sched_sizes = scheduler_sizes(8)
    layout = layout_for(sched_sizes)
    fs = config_for(4, sched_sizes, fs_path=str(tmp_path))
    random_hashes = scheduler_sizes(8, prefix_caching_hash_algo="xxhash")
    with pytest.raises(ValueError, match="names blocks differently in every process"):
        build_offload(fs, layout, random_hashes, {})
    with pytest.raises(ValueError, match="needs enable_prefix_caching"):
        build_offload(fs, layout, scheduler_sizes(8, enable_prefix_caching=False), {})
    with pytest.raises(ValueError, match="2 KV groups, the layout 1"):
        build_offload(fs, layout, scheduler_sizes(8, (0, 8)), {})
    with pytest.raises(ValueError, match="one block needs 32"):
        build_offload(config_for(0, sched_sizes), layout, sched_sizes, {})
    with pytest.raises(ValueError, match="eviction_policy must be one of"):
        build_offload(config_for(4, sched_sizes, eviction_policy="x"), layout, sched_sizes, {})


def test_every_shard_of_every_rank_has_an_address_of_its_own() -> None:
    config = parse_offload(with_extra(p2p={"bind": "tcp://127.0.0.1:5710"}))
    assert config is not None
    shares = [config.share(2, shard, rank) for rank in range(2) for shard in range(2)]
    binds = [share.p2p.bind for share in shares if share.p2p is not None]
    assert binds == [f"tcp://127.0.0.1:{port}" for port in range(5710, 5714)]
