"""B05, B59: streamed pieces are exactly the text, no half characters, linear time."""

from __future__ import annotations

import random
import time

import pytest
import testdata
from tokenizers import Tokenizer as HFTokenizer
from toys import byte_char, byte_tokenizer, joined, run, sp_tokenizer

from jaxengine.sampling_params import SamplingParams
from jaxengine.text.detokenizer import TokenBytes, WindowDetokenizer, make_detokenizer
from jaxengine.text.detokenizer import token_bytes as byte_table
from jaxengine.text.gguf_tokenizer import build_tokenizer
from jaxengine.weights.gguf import gguf_metadata

BYTES = byte_tokenizer()
SP = sp_tokenizer()
TEXTS = ["héllo", "日本語", "🙂👍🏽", "👩‍👩‍👧‍👦 ok", "a\ufffdb", "ends \ufffd"]


def _ids(raw: bytes) -> list[int]:
    return [BYTES.tk.token_to_id(byte_char(b)) for b in raw]


def _pieces(tk: HFTokenizer, prompt: list[int], output: list[int], size: int = 1) -> list[str]:
    stream = make_detokenizer(tk, byte_table(tk), prompt)
    pieces = [stream.push(output[i : i + size]) for i in range(0, len(output), size)]
    return [*pieces, stream.flush()]


def test_byte_table_is_the_decoder() -> None:
    table = TokenBytes(BYTES.tk)
    assert b"".join(table[i] for i in _ids(bytes(range(0x20, 0xC0)))) == bytes(range(0x20, 0xC0))
    assert sorted(table[i] for i in range(256)) == [bytes([b]) for b in range(256)]
    assert table[BYTES.tk.token_to_id("<|im_end|>")] == b"<|im_end|>"
    assert table[299] == b""


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("toy", [BYTES, SP], ids=["bytes", "sp"])
def test_joined_pieces_are_the_text(toy: object, text: str, size: int) -> None:
    tk = toy.tk  # type: ignore[attr-defined]
    prompt = tk.encode("x y").ids
    output = tk.encode(text).ids
    pieces = _pieces(tk, prompt, output, size)
    assert "".join(pieces) == tk.decode(prompt + output)[len(tk.decode(prompt)) :]
    if "\ufffd" not in text:
        assert not any("\ufffd" in p for p in pieces)


@pytest.mark.parametrize("kept", [1, 2, 3])
@pytest.mark.parametrize("kind", ["delta", "final"])
def test_cut_character_ends_the_same_in_both_modes(kept: int, kind: str) -> None:
    ids = _ids("a🙂".encode())[: 1 + kept]
    outputs, _ = run(BYTES, "p", [[i] for i in ids], SamplingParams(max_tokens=50), kind=kind)
    assert joined(outputs) == "a\ufffd"


@pytest.mark.parametrize("toy", [BYTES, SP], ids=["bytes", "sp"])
def test_lone_continuation_bytes_flow_in_linear_time(toy: object) -> None:
    tk = toy.tk  # type: ignore[attr-defined]
    lone = _ids(b"\x82")[0] if toy is BYTES else tk.token_to_id("<0x82>")
    prompt = tk.encode("x").ids
    pieces = _pieces(tk, prompt, [lone] * 200)
    assert "".join(pieces) == "\ufffd" * 200
    silent = [i for i, p in enumerate(pieces) if p]
    assert max(b - a for a, b in zip(silent, silent[1:], strict=False)) <= 9
    began = time.perf_counter()
    assert "".join(_pieces(tk, prompt, [lone] * 20_000)) == "\ufffd" * 20_000
    assert time.perf_counter() - began < 5.0  # quadratic: minutes


def test_character_completed_by_a_token_that_starts_another() -> None:
    smile, thumb = "🙂".encode(), "👍".encode()
    pair = (byte_char(smile[3]), byte_char(thumb[0]))
    toy = byte_tokenizer(merges=(pair,))
    ids = [*_ids(smile[:3]), toy.tk.token_to_id("".join(pair)), *_ids(thumb[1:])]
    pieces = _pieces(toy.tk, _ids(b"p"), ids)
    assert [p for p in pieces if p] == ["🙂", "👍"]


