"""How an `LLM` and its outputs show themselves in a notebook: small, escaped HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from jaxengine.text.outputs import CompletionOutput, RequestOutput
from jaxengine.wire.messages import EngineReady, EngineStats

_HEAD = '<th style="text-align:left;font-weight:normal;opacity:.65;vertical-align:top">'
_CELL = '<td style="text-align:left;white-space:pre-wrap">'


def llm_html(
    ready: EngineReady, stats: EngineStats, blocks: Mapping[str, int], *, closed: bool = False
) -> str:
    """Model, memory, KV blocks, context, dtype and device of an engine.

    `blocks`: total, used and cached blocks (`EngineCore.utility("kv_blocks")`); empty where the
    core does not tell.
    """
    info = ready.info
    rows = [("model", info.get("model", "")), ("dtype", info.get("dtype", ""))]
    rows.append(("device", info.get("device", "")))
    rows.append(("context", f"{ready.max_model_len:,} tokens"))
    sizes = [(name, info.get(f"{name} MiB")) for name in ("weights", "KV")]
    rows.append(("memory", ", ".join(f"{name} {size} MiB" for name, size in sizes if size)))
    if blocks and not closed:
        text = f"{blocks['total']:,} of {ready.block_size} tokens: {blocks['used']:,} used, "
        rows.append(("KV blocks", f"{text}{blocks['cached']:,} cached"))
    if closed:
        rows.append(("state", "closed"))
    elif stats.num_running or stats.num_waiting:
        rows.append(("requests", f"{stats.num_running} running, {stats.num_waiting} waiting"))
    return _table("LLM", rows)


def output_html(output: RequestOutput) -> str:
    """The prompt, every completion's text, and how it ended."""
    prompt = output.prompt
    if prompt is None:
        prompt = f"{len(output.prompt_token_ids)} token ids"
    rows = [("prompt", prompt)]
    several = len(output.outputs) > 1
    for completion in output.outputs:
        rows.append((f"text {completion.index}" if several else "text", completion.text))
        rows.append(("", _ending(completion)))
    cached = f", {output.num_cached_tokens} of them cached" if output.num_cached_tokens else ""
    rows.append(("prompt tokens", f"{len(output.prompt_token_ids)}{cached}"))
    return _table(f"RequestOutput {output.request_id}", rows)


def _ending(completion: CompletionOutput) -> str:
    """Tokens and finish reason, in one line."""
    ended = completion.finish_reason or "running"
    if completion.error is not None:
        ended += f": {completion.error}"
    elif completion.stop_reason is not None:
        ended += f" at {completion.stop_reason!r}"
    return f"{len(completion.token_ids)} tokens, {ended}"


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Rows without a value are left out; everything is escaped."""
    body = "".join(
        f"<tr>{_HEAD}{escape(name)}</th>{_CELL}{escape(value)}</td></tr>"
        for name, value in rows
        if value
    )
    return f"<table><caption>{escape(title)}</caption><tbody>{body}</tbody></table>"
