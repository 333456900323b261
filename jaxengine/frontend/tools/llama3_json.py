"""llama3_json: {"name": ..., "parameters": {...}}, several with "; " in between.

Behind <|python_tag|> or not. JSON that names no function of the request is plain text.
"""

from __future__ import annotations

from collections.abc import Collection

from jaxengine.frontend.tools.base import Parser
from jaxengine.frontend.tools.json_call import JsonCall
from jaxengine.frontend.tools.leading import LeadingCalls

PYTHON_TAG = "<|python_tag|>"


def llama3_json(names: Collection[str]) -> Parser:
    return LeadingCalls("{", lambda: JsonCall(names), PYTHON_TAG, ";,")
