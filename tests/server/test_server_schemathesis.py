"""What /openapi.json promises, tried out on a running server: every operation with valid and
invalid input made from its schema. No 5xx, no status that is not documented, bodies of the form
that is documented, no input of a wrong type taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks
from serverlib import Server, alive, call, running

FLAGS = ("--max-model-len", "64", "--enable-fault-tolerance", "--log-level", "warning")
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]


@pytest.fixture(scope="module")
def up() -> Iterator[Server]:
    with running(*FLAGS, core="schema_core:Willing") as server:
        yield server


def operations(url: str) -> list[Any]:
    schema = schemathesis.openapi.from_url(url + "/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


def _try(operation: Any, mode: GenerationMode, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        drains = isinstance(case.body, dict) and case.body.get("instruction") == "drain"
        assume(not drains)  # nothing is served after it
        case.call_and_validate(checks=CHECKS, timeout=20)

    run()


def _modes(operation: Any) -> list[GenerationMode]:
    """Any text is a valid part of a path."""
    if list(operation.body) or list(operation.query):
        return [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    return [GenerationMode.POSITIVE]


@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_every_operation_keeps_its_promises(up: Server, examples: int) -> None:
    found = operations(up.url)
    assert len(found) >= 28
    for operation in found:
        for mode in _modes(operation):
            _try(operation, mode, examples)
    assert alive(up.url)


USER = [{"role": "user", "content": "hi"}]
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi", "logprobs": 2, "echo": True, "n": 2}),
    ("/v1/completions", {"prompt": [5, 6], "stream": True, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "hi", "prompt_logprobs": 1, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": USER, "stream": True}),
    ("/v1/chat/completions", {"messages": USER, "n": 2, "return_token_ids": True}),
    ("/v1/embeddings", {"input": ["a", "b"]}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3, "stream": True}),
    ("/v1/messages", {"messages": USER, "max_tokens": 3}),
    ("/v1/messages", {"messages": USER, "max_tokens": 3, "stream": True}),
    ("/v1/messages/count_tokens", {"messages": USER}),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/fault_tolerance/apply", {"instruction": "retry"}),
]


def test_good_answers_have_the_documented_form(up: Server) -> None:
    found = {op.path: op for op in operations(up.url) if op.method == "post"}
    for path, body in GOOD:
        case = found[path].Case(body=body, media_type="application/json")
        answer = case.call_and_validate(checks=CHECKS, timeout=20)
        assert answer.status_code in (200, 202), (path, answer.text)


def test_keys_are_documented() -> None:
    """401 and the keys are there where a key is asked for, and only there."""
    with running(*FLAGS, "--admin-api-key", "s3cret") as server:
        key = {"Authorization": "Bearer s3cret"}
        assert call(server.url, "/openapi.json")[0] == 200
        made = call(server.url, "/openapi.json", headers=key)[1]
        for path, operations_ in made["paths"].items():
            for method, operation in operations_.items():
                if "{" in path or operation.get("requestBody"):
                    continue
                request = {"raw": b"{}"} if method == "post" else {}
                status = call(server.url, path, **request)[0]
                assert (status == 401) == ("401" in operation["responses"]), path
                assert (status == 401) == ("security" in operation), path
        assert {"bearer", "x_api_key"} == set(made["components"]["securitySchemes"])
