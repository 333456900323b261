from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny_model
from engine_server import ENGINE_FLAGS
from invalid_bodies import TINY_FLAGS
from serverlib import Server, running

from jaxengine.wire.frames import DEFAULT_CORE


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server with canned tokens, as fast as it goes."""
    with running("--max-model-len", "512") as up:
        yield up


@pytest.fixture(scope="session")
def slow_server() -> Iterator[Server]:
    """20 ms a token, two sequences at a time."""
    with running("--max-num-seqs", "2", step=0.02) as up:
        yield up


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real engine with small limits."""
    model = tiny_model.build(tmp_path_factory.mktemp("tiny"))
    with running(model, *TINY_FLAGS, core=DEFAULT_CORE) as up:
        yield up


@pytest.fixture(scope="session")
def engine_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real engine that admits by priority and publishes KV events."""
    model = tiny_model.build(tmp_path_factory.mktemp("engine"))
    with running(model, *ENGINE_FLAGS, core=DEFAULT_CORE) as up:
        yield up
