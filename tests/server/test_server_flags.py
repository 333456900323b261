"""What flags change of the answers: usage unasked, keep-alive comments, tokenizer_info, no docs,
sampling defaults over the model's."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from serverlib import ROOT, Server, alive, call, chunks, events, running

from jaxengine.settings.generation import generation_override

C, CC = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def up() -> Iterator[Server]:
    flags = ["--enable-force-include-usage", "--sse-keep-alive-interval", "0.1"]
    flags += ["--enable-tokenizer-info-endpoint", "--disable-fastapi-docs"]
    flags += ["--stream-interval", "2"]
    flags += ["--override-generation-config", '{"temperature": 0, "max_new_tokens": 3}']
    with running(*flags, step=0.35) as server:
        yield server
        assert alive(server.url)


def parts_of(up: Server, path: str, body: dict[str, Any]) -> list[str]:
    """A stream's events and comments."""
    connection = http.client.HTTPConnection("127.0.0.1", up.port, timeout=60)
    connection.request("POST", path, json.dumps({**body, "stream": True}))
    text = connection.getresponse().read().decode()
    connection.close()
    return text.removesuffix("\n\n").split("\n\n")


@pytest.mark.parametrize(
    ("path", "body"), [(C, {"prompt": "hi"}), (CC, {"messages": USER, "max_tokens": 3})]
)
def test_usage_and_comments(up: Server, path: str, body: dict[str, Any]) -> None:
    """Comments stand between events, before the first one too; what is sent is the same."""
    parts = parts_of(up, path, body)
    assert parts[0] == ": keep-alive" and parts.count(": keep-alive") >= 2
    assert parts[-1] == "data: [DONE]"
    data = [json.loads(p[6:]) for p in parts if p.startswith("data: {")]
    assert data[-1]["usage"]["completion_tokens"] == 3 and data[-1]["choices"] == []
    assert len(parts) == len(data) + parts.count(": keep-alive") + 1


def test_chunks_of_several_tokens(up: Server) -> None:
    """The first token alone, then two at a time, then the rest."""
    body = {"prompt": "hi", "max_tokens": 4, "return_token_ids": True}
    data = [json.loads(p[6:]) for p in parts_of(up, C, body) if p.startswith("data: {")]
    ids = [choice["token_ids"] for chunk in data for choice in chunk["choices"]]
    assert [len(one) for one in ids if one] == [1, 2, 1]
    (whole,) = call(up.url, C, body)[1]["choices"]
    assert [token for one in ids for token in one] == whole["token_ids"]


def test_errors_keep_their_status(up: Server) -> None:
    status, body, _ = call(up.url, C, {"prompt": "hi", "stream": True, "temperature": -1})
    assert status == 400 and body["error"]["param"] == "temperature"


def test_no_comments_without_the_flag(server: Server) -> None:
    assert all(e == "[DONE]" or e[0] == "{" for e in events(server.url, C, {"prompt": "hi"}))
    assert "usage" not in chunks(server.url, C, {"prompt": "hi"})[-1]


def test_tokenizer_info(up: Server, server: Server) -> None:
    status, info, _ = call(up.url, "/tokenizer_info")
    assert status == 200 and info["eos_token_ids"] and info["chat_template"]
    assert info["eos_token"] in [t["content"] for t in info["added_tokens_decoder"].values()]
    status, body, _ = call(server.url, "/tokenizer_info")
    assert status == 404 and "--enable-tokenizer-info-endpoint" in body["error"]["message"]


def test_no_docs(up: Server, server: Server) -> None:
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert call(up.url, path)[0] == 404
        assert call(server.url, path)[0] == 200


def test_defaults_over_the_models(up: Server) -> None:
    """Greedy cannot have n = 2; the tokens of a completion are the default's."""
    status, body, _ = call(up.url, C, {"prompt": "hi", "n": 2})
    assert status == 400 and "greedy" in body["error"]["message"]
    assert call(up.url, C, {"prompt": "hi"})[1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must be a JSON object"),
        ({"top_x": 1}, "'top_x' is none of temperature"),
        ({"temperature": 3}, "temperature must be between 0 and 2"),
        ({"max_new_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_bad_defaults(given: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="^override_generation_config") as caught:
        generation_override(given)
    assert reason in str(caught.value)


def test_a_bad_default_ends_the_command() -> None:
    command = [sys.executable, "-m", "jaxengine.cli.main", "serve", "demo", "--port", "0", "--stub"]
    command += ["--override-generation-config", '{"top_p": 7}']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "override_generation_config: top_p must be" in done.stderr
