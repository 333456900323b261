"""What the benches' command lines share: one kind of parser, common flags, an engine's settings."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import cyclopts

from jaxengine.config import PARTS, EngineConfig
from jaxengine.settings.flags import Options, said_in_flags, split_argv

_ENGINE = "The engine's flags (jaxengine serve --help) are taken too, e.g. --block-size 32."


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows every default, also of flags without a help text of their own."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not action.help and action.default not in (None, argparse.SUPPRESS):
            return "default: %(default)s"
        return super()._get_help_string(action) if action.default is not None else action.help


def new_parser(name: str, doc: str | None, *, engine: bool = False) -> argparse.ArgumentParser:
    """The parser of `jaxengine bench NAME`. It takes no abbreviated flags. With `engine`, the help
    says that `parse_with_engine` takes the engine's flags too."""
    return argparse.ArgumentParser(
        prog=f"jaxengine bench {name}",
        description=doc,
        formatter_class=_Formatter,
        epilog=_ENGINE if engine else None,
        allow_abbrev=False,
    )


def positive(text: str) -> int:
    """A whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def not_negative(text: str) -> int:
    """A whole number from 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {value}")
    return value


def above_zero(text: str) -> float:
    """A number above 0, "inf" too."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-json", default=None, help="file for the figures")


def parse_with_engine(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The bench's own flags, and the engine settings among the rest: any flag of `jaxengine serve`
    that configures the engine. Raises ValueError for a flag that is neither."""
    parser.epilog = (
        "The engine's flags (jaxengine serve --help) are taken too, e.g. --block-size 32."
    )
    args, rest = parser.parse_known_args(list(argv))
    return args, engine_settings(rest)


def _read_options(*, options: Options | None = None) -> Options:
    return options or Options()


def engine_settings(words: Sequence[str]) -> dict[str, Any]:
    """Settings that differ from their defaults, as keywords of EngineConfig.of."""
    if not words:
        return {}
    app = cyclopts.App(help_flags=[], version_flags=[])
    app.default(_read_options)
    words, config = split_argv(list(words))
    if config is not None:
        raise ValueError("a bench takes no --config; give the engine's settings as flags")
    try:
        options = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except cyclopts.CycloptsError as error:
        raise ValueError(str(error).strip()) from None
    given: dict[str, Any] = {}
    for name, kind in PARTS.items():
        plain, part = kind(), getattr(options, name)
        for entry in dataclasses.fields(kind):
            value = getattr(part, entry.name)
            if value != getattr(plain, entry.name):
                given[entry.name] = value
    return given


def engine_config(settings: dict[str, Any], **wanted: Any) -> EngineConfig:
    """The engine of a bench: what the bench wants, and above it what the user gave. Raises
    ValueError for a value out of range."""
    with said_in_flags():
        return EngineConfig.of(**{**wanted, **settings})
