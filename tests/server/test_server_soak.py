"""The worst known bodies of each field, at their limits and beyond, beside a neighbour that
streams: every one is answered, the neighbour goes on, and the memory comes back (H2, H3).

How long the neighbour waited at most is told at the end of the test run; a busy machine makes it
longer, so that no test asserts it.
"""

from __future__ import annotations

import gc
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psutil
import pytest
from serverlib import Server, alive, call, eventually, hang_up, metric, running

C, CC, R, M = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
MIB = 1 << 20
VOCAB = 49_152  # of the demo model
# seconds of work each, all of it bounded: once in a while is enough
LONG_ONES = ("wide schema", "grammar at its limit", "counting 10 MB", "tokenizing 10 MB")
LONG_ONES += ("all ids biased", "ids by other names")
Bodies = tuple[str, Callable[[], Any], tuple[int, ...]]


def short(**more: Any) -> dict[str, Any]:
    return {"prompt": "hi", "max_tokens": 1, **more}


def chat(content: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}


def tool(name: str, properties: int = 1) -> dict[str, Any]:
    fields = {f"p{i}": {"type": "string"} for i in range(properties)}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": fields}}}


LONG = "word " * 2_000_000  # 10 MB
DEEP = "[" * 100_000 + "]" * 100_000
# name: route, body (made when it is sent), what may be answered
WORST: dict[str, Bodies] = {
    "prompt of 30 MB": (C, lambda: short(prompt=LONG * 3), (400,)),
    "prompt of 10 MB, one token kept": (C, lambda: short(prompt=LONG, truncate_prompt_tokens=1),
                                        (200,)),
    "prompt without spaces": (C, lambda: short(prompt="a" * 10_000_000), (400,)),
    "20,000 prompts": (C, lambda: short(prompt=[[1]] * 20_000), (400,)),
    "prompts at their limit": (C, lambda: short(prompt=[[1]] * 2048), (200,)),
    "5,000,000 ids": (C, lambda: short(prompt=[5] * 5_000_000), (400, 413)),
    "900,000 ids": (C, lambda: short(prompt=[5] * 900_000), (400,)),
    "n at its limit": (C, lambda: short(prompt=[7] * 2000, n=2048), (200,)),
    "n beyond": (C, lambda: short(n=10**9), (400,)),
    "prompts times n": (C, lambda: short(prompt=[[1]] * 2000, n=2000), (400,)),
    "bad word of 4 MB": (C, lambda: short(bad_words=["a" * 4_000_000]), (400,)),
    "20 bad words of 100 kB": (C, lambda: short(bad_words=["b" * 100_000] * 20), (400,)),
    "100,000 bad words": (C, lambda: short(bad_words=["b"] * 100_000), (200, 400)),
    "stop strings": (C, lambda: short(stop=["a" * 1000] * 4), (200, 400)),
    "stop string of 8 MB": (C, lambda: short(stop=["ab" * 4_000_000]), (400,)),
    "5,000,000 allowed ids": (C, lambda: short(allowed_token_ids=[5] * 5_000_000), (400, 413)),
    "all ids allowed": (C, lambda: short(allowed_token_ids=list(range(VOCAB))), (200,)),
    "all ids stop": (C, lambda: short(stop_token_ids=list(range(VOCAB))), (200,)),
    "all ids biased": (C, lambda: short(logit_bias={str(i): 1 for i in range(VOCAB)}), (200, 400)),
    "ids by other names": (C, lambda: short(logit_bias={str(i): 1 for i in range(400_000)}),
                           (400,)),
    "user of 8 MB": (C, lambda: short(user="u" * 8_000_000), (200, 400)),
    "salt of 8 MB": (C, lambda: short(cache_salt="s" * 8_000_000), (200, 400)),
    "deep": (C, lambda: f'{{"prompt":"a","x":{DEEP}}}'.encode(), (200, 400)),
    "deep schema": (C, lambda: f'{{"prompt":"a","guided_json":{DEEP}}}'.encode(), (400,)),
    "wide schema": (
        C,
        lambda: short(
            guided_json={"properties": {f"p{i}": {"type": "integer"} for i in range(10_000)}}
        ),
        (200, 400),
    ),
    "schema of 8 MB": (C, lambda: short(guided_json={"enum": ["x" * 8_000_000]}), (400,)),
    "choices": (C, lambda: short(guided_choice=[f"{i:09d}" for i in range(10_000)]), (200,)),
    "a million choices": (C, lambda: short(guided_choice=["x"] * 900_000), (400,)),
    "regex at its limit": (C, lambda: short(guided_regex="(a|b)" * 3200), (200, 400)),
    "regex of counts": (C, lambda: short(guided_regex="((a{1,99}){1,99}){1,99}"), (200, 400)),
    "grammar at its limit": (
        C,
        lambda: short(guided_grammar="start: e\ne: " + " | ".join(["e e"] * 5000) + ' | "a"'),
        (200, 400, 503),
    ),
    "3,000,000 messages": (CC, lambda: {"messages": [{}] * 3_000_000}, (413,)),
    "400,000 messages": (CC, lambda: {"messages": [{}] * 400_000}, (400,)),
    "300,000 parts": (CC, lambda: chat([{"type": "text", "text": "a"}] * 200_000), (400,)),
    "message of 30 MB": (CC, lambda: chat(LONG * 3), (400,)),
    "tools": (CC, lambda: chat(tools=[tool(f"t{i}") for i in range(10_000)]), (400,)),
    "a wide tool": (CC, lambda: chat(tools=[tool("t", 50_000)]), (400,)),
    "template arguments": (CC, lambda: chat(chat_template_kwargs={"x": LONG}), (200, 400)),
    "response items": (R, lambda: {"input": [{"role": "user", "content": "a"}] * 200_000},
                       (400,)),
    "metadata": (R, lambda: {"input": "a", "metadata": {f"k{i}": "v" * 512 for i in range(9999)}},
                 (400,)),
    "system of many blocks": (
        M,
        lambda: {**chat(), "system": [{"type": "text", "text": "x"}] * 200_000},
        (400,),
    ),
    "counting 10 MB": (f"{M}/count_tokens", lambda: chat(LONG), (200, 400)),
    "tokenizing 10 MB": ("/tokenize", lambda: {"prompt": LONG}, (200, 400)),
    "tokenizing 30 MB": ("/tokenize", lambda: {"prompt": "é" * 15_000_000}, (200, 400)),
    "detokenizing 5,000,000": ("/detokenize", lambda: {"tokens": [5] * 5_000_000}, (400, 413)),
    "detokenizing 900,000": ("/detokenize", lambda: {"tokens": [5] * 900_000}, (200, 400)),
    "100,000 texts to score": ("/score", lambda: {"text_1": "a", "text_2": ["b"] * 100_000},
                               (400,)),
    "texts to score": ("/score", lambda: {"text_1": "a", "text_2": ["b"] * 2048}, (200,)),
    "pairs to score": (
        "/score",
        lambda: {"text_1": ["a"] * 1024, "text_2": ["b"] * 1024},
        (200,),
    ),
    "100,000 documents": ("/rerank", lambda: {"query": "a", "documents": ["b"] * 100_000},
                          (400,)),
    "documents": ("/rerank", lambda: {"query": "a", "documents": ["b"] * 2047}, (200,)),
    "embeddings": ("/v1/embeddings", lambda: {"input": ["b"] * 2048}, (200,)),
    "embedding of 30 MB": ("/v1/embeddings", lambda: {"input": LONG * 3}, (400,)),
}  # fmt: skip


