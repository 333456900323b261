"""The simulator against the real engine."""

from __future__ import annotations

import pathlib

import pytest

from jaxengine.cli.simulate_options import Engine

MODEL = pathlib.Path(__file__).resolve().parents[4] / "shared" / "goldens" / "llama"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not MODEL.is_dir(), reason="the tiny model is not here")
def test_within_the_limit_of_the_real_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """By CPU time: the tests beside this one take from it as they like."""
    from jaxengine.cli.simulate import run_check

    sizes = Engine(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512)
    code = run_check(str(MODEL), 3, sizes, "cpu")
    said = capsys.readouterr().out
    print(said)
    assert code == 0, said
