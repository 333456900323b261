"""Log-probabilities as users see them: one `{token id: Logprob}` for each position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxengine.text.detokenizer import REPLACEMENT
from jaxengine.wire.messages import TokenLogprobs

# What an impossible token shows, streamed or not: JSON has no -Infinity.
FLOOR = -9999.0
_CONTEXT = 4  # ids that may complete a character with the one shown


class Logprob(msgspec.Struct):
    """`rank` 1 is the most likely token. `logprob` is never below -9999.0 (impossible)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]


class TokenTexts:
    """Text of single tokens, remembered: the same few return at every position."""

    def __init__(self, tk: Any | None) -> None:
        self._tk = tk
        self._texts: dict[int, str] = {}

    def __call__(self, token_id: int, context: Sequence[int]) -> str | None:
        """Text of one id; ids that are part of a character show what they complete of it after
        the last `context` ids, else "". None without a tokenizer."""
        if self._tk is None:
            return None
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._alone(token_id)
        return self._in_context(token_id, context) if text.endswith(REPLACEMENT) else text

    def _alone(self, token_id: int) -> str:
        text = self._decode([token_id])
        piece = self._tk.id_to_token(token_id) or ""  # type: ignore[union-attr]
        # decoders that mark spaces in the vocabulary drop the first one of a text
        lost = piece.startswith("▁") and "▁" not in text
        return " " * (_leading(piece, "▁") - _leading(text, " ")) + text if lost else text

    def _in_context(self, token_id: int, context: Sequence[int]) -> str:
        for size in range(1, min(_CONTEXT, len(context)) + 1):
            before = list(context[len(context) - size :])
            text = self._decode([*before, token_id])
            if not text.endswith(REPLACEMENT):
                shown = self._decode(before).rstrip(REPLACEMENT)
                return text[len(shown) :] if text.startswith(shown) else ""
        return ""

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tk.decode(ids, skip_special_tokens=False)  # type: ignore[union-attr]
        return text


def _leading(text: str, char: str) -> int:
    return len(text) - len(text.lstrip(char))


def position_logprobs(
    entry: TokenLogprobs, count: int, texts: TokenTexts, context: Sequence[int]
) -> PositionLogprobs:
    """The position's own token first, then the `count` best (their ranks are 1, 2, ...)."""
    shown: PositionLogprobs = {}
    for i, token_id in enumerate(entry.token_ids[: count + 1]):
        if token_id in shown:
            continue  # the position's own token is among the best
        value = entry.logprobs[i]
        shown[token_id] = Logprob(
            value if value > FLOOR else FLOOR,  # NaN compares false as well
            i or entry.rank,
            texts(token_id, context),
        )
    return shown


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None],
    count: int,
    texts: TokenTexts,
    prompt_token_ids: Sequence[int],
) -> list[PositionLogprobs | None]:
    """One entry for each prompt token; the first token has none."""
    return [
        None
        if entry is None
        else position_logprobs(entry, count, texts, prompt_token_ids[max(0, at - _CONTEXT) : at])
        for at, entry in enumerate(entries)
    ]
