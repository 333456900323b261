"""The batches of `bench throughput` from every data set, without an engine."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from jaxengine.lab.bench.throughput import Batch, make_batches, parser


class Words:
    """A tokenizer: the length of every word."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]


def batches(*argv: str, text: bool = False) -> list[list[Batch]]:
    args = parser().parse_args(list(argv))
    tokenizer: Any = Words() if text else None
    return make_batches(args, tokenizer)


def test_random() -> None:
    (small, large) = batches("--num-prompts", "2", "50", "--input-len", "20", "--output-len", "8")
    assert [len(tries) for tries in (small, large)] == [2, 2]  # --repeat
    prompts, outputs = large[0]
    assert {len(p) for p in prompts} == {20} and outputs == [8] * 50
    assert large[1][0] != prompts
    ((prompts, outputs),) = batches(
        "--num-prompts", "50", "--random-input-len", "20", "--random-output-len", "8",
        "--random-range-ratio", "0.5", "--random-prefix-len", "3", "--repeat", "1",
    )[0]  # fmt: skip
    lengths = {len(p) for p in prompts}
    assert min(lengths) >= 13 and max(lengths) <= 33 and len(lengths) > 5
    assert 4 <= min(outputs) < max(outputs) <= 12
    assert {tuple(p[:3]) for p in prompts} == {tuple(prompts[0][:3])}


def test_prefix_repetition() -> None:
    lens = ["--prefix-repetition-prefix-len", "6", "--prefix-repetition-suffix-len", "2"]
    lens += ["--prefix-repetition-num-prefixes", "3", "--prefix-repetition-output-len", "5"]
    ((prompts, outputs),) = batches(
        "--dataset-name", "prefix_repetition", "--num-prompts", "9", "--repeat", "1", *lens
    )[0]
    assert {len(p) for p in prompts} == {8} and outputs == [5] * 9
    assert len({tuple(p[:6]) for p in prompts}) == 3


def test_texts(tmp_path: pathlib.Path) -> None:
    talk = {"conversations": [{"from": "human", "value": "one two three four"},
                              {"from": "gpt", "value": "a b c d e"}]}  # fmt: skip
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([talk]))
    argv = ["--dataset-path", str(path), "--num-prompts", "2", "--repeat", "1"]
    ((prompts, outputs),) = batches("--dataset-name", "sharegpt", *argv, text=True)[0]
    assert prompts == [[3, 3, 5, 4]] * 2 and outputs == [5, 5]
    path.write_text('{"prompt": "to be or not", "output_tokens": 7}\n')
    ((prompts, outputs),) = batches("--dataset-name", "custom", *argv, text=True)[0]
    assert prompts == [[2, 2, 2, 3]] * 2 and outputs == [7, 7]


def test_trace(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 9000 * i, "input_length": 8, "output_length": 2 + i, "hash_ids": [0, i]}
        for i in range(2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--dataset-name", "trace", "--dataset-path", str(path), "--repeat", "1"]
    ((prompts, outputs),) = batches(*argv, "--num-prompts", "2")[0]
    assert prompts[0][:4] == prompts[1][:4] and prompts[0] != prompts[1] and outputs == [2, 3]
    with pytest.raises(ValueError, match=r"t\.jsonl has 2 requests, not 3"):
        batches(*argv, "--num-prompts", "3")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--input-len", "2000"], "are 2064 tokens, which --max-model-len 2048 does not take"),
        (["--dataset-name", "trace"], "--dataset-name trace needs --dataset-path"),
        (["--random-range-ratio", "1"], "--random-range-ratio must be"),
    ],
)
def test_mistakes_before_the_engine_starts(argv: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        batches(*argv)
