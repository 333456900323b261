"""Fields of requests that are known to be somebody's, but not served: refused by name, unless they
hold a value that asks for nothing. Names are those of OpenAI's, Anthropic's and vLLM's APIs.

A field that nobody knows is accepted and left out, with a line in the debug log. So are hints that
change nothing in what was asked (`HINTS`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from jaxengine.server.errors import ApiError

log = logging.getLogger(__name__)

Table = Mapping[str, tuple[Any, ...]]  # field -> values that ask for nothing

# What a server may leave out without changing the answer that was asked for.
HINTS = frozenset(
    (
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    )
)

_VLLM: Table = {
    "ec_transfer_params": (None,),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": (None, []),
    "logprob_token_ids": (None, []),
    "media_io_kwargs": (None, {}),
    "mm_payload": (None, "none"),
    "mm_processor_kwargs": (None, {}),
    "padding": (None, "do_not_pad"),
    "prompt_embeds": (None,),
    "prompt_logprob_token_ids": (None, []),
    "repetition_detection": (None,),
    "return_mm_kwargs": (None, False),
    "return_token_offsets": (None, False),
    "return_weight_versions": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "use_beam_search": (None, False),
    "vllm_xargs": (None, {}),  # arguments of plugins, which there are not
    "watermarking": (None, False),
}
COMPLETION: Table = {
    **_VLLM,
    "suffix": (None, ""),
    "best_of": (None, 1),
    "guided_whitespace_pattern": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
}
RESPONSES: Table = {
    **_VLLM,
    "prompt": (None,),
    "conversation": (None,),
    "context_management": (None, []),
    "moderation": (None,),
    "enable_response_messages": (None, False),
    "previous_input_messages": (None, []),
}
MESSAGES: Table = {
    "container": (None,),
    "mcp_servers": (None, []),
    "speed": (None, "standard"),
}
EMBEDDING: Table = {
    "ec_transfer_params": (None,),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "padding": (None, "do_not_pad"),
    "late_chunking": (None, False),
}
SCORE: Table = {
    **EMBEDDING,
    "instruction": (None, ""),
    "max_tokens_per_doc": (None, 0),
    "max_tokens_per_query": (None, 0),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "data_1": (None,),
    "data_2": (None,),
    "items": (None,),
}


def note_left_out(where: str, kind: str) -> None:
    """Say that a tool is left out, which only a client's own API could carry out. The model is
    not told of it, and so cannot ask for it."""
    log.warning("%s of type %.60r is left out: the model may call functions only", where, kind)


def check_extra(extra: Mapping[str, Any] | None, table: Table, taken: Collection[str] = ()) -> None:
    """Look at the fields of a body that its type does not have. `taken` are read elsewhere. Raises
    ApiError 400 naming the first one that asks for what is not served."""
    for name, value in (extra or {}).items():
        if name in taken or name in HINTS:
            continue
        harmless = table.get(name)
        if harmless is None:
            log.debug("field %r is not known and ignored", name)
        elif not any(value == h and type(value) is type(h) for h in harmless):
            raise ApiError(400, f"{name} is not supported", param=name, code="unsupported")
