"""The real engine behind the real server, on a model that starts in seconds."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from typing import Any

import msgspec
import pytest
import tiny_model
import zmq
from engine_server import CC, GREEDY, REPLAY, C, text_of
from serverlib import Server, alive, call, chunks, eventually, hang_up, metric

from jaxengine.engine.kv_event_replay import END

LETTERS = [tiny_model.byte_id(c) for c in "abcdefgh "]


@pytest.fixture
def up(engine_server: Server) -> Server:
    return engine_server


# -- text, usage, metrics ---------------------------------------------------------------------


def _stops(text: str) -> list[tuple[Any, str, str]]:
    """(stop, expected text, expected reason) of cases that a known text meets."""
    found = []
    for stop in (text[5:6], text[4:7], text[-1], [text[6:9], text[6:8]], ["zz", text[3:5]]):
        wanted = [stop] if isinstance(stop, str) else stop
        ends = [(text.find(w) + len(w), text.find(w), w) for w in wanted if w in text]
        first = min(ends)
        found.append((stop, text[: first[1]], first[2]))
    return found


def test_stop_strings(up: Server) -> None:
    """B06."""
    body = {"prompt": "tell", "max_tokens": 20, "allowed_token_ids": LETTERS, "seed": 7}
    text = text_of(call(up.url, C, body))
    assert len(text) == 20
    for stop, expected, reason in _stops(text):
        status, whole, _ = call(up.url, C, {**body, "stop": stop})
        choice = whole["choices"][0]
        assert status == 200 and choice["text"] == expected, (stop, text)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
        found = chunks(up.url, C, {**body, "stop": stop, "stream_options": {"include_usage": True}})
        assert "".join(c["choices"][0]["text"] for c in found[:-1]) == expected
        assert found[-2]["choices"][0]["stop_reason"] == reason
        assert found[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        kept = text_of(call(up.url, C, {**body, "stop": stop, "include_stop_str_in_output": True}))
        assert kept == expected + reason
    # the start of a stop string that never comes is given back at the end
    almost = [text[-3:] + "!", text[:2] + "!"]
    found = chunks(up.url, C, {**body, "stop": almost})
    assert "".join(c["choices"][0]["text"] for c in found) == text
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    assert call(up.url, C, {**body, "stop": ""})[0] == 400
    assert text_of(call(up.url, C, {**body, "stop": [f"no{i}" for i in range(20)]})) == text


def test_stop_at_the_text_of_a_special_token(up: Server) -> None:
    body = {"prompt": "x", "allowed_token_ids": [2], "ignore_eos": True, "max_tokens": 4}
    status, whole, _ = call(up.url, C, {**body, "stop": "</s>"})
    assert status == 200 and whole["choices"][0]["stop_reason"] == "</s>"
    assert whole["choices"][0]["text"] == "" and whole["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path,fields",
    [
        (C, {"prompt": "ab", "logprobs": 5, "echo": True, "top_k": 1, "temperature": 1}),
        (C, {"prompt": "ab", "logprobs": 5, "logit_bias": {"5": -100, "6": 100}}),
        (C, {"prompt": "ab", "logprobs": 5, "allowed_token_ids": LETTERS[:2]}),
        (CC, {"logprobs": True, "top_logprobs": 5, "guided_choice": ["yes"]}),
        (CC, {"logprobs": True, "top_logprobs": 5, "allowed_token_ids": LETTERS[:2]}),
    ],
    ids=lambda v: str(sorted(v)) if isinstance(v, dict) else None,
)
def test_logprobs_are_json(up: Server, path: str, fields: dict[str, Any], stream: bool) -> None:
    """B09: a strict parser reads every answer; what cannot be is finite or null."""
    body = {"max_tokens": 4, **fields}
    if path == CC:
        body["messages"] = [{"role": "user", "content": "hi"}]
    if stream:
        parts = [c["choices"][0] for c in chunks(up.url, path, body)]
    else:
        status, whole, _ = call(up.url, path, body)
        assert status == 200, whole
        parts = whole["choices"]
    if path == CC:
        entries = [e for p in parts if p["logprobs"] for e in p["logprobs"]["content"]]
        own = [e["logprob"] for e in entries]
    else:
        own = [x for p in parts for x in p["logprobs"]["token_logprobs"] if x is not None]
    assert own and all(-9999 < x <= 0 for x in own)


def test_usage_is_the_same_streamed(up: Server) -> None:
    """B30: lists, n, a stop string."""
    body = {"prompt": ["abc", "de"], "n": 3, "seed": 1, "max_tokens": 6, "stop": "q"}
    usage = call(up.url, C, body)[1]["usage"]
    assert usage["prompt_tokens"] == 5
    found = chunks(up.url, C, {**body, "stream_options": {"include_usage": True}})
    assert found[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]
    assert found[-1]["usage"]["prompt_tokens"] == 5
    ends = [c["choices"][0] for c in found[:-1] if c["choices"][0]["finish_reason"]]
    assert sorted(c["index"] for c in ends) == list(range(6))  # B56


def test_preemption_and_aborts_leave_the_metrics_right(up: Server) -> None:
    """B47, B12: gauges return to 0, reasons add up, recomputed tokens are no prefix hits."""
    success = {
        r: metric(up.url, "request_success_total", finished_reason=r) for r in ("length", "abort")
    }
    call(up.url, "/reset_prefix_cache", {})
    hits = metric(up.url, "prefix_cache_hits_total")
    before = metric(up.url, "num_preemptions_total")
    body = {"max_tokens": 90, "ignore_eos": True, "seed": 3}
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        prompts = [f"{i:03d}" * 12 for i in range(6)]
        answers = list(pool.map(lambda p: call(up.url, C, {**body, "prompt": p}), prompts))
    assert [a[0] for a in answers] == [200] * 6
    assert metric(up.url, "num_preemptions_total") > before
    for _, answer, _ in answers:
        usage = answer["usage"]
        assert usage["completion_tokens"] == 90 and usage["prompt_tokens"] == 36
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert metric(up.url, "prefix_cache_hits_total") == hits
    port = up.port
    for _ in range(6):
        hang_up(port, C, {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "n": 2}, 0.02)
    eventually(
        lambda: (
            metric(up.url, "request_success_total", finished_reason="abort")
            == success["abort"] + 12
        )
    )
    assert (
        metric(up.url, "request_success_total", finished_reason="length") == success["length"] + 6
    )
    assert alive(up.url)


# -- priority, salt, admin --------------------------------------------------------------------


def test_cache_salt_and_reset(up: Server) -> None:
    def cached(salt: str | None) -> int:
        body = {"prompt": "salt" * 10, "max_tokens": 1, "cache_salt": salt}
        usage = call(up.url, C, body)[1]["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    eventually(lambda: call(up.url, "/reset_prefix_cache", {})[1] == {"success": True})
    assert [cached("a"), cached("a"), cached("b"), cached(None), cached("b")] == [0, 32, 0, 0, 32]
    assert call(up.url, "/reset_prefix_cache", {})[1] == {"success": True}
    assert cached("a") == 0


def test_kv_events_tell_what_is_cached(up: Server) -> None:
    call(up.url, "/reset_prefix_cache", {})
    text = "events of this prompt " * 2  # two full blocks
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.RCVTIMEO, 5000)
        client.setsockopt(zmq.LINGER, 0)
        client.connect(REPLAY)

        def read() -> list[dict[str, Any]]:
            """All events so far, from the first; numbers have no gaps."""
            numbers: list[int] = []
            events: list[dict[str, Any]] = []
            client.send_multipart([b"", bytes(8)])
            while (frames := client.recv_multipart())[2] != END:
                numbers.append(int.from_bytes(frames[2], "big"))
                events += msgspec.msgpack.decode(frames[3])[1]
            assert numbers == list(range(len(numbers)))
            return events

        before = len(read())
        assert call(up.url, C, {"prompt": text, "max_tokens": 1})[0] == 200
        eventually(lambda: len(read()) > before)
        stored = [e for e in read()[before:] if e["type"] == "BlockStored"]
        ids = tiny_model.byte_tokenizer().encode(text).ids
        assert [t for e in stored for t in e["token_ids"]] == ids[:32]
        assert call(up.url, "/reset_prefix_cache", {})[1] == {"success": True}
        eventually(lambda: read()[-1] == {"type": "AllBlocksCleared"})


def test_priority_decides_who_is_next(up: Server) -> None:
    order: list[int] = []

    def one(rank: int, prompt: str, tokens: int) -> None:
        body = {"prompt": prompt, "priority": rank, "max_tokens": tokens, "ignore_eos": True}
        assert call(up.url, C, body)[0] == 200
        order.append(rank)

    assert call(up.url, "/pause?mode=keep", {})[0] == 200
    threads = [threading.Thread(target=one, args=(r, "p" * 60, 4)) for r in (9, 9, 9, 9, 5, 5, -1)]
    for i, thread in enumerate(threads):
        thread.start()
        eventually(lambda i=i: call(up.url, "/load")[1]["server_load"] == i + 1)
    assert call(up.url, "/resume", {})[0] == 200
    for thread in threads:
        thread.join(30)
    assert order.index(-1) < 4 and order[-1] == 9 and order[-2] == 9


def test_pause_wait_lets_running_requests_finish(up: Server) -> None:
    done: dict[str, float] = {}

    def one(name: str, tokens: int) -> None:
        body = {"prompt": name, "max_tokens": tokens, "ignore_eos": True}
        answer = call(up.url, C, body)
        assert answer[0] == 200 and answer[1]["usage"]["completion_tokens"] == tokens
        done[name] = time.monotonic()

    first = threading.Thread(target=one, args=("first", 200))
    first.start()
    eventually(lambda: metric(up.url, "num_requests_running") == 1)
    assert call(up.url, "/pause?mode=wait", {})[1] == {"status": "paused"}
    paused = time.monotonic()
    first.join(10)
    assert done["first"] < paused + 0.5
    assert call(up.url, "/is_paused")[1] == {"is_paused": True}
    second = threading.Thread(target=one, args=("second", 2))
    second.start()
    time.sleep(0.3)
    assert "second" not in done
    assert call(up.url, "/resume", {})[1] == {"status": "resumed"}
    second.join(10)
    assert "second" in done


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(up: Server, level: int) -> None:
    body = {"prompt": "remember me", "max_tokens": 8, **GREEDY}
    before = text_of(call(up.url, C, body))
    found: list[dict[str, Any]] = []
    long = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
    stream = threading.Thread(target=lambda: found.extend(chunks(up.url, C, long)))
    stream.start()
    eventually(lambda: metric(up.url, "num_requests_running") == 1)
    assert call(up.url, f"/sleep?level={level}", {})[1] == {"status": "sleeping"}
    stream.join(10)
    assert found[-1]["choices"][0]["finish_reason"] == "abort"
    assert call(up.url, "/is_sleeping")[1] == {"is_sleeping": True}
    assert call(up.url, "/health")[0] == 200
    assert call(up.url, "/wake_up", {})[1] == {"status": "awake"}
    assert call(up.url, "/is_sleeping")[1] == {"is_sleeping": False}
    assert text_of(call(up.url, C, body)) == before
    assert alive(up.url)


def test_admin_calls_are_checked(up: Server) -> None:
    for path, named in (("/sleep?level=3", "level"), ("/sleep?level=x", "level")):
        status, body, _ = call(up.url, path, {})
        assert status == 400 and body["error"]["param"] == named
    status, body, _ = call(up.url, "/pause?mode=now", {})
    assert status == 400 and body["error"]["param"] == "mode"
    info = call(up.url, "/server_info")[1]
    assert info["config"]["scheduler"]["scheduling_policy"] == "priority"
    assert info["engine"]["vocab_size"] == tiny_model.VOCAB and info["version"]
