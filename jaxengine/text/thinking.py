"""A request's thinking budget, as the engine is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxengine.config import HARMONY_PARSERS
from jaxengine.sampling_params import ThinkingBudget
from jaxengine.text.reasoning import BEGIN, END, FINAL, Start, thinking_start
from jaxengine.text.reasoning.harmony import MESSAGE
from jaxengine.validation import RequestError

if TYPE_CHECKING:
    from jaxengine.text.tokenizer import Tokenizer

_NAME = "thinking_token_budget"
_TO_FINAL = f"<|end|><|start|>assistant{FINAL}"
_SEEN = 64  # last tokens of a prompt, which tell whether it opens a thought


def thinking_budget(
    tokens: int,
    parser: str | None,
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
    start: Start | None = None,
) -> ThinkingBudget | None:
    """None when the answer has no thought. `start` None: what the end of the prompt says. Raises
    RequestError."""
    if parser is None or tokenizer is None:
        needs = "--reasoning-parser, which this server does not have"
        raise RequestError(_NAME, f"{_NAME} needs {needs if tokenizer else 'a tokenizer'}")
    channels = parser in HARMONY_PARSERS
    begin_text, end_text = (MESSAGE, _TO_FINAL) if channels else (BEGIN, END)
    begin = tokenizer.encode(begin_text, add_special_tokens=False)
    end = tokenizer.encode(end_text, add_special_tokens=False)
    if channels and (len(begin) > 1 or tokenizer.decode(end[:1], False) != "<|end|>"):
        raise RequestError(
            _NAME, f"{_NAME} needs a tokenizer that has {MESSAGE} and <|end|> as tokens"
        )
    text = ""
    if start is None or start == "inside":
        text = tokenizer.decode(prompt[-_SEEN:] if start is None else prompt, False)
    if start is None:
        start = "maybe" if channels else thinking_start(parser, text)
    if start == "outside":
        return None
    thought = text.rpartition(BEGIN)[2] if start == "inside" and BEGIN in text else ""
    if thought.strip() and END not in thought:  # the answer goes on with a thought
        tokens = max(0, tokens - len(tokenizer.encode(thought, add_special_tokens=False)))
    inside = start == "inside" and not channels
    return ThinkingBudget(tokens, inside, begin, end, begin_text, end_text, channels)
