"""Which ranks are coupled, and what each is told."""

from __future__ import annotations

import os
import pathlib
import stat
from typing import Any

import pytest

from jaxengine.config import EngineConfig
from jaxengine.executor.coupling import exchange_address, free_port
from jaxengine.settings.coupling import (
    Member,
    check_coupled,
    is_coupled,
    member_config,
    member_of,
    moved,
)

OFFLOAD = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 2**20},
}


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.of(**{"data_parallel_size": 2, "enable_expert_parallel": True} | settings)


@pytest.mark.parametrize(
    ("settings", "coupled"),
    [
        ({}, True),
        ({"enable_expert_parallel": False}, False),  # dense ranks go their own ways
        ({"data_parallel_size": 1}, False),
        ({"data_parallel_rank": 1}, False),  # a server of its own
        ({"data_parallel_hybrid_lb": True}, False),
    ],
    ids=str,
)
def test_who_is_coupled(settings: dict[str, Any], coupled: bool) -> None:
    assert is_coupled(config(**settings)) is coupled
    assert member_of(config(**settings)) is None  # only what a front makes of it is a member


@pytest.mark.parametrize(
    "settings",
    [
        {"nnodes": 2},
        {"pipeline_parallel_size": 2},
        {"record_expert_load": "loads.json"},
        {"kv_offloading_size": 1.0},
        {"kv_transfer_config": OFFLOAD},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
    ids=str,
)
def test_what_does_not_go_with_it(settings: dict[str, Any]) -> None:
    check_coupled(config())
    with pytest.raises(ValueError, match=f"^{next(iter(settings))} does not work with ranks"):
        check_coupled(config(**settings))


def test_a_member_is_one_process_of_the_whole() -> None:
    told = member_config(config(attention_data_parallel_size=3), 1, 15000)
    assert member_of(told) == Member(1, 2, 15000)
    assert told.parallel.attention_data_parallel_size == 6
    assert (told.parallel.nnodes, told.parallel.node_rank) == (2, 1)
    later = moved(told, 15002)
    assert member_of(later) == Member(1, 2, 15002)
    # neither is what a user may set, nor a mistake that looks like it
    with pytest.raises(ValueError, match="does not go with --data-parallel-rank"):
        EngineConfig.of(data_parallel_size=2, data_parallel_rank=1, data_parallel_size_local=2)


def test_ports_are_none_that_others_get_by_chance() -> None:
    for _ in range(5):
        assert 15_000 <= free_port() < 32_000


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Where sockets go, here of this test alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if len(str(tmp_path)) > 60:
        monkeypatch.setattr("jaxengine.executor.coupling._LONGEST_FOLDER", 500)
    return tmp_path / f"jaxengine-{os.geteuid()}"


def test_ranks_meet_where_no_other_user_may_come(folders: pathlib.Path) -> None:
    assert exchange_address(15002) == f"ipc://{folders}/ranks-15002" == exchange_address(15002)
    assert stat.S_IMODE(folders.stat().st_mode) == 0o700


def test_a_folder_of_somebody_else_is_refused(
    folders: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "is not a folder that only this user may enter"
    folders.mkdir(mode=0o755)
    with pytest.raises(ValueError, match=said):
        exchange_address(15002)
    folders.rmdir()
    elsewhere = folders.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folders.symlink_to(elsewhere)
    with pytest.raises(ValueError, match=said):
        exchange_address(15002)
    folders.unlink()
    folders.write_text("a file")
    with pytest.raises(ValueError, match=said):
        exchange_address(15002)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ValueError, match=f"jaxengine-{other} {said}"):
        exchange_address(15002)


def test_a_long_path_is_left_for_a_short_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A socket's path may have 107 bytes."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    address = exchange_address(31999)
    assert not address.startswith(f"ipc://{long}") and len(address) < 107
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "is not there"))
    assert exchange_address(31999) == address
