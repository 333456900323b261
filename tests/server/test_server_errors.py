"""A table of invalid bodies -> (status, field named), with the server alive after every row."""

from __future__ import annotations

from typing import Any

import pytest
from serverlib import Server, alive, call, running

V = 49152
C, CC = "/v1/completions", "/v1/chat/completions"

# route, fields on top of a good body, field named ("" = none), and the raw JSON of one value
BAD: list[tuple[str, dict[str, Any], str]] = [
    # B03: ids out of the vocabulary
    (C, {"stop_token_ids": [V + 5], "min_tokens": 2}, "stop_token_ids"),
    (C, {"stop_token_ids": [-1]}, "stop_token_ids"),
    (C, {"stop_token_ids": [2**40]}, "stop_token_ids"),
    (C, {"logit_bias": {str(V + 5): 5}}, "logit_bias"),
    (C, {"logit_bias": {"-1": 5}}, "logit_bias"),
    (C, {"logit_bias": {"abc": 1}}, "logit_bias"),
    (C, {"allowed_token_ids": [V]}, "allowed_token_ids"),
    (C, {"allowed_token_ids": []}, "allowed_token_ids"),
    (C, {"prompt": [1, V + 1]}, "prompt"),
    (C, {"prompt": [-3]}, "prompt"),
    (C, {"prompt": [2**63]}, "prompt"),
    # B26: max_tokens
    (C, {"max_tokens": 0}, "max_tokens"),
    (C, {"max_tokens": -1}, "max_tokens"),
    (C, {"max_tokens": "5"}, "max_tokens"),
    (C, {"max_tokens": 2.5}, "max_tokens"),
    (CC, {"max_tokens": 0}, "max_tokens"),
    (CC, {"max_completion_tokens": -1}, "max_completion_tokens"),
    (CC, {"max_completion_tokens": 2.5}, "max_completion_tokens"),
    # B29: numbers
    (C, {"temperature": float("nan")}, "temperature"),
    (C, {"temperature": float("inf")}, "temperature"),
    (C, {"temperature": "nan"}, "temperature"),
    (C, {"temperature": -1}, "temperature"),
    (C, {"temperature": 100}, "temperature"),
    (C, {"temperature": True}, "temperature"),
    (C, {"top_p": 0}, "top_p"),
    (C, {"top_p": -0.1}, "top_p"),
    (C, {"top_p": 1.1}, "top_p"),
    (C, {"top_p": float("nan")}, "top_p"),
    (C, {"top_k": -2}, "top_k"),
    (C, {"top_k": 0.5}, "top_k"),
    (C, {"min_p": 2}, "min_p"),
    (C, {"frequency_penalty": 1e9}, "frequency_penalty"),
    (C, {"presence_penalty": float("nan")}, "presence_penalty"),
    (C, {"repetition_penalty": 0}, "repetition_penalty"),
    (C, {"seed": 2**64}, "seed"),
    (C, {"seed": -(2**63) - 1}, "seed"),
    (C, {"n": 0}, "n"),
    (C, {"n": -1}, "n"),
    (C, {"n": 10**6}, "n"),
    (C, {"logprobs": -2}, "logprobs"),
    (C, {"logprobs": 10**6}, "logprobs"),
    (C, {"logprobs": float("nan")}, "logprobs"),
    (C, {"logprobs": float("inf")}, "logprobs"),
    (C, {"priority": 2**70}, "priority"),
    (CC, {"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    (CC, {"logprobs": True, "top_logprobs": float("nan")}, "top_logprobs"),
    (CC, {"top_logprobs": 2}, "top_logprobs"),
    # B06: stop
    (C, {"stop": [""]}, "stop"),
    (C, {"stop": [5]}, "stop"),
    # prompts
    (C, {"prompt": ""}, "prompt"),
    (C, {"prompt": []}, "prompt"),
    (C, {"prompt": [[]]}, "prompt"),
    (C, {"prompt": [1, "a"]}, "prompt"),
    (C, {"prompt": {"a": 1}}, "prompt"),
    (C, {"prompt": None}, "prompt"),
    (C, {"prompt": [5] * 512}, "prompt"),
    (C, {"prompt": "\ud800"}, "prompt"),
    (CC, {"messages": []}, "messages"),
    (CC, {"messages": "hi"}, "messages"),
    (CC, {"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
    (CC, {"messages": [{"content": "no role"}]}, "messages"),
    # streams
    (C, {"stream": "true"}, "stream"),
    (C, {"stream": True, "temperature": -1}, "temperature"),
    (C, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CC, {"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options"),
    # constraints: malformed, contradictory, or two at once
    (CC, {"response_format": "json"}, "response_format"),
    (CC, {"response_format": {"type": "json_schema"}}, "response_format"),
    (CC, {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    (CC, {"response_format": {"type": "xml"}}, "response_format"),
    (CC, {"response_format": {}}, "response_format"),
    (C, {"response_format": {"type": "json_object", "schema": 5}}, "response_format"),
    (C, {"structured_outputs": "x"}, "structured_outputs"),
    (C, {"structured_outputs": {"regex": 5}}, "structured_outputs"),
    (C, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    (C, {"structured_outputs": {"choice": []}}, "structured_outputs"),
    (C, {"structured_outputs": {"rejex": "a"}}, "structured_outputs"),
    (C, {"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs"),
    (C, {"guided_json": "{"}, "guided_json"),
    (C, {"guided_choice": "yes"}, "guided_choice"),
    (C, {"guided_choice": []}, "guided_choice"),
    (C, {"guided_regex": ""}, "guided_regex"),
    (C, {"guided_grammar": 7}, "guided_grammar"),
    (C, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    (
        CC,
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "guided_regex",
    ),
    (C, {"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
    (C, {"guided_regex": "("}, "guided_regex"),
    (C, {"priority": 1.5}, "priority"),
    (C, {"cache_salt": ""}, "cache_salt"),
    # known, not supported
    (C, {"suffix": "end"}, "suffix"),
    (C, {"best_of": 3}, "best_of"),
    (C, {"vllm_xargs": {"plugin": 1}}, "vllm_xargs"),
    (C, {"use_beam_search": True}, "use_beam_search"),
    (CC, {"chat_template": "x"}, "chat_template"),
    (CC, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    (CC, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
]


def _body(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    good: dict[str, Any] = {"max_tokens": 4}
    good |= {"prompt": "hi"} if path == C else {"messages": [{"role": "user", "content": "hi"}]}
    return good | fields


@pytest.mark.parametrize("path,fields,named", BAD, ids=lambda v: str(v)[:40])
def test_bad_bodies_are_400_and_name_the_field(
    server: Server, path: str, fields: dict[str, Any], named: str
) -> None:
    status, body, _ = call(server.url, path, _body(path, fields))
    assert status == 400, body
    error = body["error"]
    assert error["param"] == named, error
    assert error["message"] and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"


def test_alive_after_all_rows(server: Server) -> None:
    assert alive(server.url)


@pytest.mark.parametrize(
    "raw", [b"{", b"[]", b"5", b'"x"', b"\xff\xfe", b'{"prompt": "hi", "n": 1' + b"0" * 5000 + b"}"]
)
def test_broken_json_is_400(server: Server, raw: bytes) -> None:
    status, body, _ = call(server.url, C, raw=raw)
    assert status == 400 and body["error"]["message"], body


def test_wrong_places(server: Server) -> None:
    assert call(server.url, "/v1/nothing")[0] == 404
    assert call(server.url, "/v1/completions")[0] == 405
    status, body, _ = call(server.url, C, {"model": "gpt-5", "prompt": "hi"})
    assert status == 404 and body["error"]["param"] == "model"
    assert body["error"]["code"] == "model_not_found"
    assert call(server.url, "/v1/models/gpt-5")[0] == 404


def test_unknown_fields_and_harmless_values_are_accepted(server: Server) -> None:
    fields = {"flavour": "sweet", "suffix": None, "best_of": 1, "response_format": {"type": "text"}}
    fields["vllm_xargs"] = {}
    assert call(server.url, C, _body(C, fields))[0] == 200
    fields = {"structured_outputs": None, "guided_json": None, "cache_salt": "x", "priority": 0}
    assert call(server.url, C, _body(C, fields))[0] == 200
    fields = {"tools": [], "tool_choice": "auto", "functions": None, "store": True}
    assert call(server.url, CC, _body(CC, fields))[0] == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 1e12},
        {"temperature": 1e-9},
        {"temperature": 1e-4},
        {"seed": -1},
        {"seed": 2**63 - 1},
        {"seed": 2**63},
        {"max_tokens": None},
        {"logit_bias": {"5": -100}},
        {"n": None, "stop": None, "seed": None},
    ],
    ids=str,
)
def test_odd_but_legal_values(server: Server, fields: dict[str, Any]) -> None:
    status, body, _ = call(server.url, C, _body(C, fields))
    assert status == 200, body


def test_max_tokens_defaults(server: Server) -> None:
    """B26: 16 for completions, the rest of the context for chats; max_completion_tokens wins."""
    _, body, _ = call(server.url, C, {"prompt": "hi", "ignore_eos": True})
    assert body["usage"]["completion_tokens"] == 16
    chat = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    _, body, _ = call(server.url, CC, chat)
    assert body["usage"]["total_tokens"] == 512
    _, body, _ = call(server.url, CC, chat | {"max_tokens": 5, "max_completion_tokens": 3})
    assert body["usage"]["completion_tokens"] == 3
    _, body, _ = call(server.url, C, {"prompt": "hi", "max_tokens": 1e9, "ignore_eos": True})
    assert body["usage"]["total_tokens"] == 512


def test_key_size_and_names() -> None:
    flags = ["--api-key", "s3cret", "--max-request-bytes", "2000", "--served-model-name", "mine"]
    with running(*flags, "--metrics-compat", "vllm") as up:
        assert call(up.url, "/health")[0] == 200
        key = {"Authorization": "Bearer s3cret"}
        for path in ("/v1/models", "/metrics", "/version", "/load", "/docs"):
            assert call(up.url, path)[0] == 401
            assert call(up.url, path, headers=key)[0] == 200
        for bad in ("Bearer s3cre", "s3cret", "Basic s3cret", "Bearer \u00e9"):
            assert call(up.url, "/v1/models", headers={"Authorization": bad})[0] == 401
        status, body, _ = call(up.url, C, {"prompt": "x" * 3000}, headers=key)
        assert status == 413 and body["error"]["message"]
        _, body, _ = call(up.url, C, {"prompt": "x", "model": "demo"}, headers=key)
        assert body["model"] == "demo"
        _, body, _ = call(up.url, "/v1/models", headers=key)
        assert body["data"][0]["id"] == "mine" and body["data"][0]["max_model_len"] == 8192
        _, text, _ = call(up.url, "/metrics", headers=key)
        assert (
            "\nvllm:num_requests_running{" in text and "\njaxengine:num_requests_running{" in text
        )


def test_admin_routes_need_the_key_and_a_mode_that_exists() -> None:
    with running("--api-key", "s3cret", "--max-num-queued-tokens", "40") as up:
        key = {"Authorization": "Bearer s3cret"}
        for path in ("/reset_prefix_cache", "/pause", "/resume", "/sleep", "/wake_up"):
            assert call(up.url, path, {})[0] == 401
        for path in ("/is_paused", "/is_sleeping", "/server_info"):
            assert call(up.url, path)[0] == 401
        assert call(up.url, "/reset_prefix_cache", {}, headers=key)[1] == {"success": True}
        status, body, _ = call(up.url, "/pause?mode=now", {}, headers=key)
        assert status == 400 and body["error"]["param"] == "mode"
        status, body, _ = call(up.url, "/sleep?level=3", {}, headers=key)
        assert status == 400 and body["error"]["param"] == "level"
        info = call(up.url, "/server_info", headers=key)[1]
        assert "s3cret" not in str(info) and info["engine"]["info"] == {"core": "stub"}
        # an empty room takes any prompt, however many tokens may wait
        assert call(up.url, C, {"prompt": [5] * 100}, headers=key)[0] == 200


def test_overload_is_503_with_retry_after() -> None:
    """max_num_queued_reqs: what waits is bounded, and the refusals are counted."""
    import threading

    from serverlib import eventually, metric

    flags = ["--max-num-seqs", "1", "--max-num-queued-reqs", "1"]
    with running(*flags, step=0.02) as up:
        body = {"prompt": "hi", "max_tokens": 50, "ignore_eos": True}
        waiting = [threading.Thread(target=call, args=(up.url, C, body)) for _ in range(2)]
        waiting[0].start()
        eventually(lambda: metric(up.url, "num_requests_running") == 1)
        waiting[1].start()
        eventually(lambda: call(up.url, "/load")[1]["server_load"] == 2)
        status, answer, headers = call(up.url, C, body)
        assert status == 503 and answer["error"]["code"] == "overloaded"
        assert headers["retry-after"] == "1"
        assert metric(up.url, "admission_rejections_total") == 1
        for thread in waiting:
            thread.join()
        assert call(up.url, C, body)[0] == 200
