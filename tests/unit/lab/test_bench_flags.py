"""Flags of the benches: help with defaults, and the engine's own flags."""

from __future__ import annotations

import importlib

import pytest

from jaxengine.cli.bench import BENCHES
from jaxengine.lab.bench.flags import engine_config, engine_settings, parse_with_engine
from jaxengine.lab.bench.throughput import parser


@pytest.mark.parametrize("name", BENCHES)
def test_help_has_every_default(name: str) -> None:
    made = importlib.import_module(f"jaxengine.lab.bench.{name}").parser()
    text = " ".join(made.format_help().split())
    assert text.startswith(f"usage: jaxengine bench {name}")
    for action in made._actions:
        if action.help == "==SUPPRESS==":
            continue
        assert action.help, f"{action.option_strings} has no help"
        if action.default not in (None, "==SUPPRESS==", False, [], {}):
            assert f"(default: {action.default})" in text


def test_engine_flags_beside_the_benchs_own() -> None:
    argv = ["--num-prompts", "1", "2", "--block-size", "32", "--no-async-scheduling"]
    args, settings = parse_with_engine(parser(), argv)
    assert args.num_prompts == [1, 2]
    assert settings == {"block_size": 32, "async_scheduling": False}
    config = engine_config(settings, block_size=8, max_num_seqs=5)
    assert config.cache.block_size == 32 and config.scheduler.max_num_seqs == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--no-such-flag"], "no-such-flag"), (["--block-size", "x"], "block-size"), (["y"], "y")],
)
def test_wrong_engine_flags(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_settings(words)


def test_engine_values_are_checked() -> None:
    with pytest.raises(ValueError, match="--block-size must be at least 1"):
        engine_config({"block_size": 0})
