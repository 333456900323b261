"""Tokenizers from tokenizer.json: special tokens, flags, templates, BOS policy (B20)."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from testdata import GOLDENS
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Tk
from tokenizers.processors import TemplateProcessing

from jaxengine.models.errors import ModelLoadError, UnsupportedModelError
from jaxengine.text.chat_template import render_messages
from jaxengine.text.tokenizer import Tokenizer, load_tokenizer
from jaxengine.weights.resolve import ModelFiles

BOS, EOS, TURN = 256, 257, 258
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<turn>{% endfor %}"


def files(folder: pathlib.Path, **generation: Any) -> ModelFiles:
    return ModelFiles("hf", (folder,), "m", {}, generation)


def write(folder: pathlib.Path, adds_bos: bool = True, **config: Any) -> pathlib.Path:
    """A byte-level tokenizer with <s>, </s>, <turn> as 256, 257, 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tk = Tk(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tk.decoder = decoders.ByteLevel()
    tk.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<turn>")])
    if adds_bos:
        tk.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tk.enable_truncation(5)
    tk.enable_padding(length=8)
    tk.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_round_trip_and_ids(tmp_path: pathlib.Path) -> None:
    t = load_tokenizer(files(write(tmp_path), eos_token_id=[TURN, EOS]))
    assert (t.bos_id, t.eos_ids, t.vocab_size) == (BOS, (EOS, TURN), 259)
    assert t.special_ids == {BOS, EOS, TURN}
    assert (t.bos_token, t.eos_token, t.add_bos) == ("<s>", "</s>", True)
    text = "naïve — 日本語 😀 and more than five tokens"  # stored truncation must not cut it
    ids = t.encode(text)
    assert ids[0] == BOS and t.decode(ids) == text and len(ids) == len(text.encode()) + 1
    assert t.encode("a") == [BOS, *t.encode("a", add_special_tokens=False)]  # nor padding fill it
    assert t.decode([BOS, *ids[1:3], TURN], skip_special_tokens=False) == "<s>na<turn>"
    assert t.token_text(TURN) == "<turn>" and t.token_text(10**6) == ""
    assert t.decode([10**6]) == ""


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("flag", [True, False, None])
def test_b20_add_bos_flag(stored: bool, flag: bool | None, tmp_path: pathlib.Path) -> None:
    config = {} if flag is None else {"add_bos_token": flag}
    t = load_tokenizer(files(write(tmp_path, stored, **config)))
    wants = stored if flag is None else flag
    plain = t.encode("hi", add_special_tokens=False)
    assert BOS not in plain and t.add_bos == wants
    assert t.encode("hi") == ([BOS] if wants else []) + plain
    # a text that begins with the BOS string gets one BOS, not two
    assert t.encode("<s>hi") == [BOS, *plain]
    # a chat: exactly what the template wrote
    messages = [{"role": "user", "content": "hi"}]
    chat = render_messages(TEMPLATE, messages, bos_token=t.bos_token, eos_token=t.eos_token)
    assert t.encode(chat, add_special_tokens=False) == [BOS, *plain, TURN]


def test_add_eos_flag(tmp_path: pathlib.Path) -> None:
    t = load_tokenizer(files(write(tmp_path, add_eos_token=True)))
    assert t.encode("a")[0] == BOS and t.encode("a")[-1] == EOS


@pytest.mark.parametrize("bos", [None, "absent"])
def test_no_bos(bos: str | None, tmp_path: pathlib.Path) -> None:
    t = load_tokenizer(files(write(tmp_path, False, bos_token=bos, add_bos_token=True)))
    assert t.bos_id is None and not t.add_bos and BOS not in t.encode("a")


def test_special_tokens_map_and_generation_file(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 258}')
    t = load_tokenizer(files(tmp_path))
    assert t.bos_id == BOS and t.eos_ids == (EOS, TURN)


def test_chat_template_sources(tmp_path: pathlib.Path) -> None:
    def template(**config: Any) -> Any:
        return load_tokenizer(files(write(tmp_path, **config))).chat_template

    assert template() is None
    assert template(chat_template="A") == "A"
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    assert template(chat_template=named) == {"default": "A", "tool_use": "B"}
    with pytest.raises(ModelLoadError, match="chat_template is neither"):
        template(chat_template=3)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "C"}')
    assert template(chat_template="A") == "C"
    (tmp_path / "chat_template.jinja").write_text("D\n")
    assert template(chat_template="A") == "D\n"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("E")
    assert template() == {"default": "D\n", "rag": "E"}


def test_override(tmp_path: pathlib.Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    write(other)
    for place in (other, other / "tokenizer.json"):
        assert load_tokenizer(files(model), str(place)).bos_id == BOS


def test_clear_errors(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match="has no tokenizer.json"):
        load_tokenizer(files(tmp_path))
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(UnsupportedModelError, match="only a SentencePiece tokenizer.model"):
        load_tokenizer(files(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        load_tokenizer(files(tmp_path))


def test_shared_goldens_have_no_tokenizer() -> None:
    with pytest.raises(ModelLoadError, match="no tokenizer.json"):
        load_tokenizer(files(GOLDENS / "llama"))


def test_frontend_imports_no_jax() -> None:
    code = (
        "import sys; import jaxengine.text.tokenizer, jaxengine.text.chat_template; "
        "import jaxengine.weights.load, jaxengine.models.families; "
        "print([m for m in ('jax', 'jaxlib', 'torch') if m in sys.modules])"
    )
    root = pathlib.Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_is_frozen(tmp_path: pathlib.Path) -> None:
    t: Tokenizer = load_tokenizer(files(write(tmp_path)))
    with pytest.raises(AttributeError):
        t.bos_id = 3  # type: ignore[misc]
