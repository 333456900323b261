"""Text to token ids and back, from tokenizer.json or from a GGUF file.

Special-token policy (one BOS): a plain text gets what the tokenizer is configured to add, and not a
second BOS if it begins with one; a rendered chat is encoded with `add_special_tokens=False`, since
its template writes the BOS itself.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from jaxengine.models.errors import ModelLoadError, UnsupportedModelError
from jaxengine.models.values import integer, switch
from jaxengine.text.gguf_tokenizer import (
    bos_token_id,
    build_tokenizer,
    eos_token_ids,
    switch_of,
)
from jaxengine.text.stored_templates import ChatTemplate, folder_template, gguf_template
from jaxengine.weights.generation import GENERATION_CONFIG, token_ids
from jaxengine.weights.gguf import gguf_metadata
from jaxengine.weights.resolve import (
    TOKENIZER_FILES,
    ModelFiles,
    download,
    is_gguf,
    read_json_if_there,
)

__all__ = ["ChatTemplate", "Tokenizer", "load_tokenizer"]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and what the engine must know of it. `tk` is thread-safe for encode and decode.

    `eos_ids` are all ids that end generation: the tokenizer's eos first, then those of
    generation_config.json, or where it names none, of config.json. `special_ids` are left out of
    decoded text.
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
        """Token ids. Text of special tokens in `text` becomes their ids, as usual.

        Other threads run meanwhile: of the library's calls the batched ones give up the GIL.
        """
        [made] = self.tk.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = made.ids
        doubled = add_special_tokens and self.add_bos and ids[:2] == [self.bos_id] * 2
        return ids[1:] if doubled else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids outside the vocabulary give nothing. Other threads run meanwhile."""
        [text] = self.tk.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

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
    if place.is_file() and is_gguf(place):
        return _from_gguf(place, files)
    return _from_folder(place, files)


def _from_gguf(path: Path, files: ModelFiles) -> Tokenizer:
    metadata = gguf_metadata(path)
    try:
        tk, add_bos = build_tokenizer(metadata)
        add_eos = switch_of(metadata, "add_eos_token", False)
        bos_id, eos = bos_token_id(metadata, path), eos_token_ids(metadata, path)
        template = gguf_template(metadata)
    except ModelLoadError as e:
        raise type(e)(f"{path}: {e}") from e
    _set_ends(tk, [bos_id] if add_bos else [], eos[:1] if add_eos else [])
    size = _vocab_size(files, tk)
    own = token_ids({"end tokens": list(eos)}, "end tokens", size, path)
    return _finish(tk, bos_id, None, [*own, *_other_ends(files, None, size)], template)


def _from_folder(place: Path, files: ModelFiles) -> Tokenizer:
    path = place if place.is_file() else place / "tokenizer.json"
    folder = path.parent
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            raise UnsupportedModelError(
                f"{folder} has only a SentencePiece tokenizer.model: convert it to tokenizer.json"
            )
        raise ModelLoadError(f"{folder} has no tokenizer.json")
    try:
        tk = tokenizers.Tokenizer.from_buffer(path.read_bytes().removeprefix(BOM_UTF8))
    except Exception as e:  # noqa: BLE001  (the library raises bare Exception)
        raise ModelLoadError(f"{path} cannot be read as a tokenizer: {e}") from e
    tk.no_truncation()  # a length stored with the tokenizer must not cut prompts
    tk.no_padding()
    config = read_json_if_there(folder / "tokenizer_config.json")
    names = {**read_json_if_there(folder / "special_tokens_map.json"), **config}
    bos_id, eos_id = (_special_id(tk, names.get(k)) for k in ("bos_token", "eos_token"))
    _apply_flags(tk, config, bos_id, eos_id, folder)
    size = _vocab_size(files, tk)
    own = token_ids({"eos_token": eos_id}, "eos_token", size, folder)
    ends = [*own, *_other_ends(files, folder, size)]
    return _finish(tk, bos_id, eos_id, ends, folder_template(folder, config))


def _other_ends(files: ModelFiles, folder: Path | None, vocab_size: int) -> list[int]:
    """End tokens of generation_config.json, or where it names none, of config.json: of the model,
    and where it has no such file, of the tokenizer's folder."""
    sources = ((GENERATION_CONFIG, files.generation_config), ("config.json", files.config))
    for name, of_model in sources:
        given, path = of_model or {}, files.path / name
        if not given and folder is not None:
            path = folder / name
            given = read_json_if_there(path)
        for config in (given, _inner(given)):
            if ids := token_ids(config, "eos_token_id", vocab_size, path):
                return ids
    return []


def _inner(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's configuration inside of a larger one's."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def _vocab_size(files: ModelFiles, tk: tokenizers.Tokenizer) -> int:
    """How many tokens the model has logits for, or where that is not known, the tokenizer has."""
    config = files.config or {}
    sizes = (integer(c.get("vocab_size")) for c in (_inner(config), config))
    return next((size for size in sizes if size), tk.get_vocab_size(with_added_tokens=True))


def _finish(
    tk: tokenizers.Tokenizer,
    bos_id: int | None,
    eos_id: int | None,
    eos: Iterable[int],
    template: ChatTemplate,
) -> Tokenizer:
    """`eos_id`: the tokenizer's own; None = the first of all."""
    ids = tuple(dict.fromkeys(eos))
    eos_id = ids[0] if eos_id is None and ids else eos_id
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
        eos_token=None if eos_id is None else tk.id_to_token(eos_id),
    )


def _special_id(tk: tokenizers.Tokenizer, token: Any) -> int | None:
    """Id of a special token that a config names by its text or as {"content": text}."""
    text = token.get("content") if isinstance(token, dict) else token
    found: int | None = tk.token_to_id(text) if isinstance(text, str) else None
    return found


def _apply_flags(
    tk: tokenizers.Tokenizer,
    config: dict[str, Any],
    bos_id: int | None,
    eos_id: int | None,
    folder: Path,
) -> None:
    """add_bos_token / add_eos_token of tokenizer_config.json win over the stored post-processor."""
    plain, full = tk.encode("a", add_special_tokens=False).ids, tk.encode("a").ids
    at = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    before, after = full[:at], full[at + len(plain) :]
    want_before, want_after = before, after
    for flag, token in (("add_bos_token", bos_id), ("add_eos_token", eos_id)):
        if config.get(flag) is None:
            continue
        value = switch(config[flag])
        if value is None:
            raise ModelLoadError(f"{folder}: {flag} must be true or false, not {config[flag]!r}")
        if value and token is None:
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
