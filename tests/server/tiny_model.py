"""A model that starts in seconds: random weights of three small layers, a token for each byte."""

from __future__ import annotations

import json
import pathlib
import shutil

import tokenizers
from testdata import GOLDENS
from tokenizers import decoders, models, pre_tokenizers

WEIGHTS = GOLDENS / "llama"
SPECIALS = ["<pad>", "<s>", "</s>"]
VOCAB = 320
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    vocab = {piece: i for i, piece in enumerate(SPECIALS)}
    for piece in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[piece] = len(vocab)
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIALS)
    return made


def build(folder: pathlib.Path) -> str:
    """Write the model to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(WEIGHTS / name, folder / name)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def byte_id(char: str) -> int:
    """The token of a one-byte character."""
    [token] = byte_tokenizer().encode(char, add_special_tokens=False).ids
    return int(token)
