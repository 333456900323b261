"""When a process counts as silent, by looks alone: no clock, no socket. And the settings."""

from __future__ import annotations

import pytest

from jaxengine.config import FaultConfig
from jaxengine.engine.fault.silence import TICK, Silence
from jaxengine.settings.fault import FaultSettings, fault_settings, silence_limit


class Other:
    """The process that is watched."""

    def __init__(self) -> None:
        self.silence = Silence()
        self.asked = 0

    def look(self, times: int = 1) -> float:
        for _ in range(times):
            seconds = self.silence.look(self._ask)
        return seconds

    def _ask(self) -> None:
        self.asked += 1


def test_silence_begins_with_a_question() -> None:
    """Nothing is owed before, and one question is enough."""
    other = Other()
    assert other.look() == 0 and other.asked == 1
    assert other.look(4) == 4 * TICK and other.asked == 1


def test_a_word_ends_it() -> None:
    other = Other()
    other.look(10)
    other.silence.heard()
    assert other.silence.seconds == 0
    assert other.look() == 0 and other.asked == 2
    assert other.look() == TICK


def test_who_answers_is_asked_at_every_look() -> None:
    other = Other()
    for _ in range(100):
        assert other.look() == 0
        other.silence.heard()
    assert other.asked == 100


def test_time_in_which_nobody_looked_counts_for_nothing() -> None:
    """This process was stopped for an hour between two looks: that is one look."""
    other = Other()
    other.look(2)
    assert other.look() == 2 * TICK


@pytest.mark.parametrize(
    ("config", "seconds"),
    [
        (FaultConfig(), 300),
        (FaultConfig(enable_fault_tolerance=True), 60),
        (FaultConfig(fault_tolerance_config={"step_timeout_sec": 5}), 5),
        (FaultConfig(fault_tolerance_config={"step_timeout_sec": 0.5}), 3),
        (FaultConfig(fault_tolerance_config={"step_timeout_sec": 900}), 900),
    ],
    ids=["off", "default", "5 s", "never below 3 s", "900 s"],
)
def test_how_long_silence_may_last(config: FaultConfig, seconds: float) -> None:
    assert silence_limit(config) == seconds


def test_the_defaults() -> None:
    assert fault_settings(FaultConfig(enable_fault_tolerance=True)) == FaultSettings(
        engine_recovery_timeout_sec=120.0, auto_recover="never", step_timeout_sec=60.0
    )
