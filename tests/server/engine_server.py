"""The settings of the session's server with a real engine, and the text of its answers."""

from __future__ import annotations

import json
import socket
from typing import Any

C, CC = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0}


def _address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


EVENTS, REPLAY = _address(), _address()
_KV_EVENTS = {"enable": True, "endpoint": EVENTS, "replay_endpoint": REPLAY, "topic": "kv"}
ENGINE_FLAGS = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256"]
ENGINE_FLAGS += ["--num-gpu-blocks-override", "24", "--scheduling-policy", "priority"]
ENGINE_FLAGS += ["--kv-events-config", json.dumps(_KV_EVENTS)]
ENGINE_FLAGS += ["--warmup", "lazy", "--served-model-name", "tiny", "--log-level", "warning"]
ENGINE_FLAGS += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


def text_of(answer: tuple[int, Any, dict[str, str]]) -> str:
    status, body, _ = answer
    assert status == 200, body
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])