class Neighbour:
    """A stream that goes on and on; `longest` is what it waited for a token at most."""

    def __init__(self, port: int) -> None:
        self._stopped = threading.Event()
        self.longest, self.tokens = 0.0, 0
        self.failed: list[bytes] = []
        self._port = port
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        eventually(lambda: self.tokens > 3)
        self.longest = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._stopped.is_set():
            body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
            data = json.dumps(body).encode()
            head = f"POST {C} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", self._port)) as connection:
                connection.settimeout(120)
                connection.sendall(head.encode() + data)
                last = time.monotonic()
                while not self._stopped.is_set():
                    part = connection.recv(65536)
                    now = time.monotonic()
                    self.longest, last = max(self.longest, now - last), now
                    self.tokens += part.count(b"data: ")
                    if b'"error"' in part or not part:
                        self.failed.append(part)
                        return
                    if b"[DONE]" in part:
                        break


@pytest.fixture(scope="module")
def up() -> Iterator[Server]:
    with running("--max-num-seqs", "64", "--log-level", "warning", step=0.01) as server:
        yield server


@pytest.mark.parametrize("rounds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_worst_bodies_stop_nobody(up: Server, rounds: int, record_property: Any) -> None:
    process = psutil.Process(up.process.pid)
    assert alive(up.url)

    def rss() -> int:
        return int(process.memory_info().rss) // MIB

    before = rss()
    gaps: dict[str, float] = {}
    answers: dict[str, str] = {}
    held: list[int] = []
    with Neighbour(up.port) as neighbour:
        for _ in range(rounds):
            for name, (path, make, wanted) in WORST.items():
                if rounds == 1 and name in LONG_ONES:
                    continue
                made = make()
                raw = made if isinstance(made, bytes) else msgspec.json.encode(made)
                del made
                gc.collect()
                neighbour.longest = 0.0
                try:
                    status, answer, _ = call(up.url, path, raw=raw)
                except OSError as error:
                    raise AssertionError(f"{name}: {error}") from error
                gaps[name] = max(gaps.get(name, 0.0), neighbour.longest)
                if status not in wanted:
                    answers[name] = f"{status} {str(answer)[:200]}"
            eventually(lambda: metric(up.url, "num_requests_waiting") == 0, 60)
            eventually(lambda: rss() - before < 250, 20)  # it was above 1,000
            held.append(rss())
        assert not neighbour.failed
    worst = sorted(gaps, key=gaps.__getitem__)[-3:][::-1]
    record_property(
        "shown",
        f"soak: API process {before} MiB, then {held}; a neighbour waited at most "
        + ", ".join(f"{gaps[name]:.2f} s ({name})" for name in worst),
    )
    assert not answers
    eventually(lambda: call(up.url, "/load")[1] == {"server_load": 0}, 20)


def test_vanishing_clients(up: Server) -> None:
    """300 clients that leave while they wait, or in the middle of a stream."""
    before = metric(up.url, "request_success_total", finished_reason="abort")
    paths = itertools.cycle([(C, short(max_tokens=500)), (CC, chat(max_tokens=500))])
    honest: list[int] = []

    def vanish(path: str, body: dict[str, Any], stream: bool) -> None:
        hang_up(up.port, path, {**body, "max_tokens": 500, "stream": stream}, 0.05)

    threads = [
        threading.Thread(target=vanish, args=(*next(paths), bool(i % 2))) for i in range(300)
    ]
    for i, thread in enumerate(threads):
        thread.start()
        if i % 30 == 29:
            honest.append(call(up.url, C, short())[0])
    for thread in threads:
        thread.join(60)
    assert honest == [200] * 10
    eventually(lambda: call(up.url, "/load")[1] == {"server_load": 0}, 30)
    eventually(lambda: metric(up.url, "num_requests_running") == 0, 30)
    assert metric(up.url, "num_requests_waiting") == 0
    assert metric(up.url, "request_success_total", finished_reason="abort") > before


# -- what cannot be sent to an engine --------------------------------------------------------------

HUGE = {"format": {"type": "json_schema", "json_schema": {"type": "integer", "default": 10**30}}}


@pytest.mark.parametrize(
    ("flags", "odd"),
    [
        ((), {"structured_outputs": {"structural_tag": HUGE}}),
        (("--data-parallel-size", "2", "--data-parallel-affinity", "session"), {"user": "\ud800"}),
        (("--api-server-count", "2"), {"user": "\ud800"}),
        (("--api-server-count", "2"), {"structured_outputs": {"structural_tag": HUGE}}),
    ],
    ids=["tag", "session", "two processes", "tag, two processes"],
)
def test_what_cannot_be_sent_leaves_nothing(flags: tuple[str, ...], odd: dict[str, Any]) -> None:
    """H1: three of them filled the waiting room for ever, and an end took its whole time-out."""
    more = ["--max-num-queued-reqs", "3", "--shutdown-timeout", "120"]
    with running(*flags, *more, step=0.001) as up:
        for _ in range(4):
            for path, body in ((C, short(**odd)), (CC, chat(**odd)), (C, short(**odd, n=3))):
                status, found, _ = call(up.url, path, body)
                assert status in (200, 400), found
                if "user" in odd:
                    assert (status, found["error"]["param"]) == (400, "user")
        assert call(up.url, C, short())[0] == 200
        assert call(up.url, "/load")[1] == {"server_load": 0}
        assert up.stop(timeout=60) == 0  # half of the shutdown time-out
