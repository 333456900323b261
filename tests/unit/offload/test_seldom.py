"""One line a minute of each kind, and none lost from the count."""

from __future__ import annotations

import logging

import pytest

from jaxengine.offload.seldom import SeldomLog


def test_one_line_of_a_kind_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = SeldomLog(logging.getLogger("seldom"), 60.0, lambda: now[0])
    for second in range(121):
        now[0] = float(second)
        log.warning("disk", "block %d is lost", second)
    log.warning("network", "100%s silent", "%")
    assert [record.getMessage() for record in caplog.records] == [
        "block 0 is lost",
        "block 60 is lost (59 more since the last such line)",
        "block 120 is lost (59 more since the last such line)",
        "100% silent",
    ]


def test_the_trace_is_in_the_line(caplog: pytest.LogCaptureFixture) -> None:
    log = SeldomLog(logging.getLogger("seldom"))
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        log.warning("call", "it failed", trace=True)
    assert "RuntimeError: broken" in caplog.text
