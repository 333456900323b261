"""What an engine is told of a thinking budget."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxengine.text.thinking import thinking_budget
from jaxengine.text.tokenizer import Tokenizer
from jaxengine.validation import RequestError


def tokenizer(*specials: str) -> Tokenizer:
    """A token a byte, and these."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    tk = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tk.decoder = decoders.ByteLevel()
    tk.add_special_tokens(list(specials))
    size = tk.get_vocab_size()
    return Tokenizer(tk, None, (0,), False, size, None, frozenset(), None, None)


THINK = tokenizer("<think>", "</think>")


def budget(prompt: str, parser: str = "qwen3", start: Any = None, tk: Tokenizer = THINK) -> Any:
    return thinking_budget(9, parser, tk, tk.encode(prompt), start)


def test_where_the_answer_begins() -> None:
    assert budget("a<think>\n").inside and not budget("a").inside
    assert budget("a", "deepseek_r1").inside
    assert budget("a</think>") is None and budget("a<think>", start="outside") is None
    assert budget("a").end == THINK.encode("</think>") and budget("a").tokens == 9


def test_what_the_prompt_thought_already() -> None:
    assert budget("<think>1234", start="inside").tokens == 5
    assert budget("<think>" + "x" * 50, start="inside").tokens == 0
    assert budget("<think>1234</think> <think>", start="inside").tokens == 9
    assert budget("<think>old</think>", "deepseek_r1", start="inside").tokens == 9


def test_channels() -> None:
    tk = tokenizer("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    found = budget("a", "gpt-oss", tk=tk)
    assert found.channels and not found.inside and len(found.begin) == 1
    assert tk.decode(found.end, False) == "<|end|><|start|>assistant<|channel|>final<|message|>"
    with pytest.raises(RequestError, match=r"needs a tokenizer that has <\|message\|>"):
        budget("a", "gpt-oss")


def test_what_is_missing() -> None:
    with pytest.raises(RequestError, match="needs --reasoning-parser"):
        thinking_budget(9, None, THINK, [1])
    with pytest.raises(RequestError, match="needs a tokenizer"):
        thinking_budget(9, "qwen3", None, [1])
