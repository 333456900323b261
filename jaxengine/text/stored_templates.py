"""Chat templates as the files of a model hold them: one text, or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxengine.models.errors import ModelLoadError
from jaxengine.weights.resolve import read_json, read_text

ChatTemplate = str | dict[str, str] | None  # a dict holds named templates ("default", "tool_use")

_KEY, _NAMES = "tokenizer.chat_template", "tokenizer.chat_templates"
_MARK = "\ufeff"  # byte order mark: no part of a prompt


def folder_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate:
    """chat_template.jinja (and additional_chat_templates/), chat_template.json, or the config's."""
    template = config.get("chat_template")
    stored = folder / "chat_template.json"
    if stored.is_file():
        template = read_json(stored).get("chat_template", template)
    jinja = folder / "chat_template.jinja"
    found: ChatTemplate = read_text(jinja) if jinja.is_file() else None
    if found is None:
        found = _checked(template, f"{folder}: chat_template")
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return _joined(found, {p.stem: read_text(p) for p in more})


def gguf_template(metadata: Mapping[str, Any]) -> ChatTemplate:
    """tokenizer.chat_template, and tokenizer.chat_template.NAME for further ones."""
    template, names = metadata.get(_KEY), metadata.get(_NAMES)
    if isinstance(template, list) and isinstance(names, list) and len(names) == len(template):
        template = dict(zip(map(str, names), template, strict=True))
    elif isinstance(template, list) and len(template) == 1:
        [template] = template
    prefix = _KEY + "."
    named = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    more = _checked(named, prefix + "NAME")
    return _joined(_checked(template, _KEY), more if isinstance(more, dict) else {})


def _checked(template: Any, where: str) -> ChatTemplate:
    """A text, a mapping of texts, or a list of {"name", "template"}; what is empty is none."""
    if isinstance(template, list) and all(isinstance(t, dict) for t in template):
        template = {str(t.get("name")): t.get("template") for t in template}
    if not template:
        return None
    if isinstance(template, str):
        return template.removeprefix(_MARK)
    if not isinstance(template, dict) or not all(isinstance(t, str) for t in template.values()):
        raise ModelLoadError(f"{where} is neither text nor named templates")
    return {name: text.removeprefix(_MARK) for name, text in template.items()}


def _joined(template: ChatTemplate, more: dict[str, str]) -> ChatTemplate:
    if not more:
        return template
    first = {"default": template} if isinstance(template, str) else template or {}
    return {**first, **more}
