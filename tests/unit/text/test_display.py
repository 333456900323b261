"""How an LLM and its outputs show themselves: complete, escaped, and never an error."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from jaxengine.front.llm import LLM
from jaxengine.text.display import llm_html, output_html
from jaxengine.text.outputs import CompletionOutput, RequestOutput
from jaxengine.wire.messages import EngineReady, EngineRequest, EngineStats

READY = EngineReady(
    max_model_len=8192,
    num_blocks=1092,
    block_size=16,
    vocab_size=300,
    info={
        "model": "a<b>&c",
        "dtype": "bfloat16",
        "device": "cpu",
        "weights MiB": "257",
        "KV MiB": "384",
    },
)
BLOCKS = {"total": 1092, "used": 3, "cached": 40}


def rows(html: str) -> dict[str, str]:
    """Names and values of the table, as a browser reads them; the markup is well-formed."""
    table = ElementTree.fromstring(html)
    cells = {row[0].text or "": row[1].text or "" for row in table.iter("tr")}
    return {"": table[0].text or ""} | {name: text for name, text in cells.items() if name}


def test_llm_shows_its_memory_and_blocks() -> None:
    html = llm_html(READY, EngineStats(), BLOCKS)
    assert "<b>" not in html and "a&lt;b&gt;&amp;c" in html
    assert rows(html) == {
        "": "LLM",
        "model": "a<b>&c",
        "dtype": "bfloat16",
        "device": "cpu",
        "context": "8,192 tokens",
        "memory": "weights 257 MiB, KV 384 MiB",
        "KV blocks": "1,092 of 16 tokens: 3 used, 40 cached",
    }


def test_llm_shows_what_runs_and_that_it_is_closed() -> None:
    busy = rows(llm_html(READY, EngineStats(num_running=2, num_waiting=1), BLOCKS))
    assert busy["requests"] == "2 running, 1 waiting"
    closed = rows(llm_html(READY, EngineStats(num_running=2), BLOCKS, closed=True))
    assert closed["state"] == "closed" and "KV blocks" not in closed


class Core:
    """As much of a core as showing asks for; `told` is its answer about blocks."""

    def __init__(self, told: Any) -> None:
        self.told = told

    def ready(self) -> EngineReady:
        return READY

    def stats(self) -> EngineStats:
        return EngineStats()

    def utility(self, method: str, args: list[Any]) -> Any:
        if self.told is None:
            raise ValueError(f"unknown call {method!r}")
        assert (method, args) == ("kv_blocks", [])
        return self.told

    def add_request(self, request: EngineRequest) -> None:
        raise AssertionError("showing runs nothing")

    def shutdown(self) -> None:
        self.told = None


@pytest.mark.parametrize("told", [BLOCKS, None])
def test_a_core_that_does_not_tell_is_shown_without_blocks(told: Any) -> None:
    llm = LLM.from_core(Core(told))  # type: ignore[arg-type]
    shown = rows(llm._repr_html_())
    assert shown["model"] == "a<b>&c"
    assert ("KV blocks" in shown) == (told is not None)
    llm.close()
    assert rows(llm._repr_html_())["state"] == "closed"


def output(**changes: Any) -> RequestOutput:
    settings: dict[str, Any] = {
        "request_id": "7",
        "prompt": "1 < 2\nand",
        "prompt_token_ids": [1, 2, 3],
        "prompt_logprobs": None,
        "outputs": [CompletionOutput(0, " <script>", [4, 5], finish_reason="length")],
        "finished": True,
        "num_cached_tokens": 2,
    }
    return RequestOutput(**settings | changes)


def test_output_shows_text_and_ending() -> None:
    html = output()._repr_html_()
    assert html == output_html(output())
    assert "<script>" not in html
    shown = rows(html)
    assert shown["prompt"] == "1 < 2\nand" and shown["text"] == " <script>"
    assert shown["prompt tokens"] == "3, 2 of them cached"
    assert "2 tokens, length" in html


def test_outputs_of_every_kind() -> None:
    several = [
        CompletionOutput(0, "a", [1]),
        CompletionOutput(1, "b", [2, 3], finish_reason="stop", stop_reason="\n"),
        CompletionOutput(2, "", [], finish_reason="error", error="bad <row>"),
    ]
    html = output(prompt=None, outputs=several, num_cached_tokens=0)._repr_html_()
    shown = rows(html)
    assert shown["prompt"] == "3 token ids" and shown["prompt tokens"] == "3"
    assert shown["text 0"] == "a" and shown["text 1"] == "b"
    assert "1 tokens, running" in html and "2 tokens, stop at &#x27;\\n&#x27;" in html
    assert "0 tokens, error: bad &lt;row&gt;" in html
