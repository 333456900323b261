"""End tokens, from wherever a model names them, in every legal form."""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

import gguf
import pytest
from test_tokenizer import BOS, EOS, TURN, write

from jaxengine.models.errors import ModelLoadError
from jaxengine.text.gguf_tokenizer import build_tokenizer, eos_token_ids
from jaxengine.text.tokenizer import Tokenizer, load_tokenizer
from jaxengine.weights.generation import warn_once
from jaxengine.weights.resolve import resolve_model

OTHER = 97  # a plain token


@pytest.fixture(autouse=True)
def tell_again() -> None:
    """Warnings are given once in a process."""
    warn_once.cache_clear()


def model(
    folder: pathlib.Path,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    **tokenizer: Any,
) -> Tokenizer:
    """The tokenizer of a folder with these files (None: no file)."""
    write(folder, **tokenizer)
    config = {"model_type": "llama", "vocab_size": 320, **(config or {})}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_tokenizer(resolve_model(str(folder)))


NONE: list[Any] = [None, [], -1, [None], [-1], {}]
FORMS = [
    (TURN, (TURN,)),
    ([TURN], (TURN,)),
    ([TURN, OTHER], (TURN, OTHER)),
    ([TURN, TURN, OTHER], (TURN, OTHER)),
    (float(TURN), (TURN,)),
    ([None, TURN, -1], (TURN,)),
    (str(TURN), (TURN,)),
]


@pytest.mark.parametrize(("form", "ids"), FORMS, ids=str)
@pytest.mark.parametrize("eos", ["</s>", None])
def test_config_alone_names_them(
    eos: str | None, form: Any, ids: tuple[int, ...], tmp_path: pathlib.Path
) -> None:
    own = () if eos is None else (EOS,)
    t = model(tmp_path, {"eos_token_id": form}, eos_token=eos)
    assert t.eos_ids == (*own, *ids)
    assert t.eos_token == (eos or "<turn>")
    inner = {"text_config": {"eos_token_id": form}}
    assert model(tmp_path, inner, eos_token=eos).eos_ids == (*own, *ids)
    assert model(tmp_path, {"eos_token_id": None, **inner}, eos_token=eos).eos_ids == (*own, *ids)


@pytest.mark.parametrize(("form", "ids"), FORMS, ids=str)
def test_generation_config_wins_over_config(
    form: Any, ids: tuple[int, ...], tmp_path: pathlib.Path
) -> None:
    t = model(tmp_path, {"eos_token_id": BOS}, {"eos_token_id": form})
    assert t.eos_ids == (EOS, *ids)


@pytest.mark.parametrize("none", NONE, ids=str)
def test_generation_config_that_names_none(none: Any, tmp_path: pathlib.Path) -> None:
    if none != {}:
        t = model(tmp_path, {"eos_token_id": [TURN]}, {"eos_token_id": none, "top_k": 5})
        assert t.eos_ids == (EOS, TURN)
        assert model(tmp_path, {"eos_token_id": none}).eos_ids == (EOS,)
    assert model(tmp_path, {"eos_token_id": TURN}, {}).eos_ids == (EOS, TURN)
    assert model(tmp_path, {"eos_token_id": TURN}, {"top_k": 5}).eos_ids == (EOS, TURN)


def test_nobody_names_one(tmp_path: pathlib.Path) -> None:
    t = model(tmp_path, eos_token=None)
    assert t.eos_ids == () and t.eos_token is None


@pytest.mark.parametrize("wrong", [True, False, "</s>", 2.5, {"id": 2}, [[TURN]]], ids=str)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_what_is_no_id_is_told_of(
    file: str, wrong: Any, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"eos_token_id": [wrong, TURN]}
    with caplog.at_level(logging.WARNING):
        t = model(tmp_path, given) if file == "config.json" else model(tmp_path, None, given)
    assert t.eos_ids == (EOS, TURN)
    shown = repr(wrong)
    assert f"{tmp_path / file}: eos_token_id holds {shown}, which is no token id" in caplog.text
    assert len(caplog.records) == 1  # though the files are read again
    load_tokenizer(resolve_model(str(tmp_path)))
    assert len(caplog.records) == 1


