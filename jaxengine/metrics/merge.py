"""One text of the metrics of several processes."""

from __future__ import annotations

import re

# Families that the process which answers the client counts; all others are the engines'.
REQUEST_FAMILIES = frozenset(
    """prompt_tokens prompt_tokens_cached prompt_tokens_by_source generation_tokens request_success
    admission_rejections time_to_first_token_seconds inter_token_latency_seconds
    request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds
    request_num_preemptions request_prompt_tokens request_generation_tokens
    request_max_num_generation_tokens request_prefill_kv_computed_tokens request_params_n
    request_params_max_tokens iteration_tokens_total""".split()
)
_HTTP = b"jaxengine:http_"
_HTTP_COMMENT = re.compile(rb"# (?:HELP|TYPE) (jaxengine:http_\w+)")
_PARTS = rb"_(?:total|bucket|sum|count)"
_SAMPLE = re.compile(rb"jaxengine:(\w+?)(?:_total|_bucket|_sum|_count)?\{")


def merge_texts(engines: bytes, parts: list[bytes]) -> bytes:
    """The engines' text, with the API processes' samples added to its own of the families that
    these count (all have the same samples, in any order), and the families of HTTP, which only
    they have."""
    sums: dict[bytes, float] = {}
    for part in parts:
        for line in part.splitlines():
            if _of_requests(line):
                key, _, value = line.rpartition(b" ")
                sums[key] = sums.get(key, 0.0) + float(value)
    merged = []
    for line in engines.splitlines():
        if _of_requests(line):
            key, _, value = line.rpartition(b" ")
            line = key + b" " + repr(float(value) + sums.get(key, 0.0)).encode()
        merged.append(line)
    return b"\n".join([*merged, *_of_http(parts)]) + b"\n"


def _of_http(parts: list[bytes]) -> list[bytes]:
    """The sums of the samples `jaxengine:http_*`, each behind its family's comments."""
    sums: dict[bytes, float] = {}
    comments: dict[bytes, list[bytes]] = {}
    for part in parts:
        seen: dict[bytes, list[bytes]] = {}
        for line in part.splitlines():
            if match := _HTTP_COMMENT.match(line):
                seen.setdefault(match[1], []).append(line)
            elif line.startswith(_HTTP):
                key, _, value = line.rpartition(b" ")
                sums[key] = sums.get(key, 0.0) + float(value)
        comments = {**seen, **comments}
    found: list[bytes] = []
    for family, lines in comments.items():
        found += lines
        for key, total in sums.items():
            name = re.split(rb"[{ ]", key)[0]
            if name == family or re.fullmatch(_PARTS, name.removeprefix(family)):
                found.append(key + b" " + repr(total).encode())
    return found


def _of_requests(line: bytes) -> bool:
    match = _SAMPLE.match(line)
    if match is None:
        return False
    name = match[1].decode()
    return name in REQUEST_FAMILIES or f"{name}_total" in REQUEST_FAMILIES
