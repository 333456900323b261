from __future__ import annotations

from collections.abc import Iterator

import pytest
from serverlib import Server, running


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
