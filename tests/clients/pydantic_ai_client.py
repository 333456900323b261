"""What pydantic-ai makes of the server: argv is the address. Asserts, and prints nothing."""

from __future__ import annotations

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from script import CALL, say

provider = OpenAIProvider(base_url=sys.argv[1] + "/v1", api_key="none")
model = OpenAIChatModel("demo", provider=provider)


class City(BaseModel):
    name: str


def city(name: str) -> str:
    """Looks a city up."""
    return say(f"{name} has 700,000 people.")


async def main():
    plain = Agent(model, instructions="Be brief.")
    assert (await plain.run(say("Good morning."))).output == "Good morning."
    async with plain.run_stream(say("Good morning.")) as stream:
        assert [text async for text in stream.stream_text()][-1] == "Good morning."
    agent = Agent(model, tools=[city])
    ended = await agent.run(say(CALL))
    assert ended.output == "Oslo has 700,000 people."
    async with agent.run_stream(say(CALL)) as stream:
        assert await stream.get_output() == "Oslo has 700,000 people."
    typed = Agent(model, output_type=NativeOutput(City))
    assert (await typed.run(say('{"name": "Oslo"}'))).output == City(name="Oslo")
    try:
        await plain.run("too much " * 3000)
        raise AssertionError("a prompt beyond the context was taken")
    except ModelHTTPError as error:
        assert error.status_code == 400 and error.body["code"] == "context_length_exceeded"


asyncio.run(main())
