"""Calls of functions in the text of an answer: a parser for each way that models write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxengine.text.tools.base import Event, Parser, Plain
from jaxengine.text.tools.enforced import NamedCall, RequiredCalls
from jaxengine.text.tools.hermes import hermes
from jaxengine.text.tools.llama3_json import llama3_json
from jaxengine.text.tools.mistral import mistral
from jaxengine.text.tools.pythonic import pythonic
from jaxengine.text.tools.qwen3 import qwen3
from jaxengine.text.tools.schema import Tools

__all__ = ["Event", "NamedCall", "Parser", "Plain", "RequiredCalls", "make_tool_parser"]

_PARSERS = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "pythonic": pythonic,
    "qwen3": qwen3,
    "qwen3_coder": qwen3,
    "qwen3_xml": qwen3,
}


def make_tool_parser(name: str, tools: Sequence[Mapping[str, Any]]) -> Parser:
    """The parser called `name` (of --tool-call-parser; gpt-oss has one of its own for reasoning and
    calls, `jaxengine.text.reasoning.Harmony`) for a request's tools."""
    make = _PARSERS.get(name)
    if make is None:
        raise ValueError(f"there is no tool parser {name!r}")
    return make(Tools(tools))
