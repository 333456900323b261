"""Data sets that are made up or read from text: random, prefix_repetition, sharegpt, custom.

All requests arrive at 0; `datasets.with_arrivals` gives them times.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.lab.bench.datasets import FIRST_ID, LAST_ID, BenchRequest

# Short common words: nearly every tokenizer has each, with the space before it, as one token.
_WORDS = (
    "the of and to in is for that on with as it was by at from this be are or an not have which "
    "but had all one their there been has more when who will no if out so up into than them can "
    "only other time new some could these two may first then do any my now such like over our "
    "even most made after also did many off before must well back through years where much your "
    "way down should because long each just state those people too good little make world still "
    "see own men work here get know day right under last great old off house might set water "
    "place part again home small found say night point away hand high school against left number"
).split()

# Conversations outside these lengths are left out, as other tools do: tokens of the prompt, and of
# prompt and answer together.
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


def words_of(tokens: Sequence[int]) -> str:
    """Text in place of token ids, for servers that take text only: a common word for each id, so
    equal prefixes stay equal and most tokenizers count as many tokens."""
    return " ".join(_WORDS[i % len(_WORDS)] for i in tokens)


def random_requests(
    num: int,
    input_len: int,
    output_len: int,
    *,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
    vocab: tuple[int, int] = (FIRST_ID, LAST_ID),
) -> list[BenchRequest]:
    """Random tokens: one prefix for all, then lengths within range_ratio of those given.

    Raises ValueError when range_ratio is not from 0 to below 1.
    """
    if not 0 <= range_ratio < 1:
        raise ValueError(f"--random-range-ratio must be from 0 to below 1, got {range_ratio}")
    rng = np.random.default_rng([seed, 4])
    first, last = vocab

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(first, last + 1, count).tolist())

    def lengths(middle: int) -> list[int]:
        spread = int(middle * range_ratio)
        return rng.integers(max(1, middle - spread), middle + spread + 1, num).tolist()

    prefix, prompts, outputs = tokens(prefix_len), lengths(input_len), lengths(output_len)
    return [
        BenchRequest(0.0, prefix + tokens(prompt), prefix_len + prompt, output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def prefix_repetition(
    num: int,
    prefix_len: int = 256,
    suffix_len: int = 256,
    num_prefixes: int = 10,
    output_len: int = 128,
    *,
    seed: int = 0,
) -> list[BenchRequest]:
    """Each of a few random prefixes with many random ends, in random order."""
    rng = np.random.default_rng([seed, 5])

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(FIRST_ID, LAST_ID + 1, count).tolist())

    prefixes = [tokens(prefix_len) for _ in range(num_prefixes)]
    chosen = rng.permutation(np.arange(num) % num_prefixes)
    length = prefix_len + suffix_len
    return [BenchRequest(0.0, prefixes[i] + tokens(suffix_len), length, output_len) for i in chosen]


def sharegpt_requests(
    path: str | Path,
    num: int,
    count: Callable[[str], int],
    *,
    output_len: int | None = None,
    seed: int = 0,
) -> list[BenchRequest]:
    """First questions of a ShareGPT-format file ([{"conversations": [{"from", "value"}, ...]}]) in
    random order, with the answers' lengths as output lengths unless one is given.

    `count` gives the tokens of a text. Raises ValueError for a file that is not such a list.
    """
    data = _load_json(path)
    pairs = list(_first_turns(path, data))
    random.Random(seed).shuffle(pairs)
    found: list[BenchRequest] = []
    for question, answer in pairs:
        prompt = count(question)
        output = count(answer) if output_len is None else output_len
        long = prompt > _LONGEST_PROMPT or prompt + output > _LONGEST
        if not long and prompt >= _SHORTEST and (output_len is not None or output >= _SHORTEST):
            found.append(BenchRequest(0.0, question, prompt, output))
        if len(found) == num:
            break
    return _repeated(path, found, num)


def custom_requests(
    path: str | Path, num: int, count: Callable[[str], int], *, output_len: int, seed: int = 0
) -> list[BenchRequest]:
    """Prompts of a JSON-lines file: {"prompt": text, "output_tokens": number, if it has one}, in
    random order. Raises ValueError naming the line."""
    found = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row["prompt"]
            output = int(row.get("output_tokens", output_len))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path}, line {number}: no object with a prompt") from None
        if not isinstance(prompt, str) or not prompt or output < 1:
            raise ValueError(f"{path}, line {number}: prompt must be text, output_tokens above 0")
        found.append(BenchRequest(0.0, prompt, count(prompt), output))
    random.Random(seed).shuffle(found)
    return _repeated(path, found[:num], num)


def _repeated(path: str | Path, found: list[BenchRequest], num: int) -> list[BenchRequest]:
    """As many as asked for: the file's requests over again where it has fewer."""
    if not found:
        raise ValueError(f"{path} holds no usable prompt")
    return [found[i % len(found)] for i in range(num)]


def _first_turns(path: str | Path, data: Any) -> Iterator[tuple[str, str]]:
    try:
        for entry in data:
            turns = entry.get("conversations") or entry.get("conversation") or []
            if len(turns) >= 2:
                yield str(turns[0]["value"]), str(turns[1]["value"])
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is no list of conversations with values") from None


def _load_json(path: str | Path) -> Any:
    text = _text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def _text(path: str | Path) -> str:
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    return Path(path).read_text(encoding="utf-8")
