"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxengine.server.openai.bodies import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    TopLogprob,
)
from jaxengine.text.logprobs import Logprob, PositionLogprobs


def _text(token_id: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else entry.decoded_token or ""


def _best(position: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """The `count` most likely tokens, best first."""
    ranked = [(i, e) for i, e in position.items() if e.rank is not None and e.rank <= count]
    return sorted(ranked, key=lambda item: item[1].rank or 0)[:count]


def completion_logprobs(
    positions: Sequence[PositionLogprobs | None],
    token_ids: Sequence[int],
    count: int,
    offset: int,
    text_of: Callable[[int], str],
    as_ids: bool = False,
) -> tuple[CompletionLogprobs, int]:
    """One entry for each token, and the text offset behind them. A position of None (the first
    prompt token) has its text by `text_of` and null values. `top_logprobs` holds the token itself
    and the `count` best."""
    result = CompletionLogprobs([], [], [], [])
    for token_id, position in zip(token_ids, positions, strict=True):
        result.text_offset.append(offset)
        own = None if position is None else position.get(token_id)
        if position is None or own is None:
            unscored = text_of(token_id)
            result.tokens.append(f"token_id:{token_id}" if as_ids else unscored)
            offset += len(unscored)
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        text = _text(token_id, own, as_ids)
        result.tokens.append(text)
        result.token_logprobs.append(own.logprob)
        top: dict[str, float] = {}
        for other, entry in _best(position, count):
            top.setdefault(_text(other, entry, as_ids), entry.logprob)
        top.setdefault(text, own.logprob)
        result.top_logprobs.append(top)
        offset += len(own.decoded_token or "")
    return result, offset


def chat_logprobs(
    positions: Sequence[PositionLogprobs],
    token_ids: Sequence[int],
    count: int,
    as_ids: bool = False,
) -> ChatLogprobs:
    """One entry for each token, with its `count` best alternatives."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        own = position[token_id]
        text = _text(token_id, own, as_ids)
        best = [
            TopLogprob(text_of, entry.logprob, list(text_of.encode()))
            for other, entry in _best(position, count)
            for text_of in [_text(other, entry, as_ids)]
        ]
        content.append(ChatLogprob(text, own.logprob, list(text.encode()), best))
    return ChatLogprobs(content)


def prompt_logprobs_body(
    positions: Sequence[PositionLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    """vLLM's prompt_logprobs field: {token id: {logprob, rank, decoded_token}} a position."""
    if positions is None:
        return None
    return [
        None if position is None else {str(i): entry for i, entry in position.items()}
        for position in positions
    ]
