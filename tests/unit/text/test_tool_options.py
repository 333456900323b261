"""The server's flags for tools and reasoning: what does not go together is refused at the start."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.config import EngineConfig, template_kwargs


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"enable_auto_tool_choice": True}, "enable_auto_tool_choice needs tool_call_parser"),
        (
            {"tool_call_parser": "hermes", "reasoning_parser": "gpt-oss"},
            "reasoning_parser gpt-oss does not go with tool_call_parser hermes",
        ),
        ({"default_chat_template_kwargs": "{x"}, "is not valid JSON"),
        ({"default_chat_template_kwargs": "[1]"}, "must be a JSON object"),
    ],
)
def test_bad_flags(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig.of(**flags)


def test_good_flags() -> None:
    EngineConfig.of(
        enable_auto_tool_choice=True, tool_call_parser="openai", reasoning_parser="gpt-oss"
    )
    assert template_kwargs('{"enable_thinking": false}') == {"enable_thinking": False}
    assert template_kwargs(None) == {}
