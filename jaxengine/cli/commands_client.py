"""Commands that talk to a running server: chat, complete."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter


def chat(
    url: Annotated[str, Parameter(name="--url")] = "http://127.0.0.1:8000",
    *,
    model: str | None = None,
    system: str | None = None,
    message: Annotated[str | None, Parameter(alias="-q")] = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    api_key: str | None = None,
) -> int:
    """Talk to a running server; answers stream to the terminal.

    Parameters
    ----------
    url
        Address of the server.
    model
        Name of the model; default: the first that the server lists.
    system
        System message.
    message
        Ask this once and exit, instead of a conversation.
    temperature
        Sampling temperature; default: the model's.
    max_tokens
        Most tokens of an answer.
    api_key
        The server's key.
    """
    from jaxengine.cli.chat import run_chat

    return run_chat(url, model, system, message, temperature, max_tokens, api_key)


def complete(
    prompt: str,
    /,
    url: Annotated[str, Parameter(name="--url")] = "http://127.0.0.1:8000",
    *,
    model: str | None = None,
    temperature: float | None = None,
    max_tokens: int = 64,
    api_key: str | None = None,
) -> int:
    """Have a running server continue a prompt.

    Parameters
    ----------
    prompt
        The text to continue.
    url
        Address of the server.
    model
        Name of the model; default: the first that the server lists.
    temperature
        Sampling temperature; default: the model's.
    max_tokens
        Most tokens to generate.
    api_key
        The server's key.
    """
    from jaxengine.cli.chat import run_complete

    return run_complete(url, model, prompt, temperature, max_tokens, api_key)
