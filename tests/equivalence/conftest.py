from __future__ import annotations

from collections.abc import Iterator

import engine_runs
import pytest


@pytest.fixture(scope="session", autouse=True)
def engines_end_with_the_session() -> Iterator[None]:
    yield
    for core in engine_runs.OPEN:
        core.shutdown()
