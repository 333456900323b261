"""Whole engines over tiers that they share: restarts, strangers, prefill and decode apart."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import pytest
from offload_engine import BLOCK, OffloadEngine, config_for, layout_for, scheduler_sizes

from jaxengine.offload.build import build_offload
from jaxengine.offload.config import PeerConfig
from jaxengine.sched.scheduler import Scheduler

PROMPT = random.Random(5).choices(range(61), k=9 * BLOCK + 2)


def engine(**more: Any) -> OffloadEngine:
    sched_sizes = scheduler_sizes(40)
    return OffloadEngine(sched_sizes, config_for(100, sched_sizes, **more))


def rebuild(old: OffloadEngine, facts: dict[str, object]) -> OffloadEngine:
    """The same engine with another model."""
    old.offload.close()
    new = OffloadEngine(old.config, old.connector.config)
    new.offload.close()
    new.offload = build_offload(old.connector.config, layout_for(old.config), old.config, facts)
    new.connector = new.offload.connector
    new.transfer.offload = new.offload
    new.scheduler = Scheduler(old.config, connector=new.connector)
    new.connector.bind(new.scheduler.state.kv)
    new.device.block_tables = new.scheduler.block_tables
    return new


def test_files_survive_a_restart_but_not_another_model(tmp_path: pathlib.Path) -> None:
    """B39."""
    first = engine(fs_path=str(tmp_path))
    first.ask("a", PROMPT, 4)
    first.offload.close()
    second = engine(fs_path=str(tmp_path))
    second.ask("b", PROMPT, 4)
    assert second.seen["b"] == first.seen["a"]
    assert second.requests["b"].num_cached_tokens == 9 * BLOCK
    assert second.count("fs_hits") == 9
    third = rebuild(second, {"model": "fake", "revision": "other"})
    third.ask("c", PROMPT, 4)
    assert third.requests["c"].num_cached_tokens == 0 and third.count("fs_hits") == 0
    third.check_outputs()
    third.offload.close()


@pytest.mark.parametrize("damage", ["truncate", "flip", "vanish", "directory"])
def test_a_damaged_tier_only_costs_time(tmp_path: pathlib.Path, damage: str) -> None:
    """B40: whole text, no retry loop, and what was computed anew is stored anew."""
    first = engine(fs_path=str(tmp_path))
    first.ask("a", PROMPT, 4)
    first.offload.close()
    for number, path in enumerate(sorted(tmp_path.rglob("*.kv"))):
        if number % 3 == 0:
            data = bytearray(path.read_bytes())
            path.unlink()
            if damage == "truncate":
                path.write_bytes(data[:-7])
            elif damage == "flip":
                data[len(data) // 2] ^= 8
                path.write_bytes(data)
            elif damage == "directory":
                path.mkdir()
    second = engine(fs_path=str(tmp_path))
    second.ask("b", PROMPT, 4)
    second.ask("c", PROMPT, 4)
    assert second.count("fs_fetch_failures") <= 4
    second.forget_device()
    second.ask("d", PROMPT, 4)
    assert second.requests["d"].num_cached_tokens == 9 * BLOCK
    second.check_outputs()
    second.offload.close()


def test_prefill_and_decode_in_two_engines() -> None:
    """P2PConnector: the producer only stores, the consumer only loads."""
    producer = engine(p2p=PeerConfig(bind="tcp://127.0.0.1:*"), loads=False)
    assert producer.offload.server is not None
    endpoint = producer.offload.server.endpoint
    consumer = engine(p2p=PeerConfig(peers=(endpoint,)), stores=False)
    producer.ask("prefill", PROMPT, 1)
    consumer.ask("decode", PROMPT, 8)
    assert consumer.requests["decode"].num_cached_tokens == 9 * BLOCK
    assert consumer.count("p2p_hits") == 9 and consumer.count("store_jobs") == 0
    consumer.check_outputs()
    producer.forget_device()
    producer.ask("again", PROMPT, 1)
    assert producer.requests["again"].num_cached_tokens == 0
    # The producer dies: the consumer computes, within its bound.
    producer.offload.close()
    consumer.ask("alone", PROMPT[::-1], 8)
    assert consumer.count("p2p_peer_failures") == 1
    consumer.check_outputs()
    consumer.offload.close()


def test_what_is_on_no_tier_is_asked_for_once(tmp_path: pathlib.Path) -> None:
    (tmp_path / "objects").mkdir()
    alone = engine(fs_path=str(tmp_path), object_store_url=(tmp_path / "objects").as_uri())
    alone.ask("a", PROMPT, 2)
    assert alone.count("fs_queries") == alone.count("object_queries") == 9
    alone.check_outputs()
    alone.offload.close()