def test_beyond_the_vocabulary(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Between the tokenizer's size and the model's an id has logits; from there on it has none."""
    with caplog.at_level(logging.WARNING):
        t = model(tmp_path, {"eos_token_id": BOS}, {"eos_token_id": [319, 320, TURN]})
    assert t.eos_ids == (EOS, 319, TURN)
    where = tmp_path / "generation_config.json"
    said = f"{where}: eos_token_id holds 320, which is not in the vocabulary of 320, and is ignored"
    assert [r.getMessage() for r in caplog.records] == [said]
    assert model(tmp_path, {"eos_token_id": TURN}, {"eos_token_id": 999}).eos_ids == (EOS, TURN)
    # a tokenizer for a larger model: its own end has no logits, but is still a text of templates
    t = model(tmp_path, {"vocab_size": EOS, "eos_token_id": 5})
    assert t.eos_ids == (5,) and t.eos_token == "</s>"
    text = {"text_config": {"vocab_size": 320}, "vocab_size": None}
    assert model(tmp_path, {**text, "eos_token_id": 319}).eos_ids == (EOS, 319)


def test_flags_of_the_tokenizer(tmp_path: pathlib.Path) -> None:
    assert model(tmp_path, add_bos_token=None).add_bos
    assert not model(tmp_path, add_bos_token=0).add_bos
    assert model(tmp_path, add_eos_token=1).encode("a")[-1] == EOS
    with pytest.raises(ModelLoadError, match="add_bos_token must be true or false, not 'false'"):
        model(tmp_path, add_bos_token="false")


# GGUF

G = "tokenizer.ggml."
TOKENS = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|eom|>", "a", "b", "ab"]
BASE: dict[str, Any] = {
    G + "model": "gpt2",
    G + "pre": "gpt-2",
    G + "tokens": TOKENS,
    G + "token_type": [2, 3, 3, 1, 3, 1, 1, 1],
    G + "merges": ["a b"],
}


def ends(**keys: Any) -> tuple[int, ...]:
    return eos_token_ids({**BASE, **{G + k: v for k, v in keys.items()}})


def test_gguf_ends() -> None:
    assert ends() == (3,)  # an end of a turn by its text, whatever type the file gives it
    assert ends(eos_token_id=2) == ends(eos_token_id=2.0) == ends(eos_token_id=[2]) == (2, 3)
    assert ends(eos_token_id=2, eot_token_id=4, eom_token_id=5) == (2, 4, 5, 3)
    assert ends(eos_token_id=2, eos_token_ids=[2, 4, 4]) == (2, 4, 3)  # ollama's
    assert ends(eos_token_ids=[4]) == ends(eog_token_ids=[4]) == ends(eot_token_id=4) == (4, 3)
    for none in (-1, 2**32 - 1, 2**64 - 1, None, []):
        assert ends(eos_token_id=none, eot_token_id=none, eos_token_ids=none) == (3,)


def test_gguf_beyond_the_vocabulary(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert ends(eos_token_id=8, eot_token_id=2) == (2, 3)
    assert "tokenizer.ggml.eos_token_id holds 8, which is not in the vocabulary of 8" in caplog.text


def gguf_file(path: pathlib.Path, **keys: Any) -> Tokenizer:
    """A vocabulary alone; a number is written as the type that it names in a pair."""
    w = gguf.GGUFWriter(path, "llama")
    for key, value in {**BASE, **{G + k: v for k, v in keys.items()}}.items():
        if isinstance(value, list):
            w.add_array(key, value)
        elif isinstance(value, tuple):
            w.add_key_value(key, *value)
        else:
            w.add_string(key, value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    return load_tokenizer(resolve_model(str(path)))


T = gguf.GGUFValueType


@pytest.mark.parametrize("kind", [T.INT32, T.UINT64, T.INT8, T.FLOAT32], ids=lambda t: t.name)
def test_gguf_ids_of_every_type(kind: T, tmp_path: pathlib.Path) -> None:
    keys = {"bos_token_id": (1, kind), "eos_token_id": (2, kind)}
    t = gguf_file(tmp_path / "v.gguf", **keys)
    assert (t.bos_id, t.eos_ids, t.bos_token, t.eos_token) == (1, (2, 3), "<s>", "</s>")


@pytest.mark.parametrize("kind", [T.UINT8, T.INT32, T.BOOL, T.FLOAT32], ids=lambda t: t.name)
def test_gguf_switches_of_every_type(kind: T, tmp_path: pathlib.Path) -> None:
    ids = {"bos_token_id": (1, T.UINT32), "eos_token_id": (2, T.UINT32)}
    on, off = (True, False) if kind is T.BOOL else (1, 0)
    t = gguf_file(tmp_path / "on.gguf", add_bos_token=(on, kind), add_eos_token=(on, kind), **ids)
    assert t.encode("a") == [1, 5, 2] and t.add_bos
    t = gguf_file(
        tmp_path / "off.gguf", add_bos_token=(off, kind), add_eos_token=(off, kind), **ids
    )
    assert t.encode("a") == [5] and not t.add_bos
    with pytest.raises(ModelLoadError, match="add_bos_token must be true or false, not 'false'"):
        gguf_file(tmp_path / "bad.gguf", add_bos_token="false", **ids)


def test_gguf_no_bos(tmp_path: pathlib.Path) -> None:
    for value in ((-1, T.INT32), (2**32 - 1, T.UINT32)):
        t = gguf_file(tmp_path / "v.gguf", bos_token_id=value, add_bos_token=(True, T.BOOL))
        assert t.bos_id is None and t.bos_token is None and not t.add_bos
        assert t.encode("a") == [5]


def test_gguf_ignores_the_files_of_its_neighbours(tmp_path: pathlib.Path) -> None:
    """A .gguf file in a folder of another model is complete in itself."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text('{"eos_token_id": 5}')
    assert gguf_file(tmp_path / "v.gguf", eos_token_id=(2, T.UINT32)).eos_ids == (2, 3)


def test_gguf_without_token_types() -> None:
    keys = {G + "bos_token_id": 1, G + "eos_token_id": 2, G + "unknown_token_id": 0}
    metadata = {k: v for k, v in {**BASE, **keys}.items() if k != G + "token_type"}
    tk, _ = build_tokenizer(metadata)
    special = {i for i, token in tk.get_added_tokens_decoder().items() if token.special}
    assert special == {0, 1, 2, 3, 4}  # named by a key, or <|so|>
    assert tk.encode("ab<|im_end|><s>").ids == [7, 3, 1]
    assert eos_token_ids(metadata) == (2, 3)
    short, _ = build_tokenizer({**BASE, G + "token_type": [2, 3]})
    assert short.encode("ab<s>").ids == [7, 1]


def test_gguf_sentencepiece_defaults() -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a"]
    spm = {
        G + "model": "llama",
        G + "tokens": tokens,
        G + "scores": [0.0, 0.0, 0.0, -1.0, -2.0, -0.5],
        G + "token_type": [2, 3, 3, 1, 1, 1],
    }
    assert eos_token_ids(spm) == (2,)
    assert eos_token_ids({**spm, G + "eos_token_id": -1}) == ()
    assert eos_token_ids({**spm, G + "tokens": ["<unk>", "x", "y", *tokens[3:]]}) == ()
    tk, add_bos = build_tokenizer({**spm, G + "unknown_token_id": -1, G + "add_space_prefix": 1})
    assert add_bos and tk.encode("a").ids == [5]
    tk, _ = build_tokenizer({**spm, G + "add_space_prefix": 0})
    assert tk.encode("a").ids == [4]


def test_gguf_merges() -> None:
    base = {**BASE, G + "tokens": ["a", "b", " ", "a ", "a b", "ab", " b"], G + "token_type": []}
    tk, _ = build_tokenizer({**base, G + "merges": ["a  ", "a  b"]})  # tokens that hold spaces
    assert tk.model.token_to_id("a b") == 4
    assert build_tokenizer({**base, G + "merges": [["a", "b"]]})[0].encode("ab").ids == [5]
    assert build_tokenizer({**base, G + "pre": ""})[0].encode("ab").ids == [5]
    no_pre = {k: v for k, v in base.items() if k != G + "pre"}
    assert build_tokenizer({**no_pre, G + "merges": ["a b"]})[0].encode("ab").ids == [5]
    for wrong in ("a", "a z", "b a", ["a"]):
        with pytest.raises(ModelLoadError, match=r"tokenizer.ggml.merges has .* joins no two"):
            build_tokenizer({**base, G + "merges": [wrong]})
