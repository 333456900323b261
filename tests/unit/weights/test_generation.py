"""generation_config.json: what can be a default, and what cannot."""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

import pytest

from jaxengine.sampling_params import SamplingParams
from jaxengine.settings.generation import default_params
from jaxengine.validation import Limits, RequestError, check_params
from jaxengine.weights.generation import usable_defaults, warn_once
from jaxengine.weights.resolve import resolve_model

LIMITS = Limits(max_model_len=64, vocab_size=320)


@pytest.fixture(autouse=True)
def tell_again() -> None:
    """Warnings are given once in a process."""
    warn_once.cache_clear()


WRONG: list[Any] = ["hot", "0.7", True, [0.5], {}, float("nan"), float("inf"), 10**400, -5, 1e31]
VALUES: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 0.6, 1, 2, 2.1, 5, -0.1],
    "top_p": [1, 0.9, 1e-9, 0, 0.0, 1.1],
    "top_k": [0, 1, 50, 50.0, -1, -2, 1000, 0.5],
    "min_p": [0, 0.05, 1, 1.5],
    "repetition_penalty": [1, 1.3, 1e-30, 0, 1e30],
    "max_new_tokens": [1, 20, 128.0, 0, -1, 2.5],
}


def accepted(key: str, value: Any) -> bool:
    """Whether a request could have it."""
    name = {"max_new_tokens": "max_tokens"}.get(key, key)
    try:
        check_params(SamplingParams(**{name: value}), LIMITS)
    except RequestError:
        return False
    return True


@pytest.mark.parametrize("key", VALUES)
def test_usable_is_what_a_request_could_have(key: str, caplog: pytest.LogCaptureFixture) -> None:
    for i, value in enumerate([*VALUES[key], *WRONG]):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            out = usable_defaults({key: value, "other": 1}, f"{key}-{i}.json")
        assert (key in out) == accepted(key, value), value
        assert out["other"] == 1
        if key in out:
            assert out[key] == value and not caplog.records
        else:
            [record] = caplog.records
            assert record.getMessage().startswith(f"{key}-{i}.json: {key} ")
            assert record.getMessage().endswith("cannot be a default, and is ignored")
        check_params(default_params(out), LIMITS)  # whatever is left


def folder(path: pathlib.Path, text: str) -> dict[str, Any]:
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "generation_config.json").write_text(text, encoding="utf-8-sig")
    return resolve_model(str(path)).generation_config


def test_of_a_folder(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "temperature": "hot",
        "top_p": None,
        "top_k": 20.0,
        "min_p": [0.1],
        "repetition_penalty": 1.1,
        "do_sample": False,
        "eos_token_id": [2, 3],
        "max_new_tokens": None,
        "bos_token_id": None,
    }
    with caplog.at_level(logging.WARNING):
        got = folder(tmp_path, json.dumps(given))
        assert folder(tmp_path, json.dumps(given)) == got  # read again, told once
    assert "temperature" not in got and "min_p" not in got
    assert got["eos_token_id"] == [2, 3] and got["do_sample"] is False
    params = default_params(got)
    assert (params.top_k, params.repetition_penalty, params.max_tokens) == (
        20,
        1.1,
        SamplingParams().max_tokens,
    )
    assert (params.temperature, params.top_p) == (
        SamplingParams().temperature,
        SamplingParams().top_p,
    )
    where = tmp_path / "generation_config.json"
    assert [r.getMessage() for r in caplog.records] == [
        f"{where}: temperature 'hot' cannot be a default, and is ignored",
        f"{where}: min_p [0.1] cannot be a default, and is ignored",
    ]


@pytest.mark.parametrize("text", ['{"temperature": 0}', '{"temperature": 0.0, "do_sample": false}'])
def test_a_greedy_default(text: str, tmp_path: pathlib.Path) -> None:
    assert default_params(folder(tmp_path, text)).temperature == 0
