"""The real demo model behind the real server."""

from __future__ import annotations

from typing import Any

from serverlib import alive, call, chunks, metric, running

from jaxengine.wire.frames import DEFAULT_CORE

CC = "/v1/chat/completions"


def test_demo_model_answers() -> None:
    flags = ("--max-model-len", "512", "--max-num-seqs", "2", "--warmup", "lazy")
    with running(*flags, core=DEFAULT_CORE) as up:
        ask: dict[str, Any] = {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 16,
            "logprobs": True,
            "top_logprobs": 2,
        }
        status, whole, _ = call(up.url, CC, ask)
        assert status == 200, whole
        choice = whole["choices"][0]
        assert "Paris" in choice["message"]["content"]
        for entry in choice["logprobs"]["content"]:
            assert entry["token"] == entry["top_logprobs"][0]["token"]  # greedy takes the best
            assert -9999 < entry["logprob"] <= 0
        found = chunks(up.url, CC, ask)
        text = "".join(c["choices"][0]["delta"]["content"] for c in found)
        assert text == choice["message"]["content"]
        assert metric(up.url, "engine_steps_total") > 0
        assert alive(up.url)
        assert up.stop() == 0
