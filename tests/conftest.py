"""Fixtures for tests of every folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from testdata import NOT_HERE

if TYPE_CHECKING:
    from jaxengine.config import EngineConfig


# The same examples each time, so that a change is what a failure comes from; `make test-full` draws
# others.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("drawn")
settings.load_profile(os.environ.get("JAXENGINE_EXAMPLES", "fixed"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have to show (`record_property("shown", text)`), and how many of them need files
    that may not be redistributed (see tests/data/README.md)."""
    for kind in ("passed", "failed"):
        for report in terminalreporter.stats.get(kind, []):
            for name, text in report.user_properties:
                if name == "shown":
                    terminalreporter.write_line(str(text))
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if NOT_HERE in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(
            f"{len(skipped)} tests skipped: data not redistributed (tests/data/README.md)"
        )


@pytest.fixture
def served_config(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineConfig]:
    """The EngineConfig that `jaxengine serve ARGS` would serve; nothing is started."""
    from jaxengine.cli import main as cli

    seen: list[EngineConfig] = []

    def fake(config: EngineConfig, stub: bool = False) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("jaxengine.cli.serve.run_server", fake)

    def run(*argv: str) -> EngineConfig:
        with pytest.raises(SystemExit) as left:
            cli.main(["serve", *argv])
        assert left.value.code == 0, argv
        return seen.pop()

    return run
