"""Counts with units on the command line, in YAML and for the benches."""

from __future__ import annotations

import pathlib

import pytest

from jaxengine.config import PARTS, EngineConfig, ModelConfig
from jaxengine.lab.bench.flags import engine_settings
from jaxengine.settings.counts import AUTO, COUNTS, count_words, read_count
from jaxengine.settings.flags import flag, split_argv, yaml_config

LEN = "--max-model-len"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096), ("1k", 1000), ("1K", 1024), ("25.6k", 25_600), ("2m", 2_000_000),
        ("2M", 2 << 20), ("1g", 10**9), ("3G", 3 << 30), ("1t", 10**12), ("1T", 1 << 40),
        ("1.5m", 1_500_000), ("auto", -1), ("-1", -1),
    ],
)  # fmt: skip
def test_units(text: str, value: int) -> None:
    assert read_count(LEN, text) == value


@pytest.mark.parametrize("text", ["x", "32q", "1.5K", "25.6", "1.0001k", "k", "1kk", "-1k", ""])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{LEN} {text} is no whole number: .*or auto$"):
        read_count(LEN, text)


def test_auto_is_of_lengths_only() -> None:
    with pytest.raises(ValueError, match="--max-num-batched-tokens auto is no whole number"):
        read_count("--max-num-batched-tokens", "auto")


def test_words() -> None:
    assert count_words(["serve", "m", LEN, "2k", "--max_num_batched_tokens=1K", "--port", "1"]) == [
        "serve", "m", LEN + "=2000", "--max_num_batched_tokens=1024", "--port", "1",
    ]  # fmt: skip
    # what is missing is left for the parser to say
    assert count_words(["serve", LEN]) == ["serve", LEN]
    assert count_words([LEN, "--port", "1"]) == [LEN, "--port", "1"]


def test_a_bad_word_names_the_flag() -> None:
    with pytest.raises(ValueError, match="^--max-num-batched-tokens 8q is no whole number"):
        split_argv(["serve", "--max-num-batched-tokens", "8q"])


def test_flags_that_there_are() -> None:
    ours = {flag(name) for part in PARTS.values() for name in part.__dataclass_fields__}
    assert set(AUTO) <= set(COUNTS) <= ours


def test_yaml(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("max-model-len: 32k\nmax_num_batched_tokens: 8K\nkv-cache-memory-bytes: 7\n")
    assert dict(yaml_config(str(file)).config) == {
        "max-model-len": 32_000, "max_num_batched_tokens": 8192, "kv-cache-memory-bytes": 7,
    }  # fmt: skip
    file.write_text("max-model-len: long\n")
    with pytest.raises(ValueError, match="--max-model-len long is no whole number"):
        yaml_config(str(file))


def test_minus_one_is_not_set() -> None:
    assert EngineConfig.of(max_model_len=-1) == EngineConfig()
    assert ModelConfig(max_model_len=8).max_model_len == 8


def test_the_only_logprobs_mode() -> None:
    assert EngineConfig.of(logprobs_mode="raw_logprobs") == EngineConfig()
    with pytest.raises(ValueError, match="logprobs_mode must be raw_logprobs, got 'raw_logits'"):
        EngineConfig.of(logprobs_mode="raw_logits")


def test_a_benchs_engine() -> None:
    assert engine_settings([LEN, "2k"]) == {"max_model_len": 2000}
