"""Chat templates as files hold them: byte order marks, line ends, lists and mappings."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import gguf
import pytest
from test_tokenizer import BOS, EOS, TEMPLATE, files, write

from jaxengine.models.errors import ModelLoadError
from jaxengine.text.chat_template import render_messages
from jaxengine.text.stored_templates import gguf_template
from jaxengine.text.tokenizer import load_tokenizer
from jaxengine.weights.resolve import resolve_model

MARK = "\ufeff"
LINES = "{% for m in messages %}\n{{ m.content }}\n{% endfor %}\nend\n"
MESSAGES = [{"role": "user", "content": "hi"}]


def rendered(folder: pathlib.Path) -> str:
    return render_messages(load_tokenizer(files(folder)).chat_template, MESSAGES)


@pytest.mark.parametrize("mark", ["", MARK])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_marks_and_line_ends(ends: str, mark: str, tmp_path: pathlib.Path) -> None:
    """The prompt is the same wherever the text lies and whatever editor wrote it."""
    text = mark + LINES.replace("\n", ends)
    write(tmp_path, chat_template=text)
    assert rendered(tmp_path) == "hi\nend"
    write(tmp_path, chat_template=[{"name": "default", "template": text}])
    assert rendered(tmp_path) == "hi\nend"
    write(tmp_path)
    (tmp_path / "chat_template.json").write_bytes(json.dumps({"chat_template": text}).encode())
    assert rendered(tmp_path) == "hi\nend"
    (tmp_path / "chat_template.jinja").write_bytes(text.encode())
    assert rendered(tmp_path) == "hi\nend"
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "rag.jinja").write_bytes(text.encode())
    template = load_tokenizer(files(tmp_path)).chat_template
    assert render_messages(template, MESSAGES, template_name="rag") == "hi\nend"


def test_marks_of_all_files(tmp_path: pathlib.Path) -> None:
    write(tmp_path, chat_template=TEMPLATE)
    (tmp_path / "config.json").write_text('{"vocab_size": 320}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 258}')
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": "</s>"}')
    plain = load_tokenizer(resolve_model(str(tmp_path)))
    for path in tmp_path.glob("*.json"):
        path.write_bytes(MARK.encode() + path.read_bytes())
    t = load_tokenizer(resolve_model(str(tmp_path)))
    assert t.eos_ids == plain.eos_ids == (EOS, 258) and t.bos_id == BOS
    assert t.chat_template == TEMPLATE and t.encode("hi") == plain.encode("hi")


@pytest.mark.parametrize("none", [None, "", [], {}])
def test_no_template(none: Any, tmp_path: pathlib.Path) -> None:
    assert load_tokenizer(files(write(tmp_path, chat_template=none))).chat_template is None


def test_mapping_of_templates(tmp_path: pathlib.Path) -> None:
    named = {"default": MARK + "A", "tool_use": "B"}
    t = load_tokenizer(files(write(tmp_path, chat_template=named)))
    assert t.chat_template == {"default": "A", "tool_use": "B"}


@pytest.mark.parametrize(
    "wrong", [3, ["A"], [{"name": "default"}], {"default": 3}, [{"name": "x", "template": None}]]
)
def test_what_is_no_template(wrong: Any, tmp_path: pathlib.Path) -> None:
    write(tmp_path, chat_template=wrong)
    with pytest.raises(ModelLoadError, match="chat_template is neither text nor named templates"):
        load_tokenizer(files(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("A")  # then it is not asked for
    assert load_tokenizer(files(tmp_path)).chat_template == "A"


def test_template_that_is_no_text(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja cannot be read as text"):
        load_tokenizer(files(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"chat_template\.json holds list instead of a JSON"):
        load_tokenizer(files(tmp_path))


KEY, NAMES = "tokenizer.chat_template", "tokenizer.chat_templates"


def test_gguf_templates() -> None:
    assert gguf_template({}) is None is gguf_template({KEY: ""})
    assert gguf_template({KEY: MARK + "A"}) == "A" == gguf_template({KEY: ["A"]})
    both = {KEY: "A", NAMES: ["rag"], KEY + ".rag": MARK + "B"}
    assert gguf_template(both) == {"default": "A", "rag": "B"}
    assert gguf_template({KEY: ["A", "B"], NAMES: ["default", "rag"]}) == {
        "default": "A",
        "rag": "B",
    }
    assert gguf_template({NAMES: ["rag"], KEY + ".rag": "B"}) == {"rag": "B"}
    for wrong in ({KEY: ["A", "B"]}, {KEY: 3}, {KEY + ".rag": 3}):
        with pytest.raises(ModelLoadError, match=r"^tokenizer\.chat_template.* is neither text"):
            gguf_template(wrong)


def test_gguf_file_with_several_templates(tmp_path: pathlib.Path) -> None:
    """As the writer of the format stores a list of them."""
    w = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(["a", "b"])
    w.add_token_merges([])
    w.add_chat_template(
        [{"name": "default", "template": MARK + LINES}, {"name": "tool_use", "template": "B"}]
    )
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    template = load_tokenizer(resolve_model(str(tmp_path / "v.gguf"))).chat_template
    assert template == {"default": LINES, "tool_use": "B"}
