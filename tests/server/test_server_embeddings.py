"""/v1/embeddings over HTTP, by the official client, against a real engine and the stub."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serverlib import Server, alive, call, running
from tiny_model import build

CORE = "jaxengine.engine.core:EngineCore"
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = build(tmp_path_factory.mktemp("embeddings"))
    with running(model, "--max-num-seqs", "4", "--warmup", "lazy", core=CORE) as server:
        yield server


def test_the_official_client(up: Server) -> None:
    client = openai.OpenAI(base_url=up.url + "/v1", api_key="x")
    model = client.models.list().data[0].id
    texts = ["hello", "hello there", "hello"]
    answer = client.embeddings.create(model=model, input=texts)  # asks for base64
    assert [d.index for d in answer.data] == [0, 1, 2]
    first, second, third = (d.embedding for d in answer.data)
    assert first == pytest.approx(third, abs=1e-5) and first != second
    assert math.isclose(sum(x * x for x in first), 1.0, abs_tol=1e-4)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    plain = client.embeddings.create(model=model, input="hello", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(first, abs=1e-5)
    half = client.embeddings.create(model=model, input="hello", dimensions=4)
    assert len(half.data[0].embedding) == 4
    ids = call(up.url, "/tokenize", {"prompt": "hello"})[1]["tokens"]
    by_ids = client.embeddings.create(model=model, input=ids)
    assert by_ids.data[0].embedding == pytest.approx(first, abs=1e-5)


def test_pooling_and_norm(up: Server) -> None:
    def vector(**more: Any) -> list[float]:
        status, body, _ = call(up.url, PATH, {"input": "one two three", **more})
        assert status == 200
        found: list[float] = body["data"][0]["embedding"]
        return found

    last, mean = vector(), vector(pooling="mean")
    assert last != pytest.approx(mean, abs=1e-3)
    raw = vector(normalize=False)
    length = math.sqrt(sum(x * x for x in raw))
    assert length > 1.5 and [x / length for x in raw] == pytest.approx(last, abs=1e-4)


@pytest.mark.parametrize(
    "body,field",
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [{"a": 1}]}, "input"),
        ({"input": [10**9]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "x " * 100_000}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 100_000}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "data_parallel_rank": 3}, "data_parallel_rank"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_refusals(up: Server, body: dict[str, Any], field: str) -> None:
    status, answer, _ = call(up.url, PATH, body)
    assert status == 400 and answer["error"]["param"] == field, answer
    assert alive(up.url)


def test_an_unknown_model_is_404(up: Server) -> None:
    assert call(up.url, PATH, {"input": "a", "model": "other"})[0] == 404
