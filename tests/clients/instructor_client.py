"""What instructor makes of the server: argv is the address. Asserts, and prints nothing."""

from __future__ import annotations

import sys

import instructor
import openai
from pydantic import BaseModel
from script import say


class City(BaseModel):
    name: str


client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    typed = instructor.from_openai(client, mode=mode)
    asked = [{"role": "user", "content": say('{"name": "Oslo"}')}]
    made = typed.chat.completions.create(
        model="demo", messages=asked, response_model=City, max_retries=0
    )
    assert made.name == "Oslo", mode
    parts = list(
        typed.chat.completions.create_partial(
            model="demo", messages=asked, response_model=City, max_retries=0
        )
    )
    assert parts[-1].name == "Oslo", mode
