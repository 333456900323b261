"""One streamed request to an OpenAI server, timed as its client sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from jaxengine.lab.bench.datasets import BenchRequest, prompt_tokens
from jaxengine.lab.bench.prompts import words_of

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Api:
    """How to ask, and at which address. `extra` holds fields beside the standard ones; `usage`
    asks for the server's counts of tokens, and `count` counts those of a text without them."""

    backend: str
    url: str
    model: str
    text_prompts: bool = False
    temperature: float | None = 0.0
    usage: bool = True
    max_tokens_field: str = "max_tokens"
    extra: dict[str, Any] = field(default_factory=dict)
    count: Callable[[str], int] | None = None


@dataclass
class Trace:
    """What one request saw. Times in seconds of time.perf_counter; 0 is not yet. `counted` tells
    where num_tokens is from: usage, tokenizer, or events (one a streamed piece)."""

    prompt_len: int
    due: float = 0.0
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    counted: str = "events"
    error: str | None = None


def body_of(api: Api, request: BenchRequest, seed: int = 0) -> dict[str, Any]:
    """The request's JSON: standard fields, then `extra`. A prompt that a trace only describes is
    made up from the seed."""
    prompt = request.prompt or prompt_tokens(request, seed)
    if not isinstance(prompt, str) and (api.text_prompts or api.backend == "openai-chat"):
        prompt = words_of(prompt)
    body: dict[str, Any] = {"model": api.model, "stream": True}
    if api.backend == "openai-chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    body[api.max_tokens_field] = request.output_len
    if api.temperature is not None:
        body["temperature"] = api.temperature
    if api.usage:
        body["stream_options"] = {"include_usage": True}
    return body | api.extra


async def send(
    session: aiohttp.ClientSession, api: Api, body: dict[str, Any], trace: Trace
) -> None:
    """Stream the answer; what happens, errors too, is in the trace."""
    trace.started = time.perf_counter()
    try:
        async with session.post(api.url, json=body) as answer:
            if answer.status != 200:
                text = (await answer.text())[:200]
                trace.error = f"HTTP {answer.status}: {text}"
            else:
                await _read(answer, api, body, trace)
    except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, AttributeError) as error:
        trace.error = f"{type(error).__name__}: {error}"


async def _read(
    answer: aiohttp.ClientResponse, api: Api, body: dict[str, Any], trace: Trace
) -> None:
    events, pieces, usage, done = 0, [], None, False
    async for line in answer.content:
        now = time.perf_counter()
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        chunk = json.loads(data)
        if chunk.get("error"):
            error = chunk["error"]
            trace.error = str(error.get("message") if isinstance(error, dict) else error)
            return
        usage = chunk.get("usage") or usage
        text = "".join(_text(choice) for choice in chunk.get("choices") or ())
        if text:
            events += 1
            pieces.append(text)
            if trace.first:
                trace.gaps.append(now - trace.last)
            else:
                trace.first = now
            trace.last = now
        done = done or any(c.get("finish_reason") for c in chunk.get("choices") or ())
    if not trace.first:
        trace.error = "the stream ended without a token"
    elif not done:
        trace.error = "the stream broke off"
    _count(api, body, trace, events, "".join(pieces), usage or {})


def _text(choice: dict[str, Any]) -> str:
    """What a choice of a chunk adds: of a completion, or of a chat with its reasoning."""
    delta = choice.get("delta") or {}
    parts = (choice.get("text"), delta.get("reasoning_content") or delta.get("reasoning"))
    return "".join(part for part in (*parts, delta.get("content")) if isinstance(part, str))


def _count(
    api: Api, body: dict[str, Any], trace: Trace, events: int, text: str, usage: dict[str, Any]
) -> None:
    """Tokens by the server's usage, else by the tokenizer, else one an event."""
    trace.num_tokens, trace.counted = events, "events"
    if usage.get("completion_tokens") is not None:
        trace.num_tokens, trace.counted = int(usage["completion_tokens"]), "usage"
    elif api.count is not None:
        trace.num_tokens, trace.counted = api.count(text), "tokenizer"
    if usage.get("prompt_tokens") is not None:
        trace.prompt_len = int(usage["prompt_tokens"])
    elif api.count is not None:
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        trace.prompt_len = api.count(prompt) if isinstance(prompt, str) else len(prompt)