def test_prompt_cut_inside_a_character_leaks_nothing() -> None:
    for toy in (BYTES, SP):
        text = "語🙂é x日👍🏽 y" * 2
        ids = toy.tk.encode(text).ids
        for cut in range(1, len(ids)):
            pieces = _pieces(toy.tk, ids[:cut], ids[cut:])
            texts = (toy.tk.decode(ids[:at]) for at in range(cut, -1, -1))
            before = next(t for t in texts if not t.endswith("\ufffd"))
            assert before + "".join(pieces) == text.removeprefix(" "), cut


def test_prompt_cut_that_is_never_completed() -> None:
    prompt = _ids("ab🙂".encode()[:-2])
    assert "".join(_pieces(BYTES.tk, prompt, _ids(b"xyz"))) == "xyz"
    sp_prompt = [SP.tk.token_to_id(p) for p in ["x", "<0xF0>", "<0x9F>"]]
    assert "".join(_pieces(SP.tk, sp_prompt, [SP.tk.token_to_id("y")])) == "y"


def test_random_bytes_equal_decode() -> None:
    rng = random.Random(5)
    for _ in range(150):
        raw = bytes(rng.choice(b"ab\x82\x9f\xe2\xf0\xc3\xf4") for _ in range(rng.randrange(1, 40)))
        output = _ids(raw)
        size = rng.randrange(1, 4)
        assert "".join(_pieces(BYTES.tk, _ids(b"p"), output, size)) == BYTES.tk.decode(output)
        window = WindowDetokenizer(BYTES.tk, _ids(b"p"), True)
        assert "".join([*map(window.push, [[i] for i in output]), window.flush()]) == raw.decode(
            errors="replace"
        )


SP_OUTPUTS = [
    ["▁Hello", "▁world"],
    ["▁", "▁Hello"],
    ["▁▁", "x"],
    ["▁▁▁▁", "▁", "▁x", ","],
    ["</s>", "▁Hello"],
    ["Hello", "▁", "▁", "x"],
    ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "▁x"],
    ["<0xFF>", "x"],
    ["▁"],
]


@pytest.mark.parametrize("prompt", [["<s>"], ["<s>", "▁Hello"], ["<s>", "▁x", "</s>"], ["▁"]])
@pytest.mark.parametrize("output", SP_OUTPUTS)
def test_metaspace_b59(prompt: list[str], output: list[str]) -> None:
    p = [SP.tk.token_to_id(t) for t in prompt]
    o = [SP.tk.token_to_id(t) for t in output]
    expected = SP.tk.decode(p + o)[len(SP.tk.decode(p)) :]
    for size in (1, 2, len(o)):
        assert "".join(_pieces(SP.tk, p, o, size)) == expected


def test_long_special_tail_keeps_the_leading_space() -> None:
    p = [SP.tk.token_to_id("▁Hello")] + [2] * 40
    assert "".join(_pieces(SP.tk, p, [SP.tk.token_to_id("▁world")])) == " world"


def test_skipped_tokens_in_a_row_stay_linear() -> None:
    p, o = [SP.tk.token_to_id("▁Hello")], [2] * 200 + [SP.tk.token_to_id("▁world")]
    assert "".join(_pieces(SP.tk, p, o)) == " world"


def test_special_tokens_shown_when_asked() -> None:
    ids = [*_ids(b"a"), BYTES.tk.token_to_id("<|im_end|>"), *_ids(b"b")]
    shown = make_detokenizer(BYTES.tk, byte_table(BYTES.tk), _ids(b"p"), False)
    assert shown.push(ids) == "a<|im_end|>b"
    assert "".join(_pieces(BYTES.tk, _ids(b"p"), ids)) == "ab"


@pytest.mark.parametrize("name", ["phi-3", "gpt-2", "llama-spm", "deepseek-coder"])
def test_real_vocabularies_equal_decode(name: str) -> None:
    tk, _ = build_tokenizer(gguf_metadata(testdata.tokenizer(name)))
    rng = random.Random(3)
    size = tk.get_vocab_size()
    checked = 0
    for _ in range(150):
        prompt = [rng.randrange(size) for _ in range(4)]
        output = [rng.randrange(size) for _ in range(12)]
        before = tk.decode(prompt)
        if not before.endswith("\ufffd"):
            checked += 1
            step = rng.randrange(1, 4)
            assert before + "".join(_pieces(tk, prompt, output, step)) == tk.decode(prompt + output)
    assert checked > 50
