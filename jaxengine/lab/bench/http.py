"""A small client for the CLI: JSON requests and server-sent events, standard library only."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit


class ServerError(ValueError):
    """The server cannot be reached or refused; the message is one sentence."""


def _open(
    url: str, path: str, body: dict[str, Any] | None, api_key: str | None, timeout: float
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ServerError(f"{url!r} is not an http address")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout)
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body)
    try:
        connection.request("GET" if body is None else "POST", path, data, headers)
        response = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise ServerError(f"no answer from {url}: {error}") from None
    if response.status != 200:
        text = response.read().decode("utf-8", "replace")
        connection.close()
        raise ServerError(f"the server says {response.status}: {_message(text)}")
    return connection, response


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or "nothing"


def get_json(url: str, path: str, api_key: str | None = None, timeout: float = 30.0) -> Any:
    """The JSON at a path. Raises ServerError."""
    connection, response = _open(url, path, None, api_key, timeout)
    try:
        return json.loads(response.read())
    finally:
        connection.close()


def first_model(url: str, api_key: str | None = None) -> str:
    """The first model that the server lists. Raises ServerError."""
    return str(get_json(url, "/v1/models", api_key)["data"][0]["id"])


def stream_json(
    url: str, path: str, body: dict[str, Any], api_key: str | None = None, timeout: float = 600.0
) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer. Raises ServerError, also for an error in the stream."""
    connection, response = _open(url, path, {**body, "stream": True}, api_key, timeout)
    try:
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise ServerError(f"the server says: {_message(data.decode())}")
            yield chunk
        raise ServerError("the answer broke off")
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"the answer broke off: {error}") from None
    finally:
        connection.close()
