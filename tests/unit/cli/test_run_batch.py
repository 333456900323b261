"""`jaxengine run-batch` with the stub engine: the file format, order, errors, exit codes."""

from __future__ import annotations

import json
import os
import pathlib
import threading
from typing import Any

import fastapi
import pytest

from jaxengine.cli import main as cli
from jaxengine.cli.asgi import post
from jaxengine.cli.run_batch import run_batch
from jaxengine.config import EngineConfig
from jaxengine.server import errors
from jaxengine.wire import frames as wire

USER = [{"role": "user", "content": "hi"}]
CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def line(name: str, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def run(folder: pathlib.Path, lines: list[str], **more: Any) -> tuple[int, list[dict[str, Any]]]:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(lines))
    config = EngineConfig.of(model="demo", max_model_len=512, max_num_seqs=4, **more)
    code = run_batch(
        config, str(source), str(target), max_concurrency=3, progress=False, core=wire.STUB_CORE
    )
    return code, [json.loads(text) for text in target.read_text().splitlines()]


def test_answers_in_order_and_errors_by_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [
        line("long", CHAT, messages=USER, max_tokens=200),  # ends after those behind it
        line("é", COMPLETION, model="demo", prompt="hi", max_tokens=3),
        line("items", RESPONSES, input="hi", max_output_tokens=3),
        *(line(f"n{i}", COMPLETION, prompt="x" * i, max_tokens=2) for i in range(1, 30)),
    ]
    bad = {
        "{": "line 33 is not valid JSON",
        "[1]": "line 34 must be a JSON object",
        line("", CHAT, messages=USER): "line 35: custom_id",
        line("u", "/v1/other"): "line 36: url",
        line("s", CHAT, messages=USER, stream=True): "line 37: body.stream",
        json.dumps({"custom_id": "b", "url": CHAT, "body": []}): "line 38: body",
        json.dumps({"custom_id": "m", "url": CHAT, "method": "GET"}): "line 39: method",
    }
    refused = [
        line("cold", COMPLETION, prompt="hi", temperature=-1),
        line("other", CHAT, model="other", messages=USER),
    ]
    code, found = run(tmp_path, [*good, *bad, "", *refused], api_key="k", max_num_queued_reqs=4)
    assert code == 1 and len(found) == len(good) + len(bad) + len(refused)
    assert len({entry["id"] for entry in found}) == len(found)
    answered = found[: len(good)]
    asked = [json.loads(text)["custom_id"] for text in good]
    assert [entry["custom_id"] for entry in answered] == asked
    for entry in answered:
        assert entry["error"] is None and entry["response"]["status_code"] == 200
        assert entry["response"]["request_id"]
    bodies = [entry["response"]["body"] for entry in answered]
    assert bodies[0]["usage"]["completion_tokens"] == 200
    assert bodies[1]["choices"][0]["text"] and bodies[2]["object"] == "response"
    for entry, text in zip(found[len(good) :], bad.values(), strict=False):
        assert entry["response"] is None and text in entry["error"]["message"]
    cold, other = found[-2:]
    assert cold["response"]["status_code"] == 400 and cold["error"] is None
    assert cold["response"]["body"]["error"]["param"] == "temperature"
    assert (other["custom_id"], other["response"]["status_code"]) == ("other", 404)
    assert "41 requests, 9 failed" in capsys.readouterr().err


def test_a_pipe_is_read_once(tmp_path: pathlib.Path) -> None:
    pipe, target = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    text = line("a", CHAT, messages=USER, max_tokens=2)
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    config = EngineConfig.of(model="demo", max_model_len=512)
    assert run_batch(config, str(pipe), str(target), progress=False, core=wire.STUB_CORE) == 0
    writer.join(5)
    assert [json.loads(x)["custom_id"] for x in target.read_text().splitlines()] == ["a"]


async def test_an_internal_error_is_an_answer() -> None:
    """The app answers 500 and raises for a server's log; a batch goes on."""
    app = fastapi.FastAPI()
    errors.install(app)

    @app.post("/broken")
    async def broken() -> None:
        raise KeyError("x")

    answer = await post(app, "/broken", b"{}", {})
    assert answer.status == 500 and json.loads(answer.body)["error"]


def test_all_well_is_0(tmp_path: pathlib.Path) -> None:
    code, found = run(tmp_path, [line("a", CHAT, messages=USER, max_tokens=2)])
    assert code == 0 and len(found) == 1


def test_files_that_cannot_be_used(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, out = str(tmp_path / "no.jsonl"), str(tmp_path / "out.jsonl")
    for words, text in [
        (["-i", missing, "-o", out], "no.jsonl: No such file"),
        (["-i", out, "-o", out], "the same file"),
        (["-i", missing, "-o", out, "--max-concurrency", "0"], "--max-concurrency"),
    ]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["run-batch", *words])
        assert caught.value.code == 2 and text in capsys.readouterr().err
    assert not pathlib.Path(out).exists()
