"""llama3_json: {"name": ..., "parameters": {...}}, several with "; " in between, or in a list.

Behind <|python_tag|> or not, anywhere in the text. JSON that names no function of the request is
plain text, and so is, behind other text, JSON without parameters. Llama 3.1's other form,
<function=NAME>{...}</function>, is read too.
"""

from __future__ import annotations

import re

from jaxengine.text.tools.base import CallParser, Parser
from jaxengine.text.tools.calls import FENCE, Calls, Format, Where
from jaxengine.text.tools.json_call import JsonCall, JsonCalls, Strictness
from jaxengine.text.tools.marks import Marks
from jaxengine.text.tools.schema import Tools
from jaxengine.text.tools.xml_call import FUNCTION, XmlCall

PYTHON_TAG = "<|python_tag|>"
ENDS = ("<|eom_id|>", "<|eot_id|>")
MARKS = Marks((PYTHON_TAG, *ENDS), re.compile(r'(?:<\|\w+\|>\s*)+\{\s*"\w+"\s*:'))


def llama3_json(tools: Tools) -> Parser:
    def reader(first: str, where: Where) -> CallParser | None:
        loose = (where.tagged or where.first) and not where.thoughts
        strictness = Strictness.DECLARED if loose else Strictness.WITH_ARGUMENTS
        if first == "{":
            return JsonCall(tools, strictness, marks=MARKS)
        if first == "[":
            return JsonCalls(tools, strictness, MARKS)
        return XmlCall(tools, (), where) if first == "<" else None

    bare = ("{", "[", FUNCTION)
    return Calls(Format((PYTHON_TAG,), bare, ENDS, reader, ";,", True, (*bare, FENCE)))
