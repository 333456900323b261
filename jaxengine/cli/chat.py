"""The chat and complete commands: clients of a running server."""

from __future__ import annotations

import sys
from typing import Any

from jaxengine.lab.bench.http import first_model, stream_json


def run_chat(
    url: str,
    model: str | None,
    system: str | None,
    message: str | None,
    temperature: float | None,
    max_tokens: int | None,
    api_key: str | None,
) -> int:
    """A conversation, or one question. Raises ServerError."""
    body = _body(model or first_model(url, api_key), temperature)
    if max_tokens is not None:
        body["max_completion_tokens"] = max_tokens
    messages = [] if system is None else [{"role": "system", "content": system}]
    if message is not None:
        messages.append({"role": "user", "content": message})
        _answer(url, {**body, "messages": messages}, api_key)
        return 0
    print("Ctrl-D or /exit leaves, /clear forgets.", file=sys.stderr)
    start = len(messages)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return 0
        if text == "/exit":
            return 0
        if text == "/clear":
            del messages[start:]
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                answer = _answer(url, {**body, "messages": messages}, api_key)
            except KeyboardInterrupt:  # leaving the loop hangs up, and so ends the request
                print()
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})


def run_complete(
    url: str,
    model: str | None,
    prompt: str,
    temperature: float | None,
    max_tokens: int,
    api_key: str | None,
) -> int:
    """Continue a prompt. Raises ServerError."""
    body = _body(model or first_model(url, api_key), temperature)
    body |= {"prompt": prompt, "max_tokens": max_tokens}
    print(prompt, end="", flush=True)
    for chunk in stream_json(url, "/v1/completions", body, api_key):
        for choice in chunk["choices"]:
            print(choice["text"], end="", flush=True)
    print()
    return 0


def _body(model: str, temperature: float | None) -> dict[str, Any]:
    return {"model": model} if temperature is None else {"model": model, "temperature": temperature}


def _answer(url: str, body: dict[str, Any], api_key: str | None) -> str:
    pieces = []
    for chunk in stream_json(url, "/v1/chat/completions", body, api_key):
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            pieces.append(text)
            print(text, end="", flush=True)
    print()
    return "".join(pieces)
