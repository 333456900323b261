"""Prompts for training a drafter: the user's file, or seeds of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

Prompt = str | list[int] | list[dict[str, Any]]  # text, token ids, or a conversation

_TASKS = (
    "Write a short story about {}.",
    "Explain {} to a beginner.",
    "What are the most important facts about {}?",
    "Write a polite email about {}.",
    "List ten ideas to do with {}.",
    "Summarize the history of {} in two paragraphs.",
    "What are the advantages and disadvantages of {}?",
    "Write a dialogue between two friends about {}.",
    "Give step by step instructions that have to do with {}.",
    "Write a product description for something related to {}.",
    "Write five quiz questions about {}, with answers.",
    "Write a Python function that has to do with {}, and explain it.",
    "Describe {} in simple words.",
    "Why do people care about {}?",
)
_TOPICS = (
    "the ocean", "a bicycle repair shop", "photosynthesis", "learning a language", "bread baking",
    "the moon", "a lost dog", "public libraries", "electric cars", "the Roman empire",
    "sorting numbers", "a rainy holiday", "healthy food", "jazz music", "solar energy",
    "a job interview", "volcanoes", "chess", "the human heart", "growing tomatoes",
    "time management", "a birthday party", "the internet", "penguins", "saving money",
    "prime numbers", "hiking in the mountains", "the printing press", "a broken phone", "sleep",
    "football", "black holes", "a small village", "coffee", "online shopping",
    "strings and text files", "trains", "the French revolution", "friendship", "recycling",
)  # fmt: skip


def built_in(seed: int) -> list[Prompt]:
    """Every task about every topic, as conversations, in random order."""
    order = np.random.default_rng(seed).permutation(len(_TASKS) * len(_TOPICS))
    return [
        [{"role": "user", "content": _TASKS[i % len(_TASKS)].format(_TOPICS[i // len(_TASKS)])}]
        for i in order.tolist()
    ]


def read_prompts(path: Path) -> list[Prompt]:
    """A prompt a line: .txt plain, .jsonl objects with `prompt`, `messages` or `prompt_token_ids`.

    Raises ValueError naming the file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {path} cannot be read: {error}") from error
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"--prompts {path} must be a .txt or .jsonl file")
    prompts = [
        line.strip() if path.suffix == ".txt" else _object(line, f"{path} line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if len(prompts) < 2:
        raise ValueError(f"--prompts {path} holds {len(prompts)} prompts, at least 2 are needed")
    return list(prompts)


def _object(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if isinstance(row, dict):
        text, ids, messages = (row.get(k) for k in ("prompt", "prompt_token_ids", "messages"))
        if isinstance(text, str) and text:
            return text
        if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            return ids
        if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
            return messages
    raise ValueError(f"{where} has no prompt, messages or prompt_token_ids")
