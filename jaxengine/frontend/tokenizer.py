"""Text to token ids and back, from tokenizer.json or from a GGUF file.

Special-token policy (one BOS): a plain text gets what the tokenizer is configured to add, and not a
second BOS if it begins with one; a rendered chat is encoded with `add_special_tokens=False`, since
its template writes the BOS itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from jaxengine.frontend.gguf_tokenizer import build_tokenizer, eos_token_ids
from jaxengine.weights.errors import ModelLoadError, UnsupportedModelError
from jaxengine.weights.gguf import gguf_metadata
from jaxengine.weights.resolve import (
    TOKENIZER_FILES,
    ModelFiles,
    download,
    read_json,
    read_json_if_there,
)

ChatTemplate = str | dict[str, str] | None  # a dict holds named templates ("default", "tool_use")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and what the engine must know of it. `tk` is thread-safe for encode and decode.

    `eos_ids` are all ids that end generation: the tokenizer's eos first, then those of
    generation_config.json. `special_ids` are left out of decoded text.
    """

    tk: tokenizers.Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    vocab_size: int
    chat_template: ChatTemplate
    special_ids: frozenset[int]
    bos_token: str | None
    eos_token: str | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Text of special tokens in `text` becomes their ids, as usual."""
        ids: list[int] = self.tk.encode(text, add_special_tokens=add_special_tokens).ids
        doubled = add_special_tokens and self.add_bos and ids[:2] == [self.bos_id] * 2
        return ids[1:] if doubled else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids outside the vocabulary give nothing."""
        text: str = self.tk.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token with its leading space; "" outside the vocabulary."""
        piece = self.tk.id_to_token(token_id)
        if piece is None:
            return ""
        text: str = self.tk.decode([token_id], skip_special_tokens=False)
        # SentencePiece decoders strip the space that starts a text
        lost = piece.startswith("▁") and not text.startswith(" ") and "▁" not in text
        return " " + text if lost else text


def load_tokenizer(files: ModelFiles, override: str | None = None) -> Tokenizer:
    """The model's tokenizer, or the one at `override`: a folder, tokenizer.json, .gguf or hub id.

    Raises ModelLoadError (a model without tokenizer files can still serve token ids: run it with
    skip_tokenizer_init) and UnsupportedModelError.
    """
    place = files.path
    if override is not None:
        place = Path(override).expanduser()
        if not place.exists():
            place = download(override, None, None, TOKENIZER_FILES)
    if place.is_file() and place.suffix == ".gguf":
        return _from_gguf(place, files.generation_config)
    return _from_folder(place, files.generation_config)


def _from_gguf(path: Path, generation: dict[str, Any]) -> Tokenizer:
    metadata = gguf_metadata(path)
    try:
        tk, add_bos = build_tokenizer(metadata)
    except ModelLoadError as e:
        raise type(e)(f"{path}: {e}") from e
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    eos = eos_token_ids(metadata)
    prefix = "tokenizer.chat_template"
    named = {k[len(prefix) + 1 :]: v for k, v in metadata.items() if k.startswith(prefix + ".")}
    template: ChatTemplate = metadata.get(prefix)
    if named:
        template = {**named, **({"default": template} if isinstance(template, str) else {})}
    _set_ends(
        tk, [bos_id] if add_bos else [], [eos[0]] if _flag(metadata, "add_eos") and eos else []
    )
    return _finish(tk, bos_id, (*eos, *_generation_eos(generation)), template)


def _flag(metadata: dict[str, Any], name: str) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{name}_token", False))


def _from_folder(place: Path, generation: dict[str, Any]) -> Tokenizer:
    path = place if place.is_file() else place / "tokenizer.json"
    folder = path.parent
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            raise UnsupportedModelError(
                f"{folder} has only a SentencePiece tokenizer.model: convert it to tokenizer.json"
            )
        raise ModelLoadError(f"{folder} has no tokenizer.json")
    try:
        tk = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # noqa: BLE001  (the library raises bare Exception)
        raise ModelLoadError(f"{path} cannot be read as a tokenizer: {e}") from e
    tk.no_truncation()  # a length stored with the tokenizer must not cut prompts
    tk.no_padding()
    config = read_json_if_there(folder / "tokenizer_config.json")
    names = {**read_json_if_there(folder / "special_tokens_map.json"), **config}
    bos_id, eos_id = (_special_id(tk, names.get(k)) for k in ("bos_token", "eos_token"))
    _apply_flags(tk, config, bos_id, eos_id)
    generation = generation or read_json_if_there(folder / "generation_config.json")
    eos = [i for i in (eos_id, *_generation_eos(generation)) if i is not None]
    return _finish(tk, bos_id, eos, _folder_template(folder, config))


def _finish(
    tk: tokenizers.Tokenizer, bos_id: int | None, eos: Iterable[int], template: ChatTemplate
) -> Tokenizer:
    ids = tuple(dict.fromkeys(eos))
    added = tk.get_added_tokens_decoder()
    return Tokenizer(
        tk=tk,
        bos_id=bos_id,
        eos_ids=ids,
        add_bos=bos_id is not None and tk.encode("a").ids[:1] == [bos_id],
        vocab_size=tk.get_vocab_size(with_added_tokens=True),
        chat_template=template,
        special_ids=frozenset(i for i, token in added.items() if token.special),
        bos_token=None if bos_id is None else tk.id_to_token(bos_id),
        eos_token=tk.id_to_token(ids[0]) if ids else None,
    )


def _special_id(tk: tokenizers.Tokenizer, token: Any) -> int | None:
    """Id of a special token that a config names by its text or as {"content": text}."""
    text = token.get("content") if isinstance(token, dict) else token
    found: int | None = tk.token_to_id(text) if isinstance(text, str) else None
    return found


def _generation_eos(generation: dict[str, Any]) -> list[int]:
    eos = generation.get("eos_token_id")
    return [eos] if isinstance(eos, int) else list(eos or [])


def _apply_flags(
    tk: tokenizers.Tokenizer, config: dict[str, Any], bos_id: int | None, eos_id: int | None
) -> None:
    """add_bos_token / add_eos_token of tokenizer_config.json win over the stored post-processor."""
    plain, full = tk.encode("a", add_special_tokens=False).ids, tk.encode("a").ids
    at = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    before, after = full[:at], full[at + len(plain) :]
    want_before, want_after = before, after
    for flag, token in (("add_bos_token", bos_id), ("add_eos_token", eos_id)):
        value = config.get(flag)
        if not isinstance(value, bool) or (value and token is None):
            continue
        ends = [token] if value and token is not None else []
        if flag == "add_bos_token":
            want_before = ends
        else:
            want_after = ends
    if (want_before, want_after) != (before, after):
        _set_ends(tk, want_before, want_after)


def _set_ends(
    tk: tokenizers.Tokenizer, before: Sequence[int | None], after: Sequence[int | None]
) -> None:
    """Let the tokenizer put these special tokens around a text."""
    names = [[tk.id_to_token(i) for i in ids if i is not None] for ids in (before, after)]
    texts = [[n for n in part if n is not None] for part in names]
    specials = {n: tk.token_to_id(n) for part in texts for n in part}
    template = [*texts[0], "$A", *texts[1]]
    tk.post_processor = TemplateProcessing(
        single=template, pair=[*template, "$B:1"], special_tokens=list(specials.items())
    )


def _folder_template(folder: Path, config: dict[str, Any]) -> ChatTemplate:
    """chat_template.jinja (and additional_chat_templates/), chat_template.json, or the config's."""
    template = config.get("chat_template")
    stored = folder / "chat_template.json"
    if stored.is_file():
        template = read_json(stored).get("chat_template", template)
    if isinstance(template, list):
        template = {str(t["name"]): str(t["template"]) for t in template}
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        template = jinja.read_text(encoding="utf-8")
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if more:
        first = {"default": template} if isinstance(template, str) else template or {}
        template = {**first, **{p.stem: p.read_text(encoding="utf-8") for p in more}}
    if template is not None and not isinstance(template, str | dict):
        raise ModelLoadError(f"{folder}: chat_template is neither text nor named templates")
    return template
