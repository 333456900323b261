"""What langchain-openai makes of the server: argv is the address. Asserts, and prints nothing."""

from __future__ import annotations

import sys

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from script import CALL, say

base = sys.argv[1] + "/v1"
model = ChatOpenAI(model="demo", base_url=base, api_key="none", max_retries=0)


@tool
def city(name: str) -> str:
    """Looks a city up."""
    return say(f"{name} has 700,000 people.")


class City(BaseModel):
    name: str


answer = model.invoke(say("Good morning."))
assert answer.content == "Good morning." and answer.usage_metadata["output_tokens"] > 0
pieces = [piece.content for piece in model.stream(say("Good morning."))]
assert "".join(pieces) == "Good morning." and len(pieces) > 2
asked = HumanMessage(say(CALL))
called = model.bind_tools([city]).invoke([asked])
[made] = called.tool_calls
assert made["name"] == "city" and made["args"] == {"name": "Oslo"}
result = ToolMessage(city.invoke(made["args"]), tool_call_id=made["id"])
assert model.bind_tools([city]).invoke([asked, called, result]).content.startswith("Oslo has")
for method in ("json_schema", "function_calling"):
    typed = model.with_structured_output(City, method=method)
    assert typed.invoke(say('{"name": "Oslo"}')) == City(name="Oslo"), method
responses = ChatOpenAI(
    model="demo", base_url=base, api_key="none", max_retries=0, use_responses_api=True
)
assert responses.invoke(say("Good morning.")).text == "Good morning."
try:
    model.invoke("too much " * 3000)
    raise AssertionError("a prompt beyond the context was taken")
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded", error.code
