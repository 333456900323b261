"""The simulator against the real engine."""

from __future__ import annotations

import pytest

from jaxengine.cli.simulate_options import Engine


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_within_the_limit_of_the_real_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """By CPU time: the tests beside this one take from the machine as they like."""
    from jaxengine.cli.simulate import run_check

    code = run_check("demo", 2, Engine(), "cpu")
    said = capsys.readouterr().out
    print(said)
    assert code == 0, said
