"""The model's reasoning, apart from its answer."""

from __future__ import annotations

from jaxengine.text.reasoning.gate import AnswerGate
from jaxengine.text.reasoning.harmony import FINAL, Harmony
from jaxengine.text.reasoning.think import BEGIN, END, Start, Think

__all__ = ["AnswerGate", "BEGIN", "END", "FINAL", "Harmony", "Start", "Think", "thinking_start"]


def thinking_start(parser: str, prompt: str, continued: str = "") -> Start:
    """Where an answer to `prompt` begins, for the parsers deepseek_r1 and qwen3. `continued` is
    the text of the message that the prompt ends with, if the answer goes on with it."""
    tail = prompt.rstrip()
    if tail.endswith(BEGIN) or continued.rfind(BEGIN) > continued.rfind(END):
        return "inside"
    if tail.endswith(END) or continued:
        return "outside"
    return "inside" if parser == "deepseek_r1" else "maybe"
