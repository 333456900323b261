"""What the clients ask of the scripted server (`scripted_core`)."""

from __future__ import annotations

import json

CITY = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
CITY_TOOL = {
    "type": "function",
    "function": {"name": "city", "description": "Looks a city up.", "parameters": CITY},
}
CALL = '<tool_call>\n{"name": "city", "arguments": {"name": "Oslo"}}\n</tool_call>'


def say(text):
    """A prompt that is answered with `text`."""
    return "SAY:" + json.dumps({"say": text})
