"""Progress bars: on a terminal only, quiet when asked, and log lines stay whole."""

from __future__ import annotations

import io
import logging

import pytest

from jaxengine import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    logger = logging.getLogger("test_progress")
    handler = logging.StreamHandler(stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    with progress.progress_bar("Loading", 3, "tensor", why="once") as bar:
        bar.update(2)
        logger.warning("a line of the log")
        bar.update()
    return stream.getvalue()


def test_a_terminal_sees_what_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXENGINE_PROGRESS", raising=False)
    text = run(monkeypatch, Terminal())
    assert "Loading (once)" in text and "3/3" in text
    # The bar is wiped before the line, which therefore stands alone.
    assert "a line of the log" in [part.strip() for part in text.replace("\r", "\n").splitlines()]


def test_a_file_sees_the_log_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXENGINE_PROGRESS", raising=False)
    assert run(monkeypatch, io.StringIO()) == "a line of the log\n"


@pytest.mark.parametrize("level,quiet", [("warning", True), ("error", True), ("info", False)])
def test_quiet_with_log_level_warning(
    monkeypatch: pytest.MonkeyPatch, level: str, quiet: bool
) -> None:
    monkeypatch.setenv("JAXENGINE_PROGRESS", "x")  # so that the end of the test removes it
    monkeypatch.delenv("JAXENGINE_PROGRESS")
    progress.quiet_below(level)
    text = run(monkeypatch, Terminal())
    assert ("Loading" not in text) is quiet
