"""What litellm makes of the server: argv is the address. Asserts, and prints nothing."""

from __future__ import annotations

import json
import sys

import litellm
from script import CALL, CITY_TOOL, say

base = sys.argv[1] + "/v1"


def ask(text, **more):
    messages = [{"role": "user", "content": text}]
    return litellm.completion(
        model="hosted_vllm/demo", api_base=base, api_key="none", messages=messages, **more
    )


whole = ask(say("Good morning."))
assert whole.choices[0].message.content == "Good morning."
assert whole.usage.completion_tokens > 0
pieces = [chunk.choices[0].delta.content or "" for chunk in ask(say("Good morning."), stream=True)]
assert "".join(pieces) == "Good morning." and len(pieces) > 2
[made] = ask(say(CALL), tools=[CITY_TOOL]).choices[0].message.tool_calls
assert made.function.name == "city" and json.loads(made.function.arguments) == {"name": "Oslo"}
streamed = litellm.stream_chunk_builder(list(ask(say(CALL), tools=[CITY_TOOL], stream=True)))
[made] = streamed.choices[0].message.tool_calls
assert made.function.name == "city" and json.loads(made.function.arguments) == {"name": "Oslo"}
thought = ask(say("<think>\nHm.\n</think>\n\nYes."))
assert thought.choices[0].message.content.strip() == "Yes."
assert thought.choices[0].message.reasoning_content.strip() == "Hm."
try:
    ask("too much " * 3000)
    raise AssertionError("a prompt beyond the context was taken")
except litellm.ContextWindowExceededError:
    pass
try:
    ask("hello", temperature=-1)
    raise AssertionError("a temperature below 0 was taken")
except litellm.BadRequestError as error:
    assert "temperature" in str(error)
