"""Tokenizers rebuilt from GGUF against recorded ids (B69, B20)."""

from __future__ import annotations

import json
import pathlib
from functools import lru_cache
from typing import Any

import pytest
from testdata import GOLDENS, find

from jaxengine.models.errors import ModelLoadError, UnsupportedModelError
from jaxengine.text.chat_template import render_messages
from jaxengine.text.gguf_tokenizer import build_tokenizer
from jaxengine.text.tokenizer import Tokenizer, load_tokenizer
from jaxengine.weights.gguf import gguf_metadata
from jaxengine.weights.resolve import ModelFiles, resolve_model

INDEX: list[dict[str, Any]] = json.loads(find("tokenizers", "index.json").read_text())
GENERATIVE = [e for e in INDEX if e["tokenizer.ggml.model"] != "bert"]
# The recording treats these user-defined (never special) tokens as control tokens by their text.
OTHER_KIND = ("<｜fim", "</s> x")


@lru_cache(maxsize=2)
def tokenizer(file: str) -> Tokenizer:
    return load_tokenizer(resolve_model(str(find("tokenizers", file))))


@pytest.mark.parametrize("entry", GENERATIVE, ids=lambda e: e["file"])
def test_recorded_texts(entry: dict[str, Any]) -> None:
    t = tokenizer(entry["file"])
    texts = find("tokenizers", entry["file"] + ".inp").read_bytes().decode()
    lines = find("tokenizers", entry["file"] + ".out").read_text().split("\n")
    rows = list(zip(texts.split("\n__ggml_vocab_test__\n"), lines, strict=True))
    assert len(rows) == 47
    t.tk.encode_special_tokens = True  # the recording reads special tokens as plain text
    wrong = [x for x, line in rows if t.encode(x, False) != [int(i) for i in line.split()]]
    t.tk.encode_special_tokens = False
    assert not wrong


@pytest.mark.parametrize("entry", GENERATIVE, ids=lambda e: e["file"])
def test_recorded_special_tokens(entry: dict[str, Any]) -> None:
    t = tokenizer(entry["file"])
    cases = json.loads(find("tokenizers", entry["file"] + ".extra.json").read_text())["cases"]
    wrong = []
    for case in cases:
        if not case["parse_special"] and case["text"].startswith(OTHER_KIND):
            continue
        t.tk.encode_special_tokens = not case["parse_special"]
        ids = t.tk.encode(case["text"], add_special_tokens=case["add_special"]).ids
        wrong += [case["text"]] if ids != case["ids"] else []
    t.tk.encode_special_tokens = False
    assert len(cases) == entry["extra_cases"] and not wrong


@pytest.mark.parametrize("entry", GENERATIVE, ids=lambda e: e["file"])
def test_special_ids_and_decoding(entry: dict[str, Any]) -> None:
    t = tokenizer(entry["file"])
    assert t.vocab_size == entry["vocab_size"]
    assert (t.bos_id, t.eos_ids[0]) == (entry["bos"], entry["eos"])
    assert set(t.eos_ids) <= set(entry["eog"])
    assert t.add_bos == entry["add_bos_by_default"]
    for text in ("Hello  world", "x = [1, 22, 333]\n\n\ty", "naïve 日本語 😀"):
        assert t.decode(t.encode(text)) == text


def test_bert_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"bert-bge\.gguf: GGUF tokenizer model 'bert'"):
        tokenizer("ggml-vocab-bert-bge.gguf")


def test_sentencepiece_token_text() -> None:
    t = tokenizer("ggml-vocab-phi-3.gguf")
    ids = t.encode("Hello world <0x0A>", add_special_tokens=False)
    assert t.token_text(ids[1]) == " world"
    assert t.token_text(t.tk.token_to_id("▁")) == " "
    assert t.token_text(t.tk.token_to_id("<0x41>")) == "A"


def demo() -> tuple[Tokenizer, dict[str, Any]]:
    path = GOLDENS / "smollm2-135m-instruct-q4_1.json"
    return load_tokenizer(resolve_model("demo")), json.loads(path.read_text(encoding="utf-8"))


def test_demo_tokenization() -> None:
    t, golden = demo()
    rows = golden["tokenization"]
    assert any("\n\n1234" in r["text"] for r in rows)  # where the digit cut matters
    assert [t.encode(r["text"]) for r in rows] == [r["ids"] for r in rows]


def test_b20_demo_chat() -> None:
    t, golden = demo()
    assert t.eos_ids == (2, 0) and t.bos_id == 1 and not t.add_bos
    chats = [c for c in golden["cases"] if "messages" in c]
    assert chats
    for case in chats:
        text = render_messages(
            t.chat_template, case["messages"], bos_token=t.bos_token, eos_token=t.eos_token
        )
        assert text == case["prompt_text"]
        assert t.encode(text, add_special_tokens=False) == case["prompt"]


@pytest.mark.parametrize("flag", [True, False, None])
def test_b20_add_bos_key(flag: bool | None) -> None:
    metadata = gguf_metadata(find("tokenizers", "ggml-vocab-phi-3.gguf"))
    metadata.pop("tokenizer.ggml.add_bos_token", None)
    if flag is not None:
        metadata["tokenizer.ggml.add_bos_token"] = flag
    assert build_tokenizer(metadata)[1] is (flag is not False)


def test_clear_errors(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match="holds no tokenizer"):
        build_tokenizer({})
    base = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'new' is not supported"):
        build_tokenizer({**base, "tokenizer.ggml.pre": "new"})
    with pytest.raises(ModelLoadError, match="no score for each token"):
        build_tokenizer({**base, "tokenizer.ggml.model": "llama"})
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="truncated"):
        load_tokenizer(ModelFiles("gguf", (tmp_path / "x.gguf",), "x"))
