"""/score, /rerank and /pooling: made of the embeddings that /v1/embeddings gives."""

from __future__ import annotations

from typing import Any

import pytest
from serverlib import Server, call

TEXTS = ["hello", "hello there", "a cat"]


def vectors(server: Server, texts: list[str], **more: Any) -> list[list[float]]:
    _, body, _ = call(server.url, "/v1/embeddings", {"input": texts, **more})
    return [d["embedding"] for d in body["data"]]


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_one_against_many_and_pairs(server: Server, path: str) -> None:
    first, *rest = vectors(server, ["hi", *TEXTS])
    status, body, _ = call(server.url, path, {"text_1": "hi", "text_2": TEXTS})
    assert status == 200, body
    wanted = [cosine(first, other) for other in rest]
    assert [d["score"] for d in body["data"]] == pytest.approx(wanted, abs=1e-4)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] >= 6
    pairs = {"queries": TEXTS, "documents": TEXTS[::-1]}
    _, body, _ = call(server.url, path, pairs)
    scores = [d["score"] for d in body["data"]]
    assert scores[0] == pytest.approx(cosine(rest[0], rest[2]), abs=1e-4)
    assert scores[1] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_the_most_alike_come_first(server: Server, path: str) -> None:
    asked = {"query": TEXTS[1], "documents": TEXTS}
    status, body, _ = call(server.url, path, asked)
    assert status == 200, body
    results = body["results"]
    assert results[0]["index"] == 1 and results[0]["document"] == {"text": TEXTS[1]}
    assert sorted(r["index"] for r in results) == [0, 1, 2]
    scores = [r["relevance_score"] for r in results]
    assert scores == sorted(scores, reverse=True) and scores[0] == pytest.approx(1, abs=1e-4)
    assert len(call(server.url, path, asked | {"top_n": 2})[1]["results"]) == 2


def test_vectors_as_they_are(server: Server) -> None:
    status, body, _ = call(server.url, "/pooling", {"input": TEXTS})
    assert status == 200, body
    assert [d["data"] for d in body["data"]] == vectors(server, TEXTS, normalize=False)
    same = call(server.url, "/pooling", {"input": "hi", "normalize": True, "dimensions": 3})[1]
    assert same["data"][0]["data"] == pytest.approx(vectors(server, ["hi"], dimensions=3)[0])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": [], "text_2": "b"}, "text_1"),
        ("/score", {"text_1": 3, "text_2": "b"}, "text_1"),
        ("/score", {"text_1": "a", "documents": ""}, "documents"),
        ("/score", {"queries": "", "text_2": "b"}, "queries"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["x " * 100_000]}, "documents"),
        ("/rerank", {"documents": ["b"]}, "query"),
        ("/pooling", {"input": []}, "input"),
        ("/pooling", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/pooling", {"input": "a", "pooling": "max"}, "pooling"),
        ("/pooling", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
    ids=lambda v: str(v)[:50],
)
def test_refusals(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    status, answer, _ = call(server.url, path, body)
    assert status == 400 and answer["error"]["param"] == param, answer
    assert "\n" not in answer["error"]["message"]


def test_unknown_models(server: Server) -> None:
    body = {"query": "a", "documents": ["b"], "model": "other"}
    assert call(server.url, "/rerank", body)[0] == 404
