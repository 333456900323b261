"""A `tokenizers` tokenizer rebuilt from the vocabulary inside a GGUF file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from jaxengine.models.errors import ModelLoadError, UnsupportedModelError
from jaxengine.models.values import switch
from jaxengine.weights.generation import token_ids

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

# Each regular expression cuts the pieces that the one before left (isolated matches).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_HAN = "[一-龥ࠀ-一가-\ud7ff]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_CASED_TAIL}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_TAIL}"
)
_DIGITS = (r"\p{N}", _GPT2)


@dataclass(frozen=True)
class _Bpe:
    """A byte-level BPE vocabulary: its cuts, and two defaults that the file may leave out."""

    cuts: tuple[str, ...]
    add_bos: bool = False
    ignore_merges: bool = False  # a piece that is a token as a whole is not built from merges


_PRE: dict[str, _Bpe] = {
    "gpt-2": _Bpe((_GPT2,)),
    "phi-2": _Bpe((_GPT2,)),
    "mpt": _Bpe((_GPT2,)),
    "olmo": _Bpe((_GPT2,)),
    "smollm": _Bpe(_DIGITS),
    "starcoder": _Bpe(_DIGITS),
    "refact": _Bpe(_DIGITS),
    "command-r": _Bpe(_DIGITS),
    "codeshell": _Bpe(_DIGITS),
    "llama-bpe": _Bpe((_LLAMA3,), add_bos=True, ignore_merges=True),
    "llama3": _Bpe((_LLAMA3,), add_bos=True, ignore_merges=True),
    "llama-v3": _Bpe((_LLAMA3,), add_bos=True, ignore_merges=True),
    "smaug-bpe": _Bpe((_LLAMA3,)),
    "dbrx": _Bpe((_LLAMA3,)),
    "qwen2": _Bpe((_QWEN2,)),
    "deepseek-r1-qwen": _Bpe((_QWEN2,)),
    "stablelm2": _Bpe((_QWEN2,)),
    "tekken": _Bpe((_TEKKEN,), add_bos=True, ignore_merges=True),
    "gpt-4o": _Bpe((_GPT4O,)),
    "deepseek-coder": _Bpe((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    "deepseek-v3": _Bpe(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "falcon": _Bpe((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "default": _Bpe((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}

# Ends of a turn: a control token with one of these texts ends generation even where the file
# names another eos (chat models are often converted with the base model's).
_END_OF_TURN = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
_GGML, _HERE = "tokenizer.ggml.", "the GGUF file"
_SPECIAL = ("bos", "eos", "eot", "eom", "eog", "unknown", "padding", "mask")
_LOOKS_SPECIAL = re.compile(r"<\|.+\|>|<｜.+｜>")
_USUAL = {"bos": (1, "<s>"), "eos": (2, "</s>")}


def build_tokenizer(metadata: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """(tokenizer without a post-processor, whether it puts bos before a text).

    Raises ModelLoadError when the vocabulary is missing, UnsupportedModelError for a kind of
    tokenizer or pre-tokenizer that is not in the table.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None or not tokens:
        raise ModelLoadError("the GGUF file holds no tokenizer")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, tokens), True
    else:
        raise UnsupportedModelError(f"GGUF tokenizer model {kind!r} is not supported")
    _add_marked_tokens(tokenizer, metadata, tokens)
    return tokenizer, switch_of(metadata, "add_bos_token", add_bos)


def switch_of(metadata: dict[str, Any], name: str, default: bool) -> bool:
    """tokenizer.ggml.NAME, `default` when absent. Raises ModelLoadError naming it."""
    key = _GGML + name
    if metadata.get(key) is None:
        return default
    value = switch(metadata[key])
    if value is None:
        raise ModelLoadError(f"{key} must be true or false, not {metadata[key]!r}")
    return value


def bos_token_id(metadata: dict[str, Any], where: object = _HERE) -> int | None:
    """The id that begins a text, None for none."""
    return next(iter(_ids(metadata, ("bos",), where)), None)


def eos_token_ids(metadata: dict[str, Any], where: object = _HERE) -> tuple[int, ...]:
    """Ids that end generation: eos, end of turn, end of message; the file's own eos first."""
    tokens = metadata.get(_GGML + "tokens") or []
    found = _ids(metadata, ("eos", "eot", "eom", "eog"), where)
    found += [i for i, text in enumerate(tokens) if text in _END_OF_TURN]
    return tuple(dict.fromkeys(found))


def _ids(metadata: dict[str, Any], names: tuple[str, ...], where: object) -> list[int]:
    """Ids under tokenizer.ggml.NAME_token_id (one, or a list) and NAME_token_ids (a list)."""
    tokens = metadata.get(_GGML + "tokens") or []
    found: list[int] = []
    for name in names:
        keys = [f"{_GGML}{name}_token_id", f"{_GGML}{name}_token_ids"]
        found += [i for key in keys for i in token_ids(metadata, key, len(tokens), where)]
        if all(metadata.get(key) is None for key in keys):
            found += _usual(metadata, name, tokens)
    return found


def _usual(metadata: dict[str, Any], name: str, tokens: list[str]) -> list[int]:
    """Where a SentencePiece vocabulary has its first tokens, which need no key."""
    place, text = _USUAL.get(name, (0, ""))
    known = metadata.get(_GGML + "model") == "llama" and tokens[place : place + 1] == [text]
    return [place] if known else []


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre") or "default"
    if pre not in _PRE:
        raise UnsupportedModelError(f"GGUF pre-tokenizer {pre!r} is not supported")
    bpe = _PRE[pre]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = metadata.get("tokenizer.ggml.merges") or []
    try:
        pairs = [tuple(m.split(" ", 1)) for m in merges]
        model = models.BPE(vocab, pairs, ignore_merges=bpe.ignore_merges)
    except Exception:  # noqa: BLE001  (the library's own; another form, or a damaged list)
        pairs = [_merge(m, vocab) for m in merges]
        model = models.BPE(vocab, pairs, ignore_merges=bpe.ignore_merges)
    tokenizer = Tokenizer(model)
    cuts: list[PreTokenizer] = [pre_tokenizers.Split(Regex(c), "isolated") for c in bpe.cuts]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, bpe.add_bos


def _merge(merge: str | list[str], vocab: dict[str, int]) -> tuple[str, str]:
    """A pair, joined by the space at which both sides are tokens: tokens may hold spaces too."""
    if isinstance(merge, list):  # the pair itself
        cuts = [tuple(merge)] if len(merge) == 2 else []
    elif merge.count(" ") == 1:
        cuts = [tuple(merge.split(" "))]
    else:
        cuts = [(merge[:i], merge[i + 1 :]) for i, c in enumerate(merge) if c == " "]
    for left, right in cuts:
        if left in vocab and right in vocab and left + right in vocab:
            return left, right
    raise ModelLoadError(f"tokenizer.ggml.merges has {merge!r}, which joins no two tokens to one")


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelLoadError("the GGUF file's vocabulary has no score for each token")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next(iter(_ids(metadata, ("unknown",), _HERE)), 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges(tokens, scores, vocab),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = switch_of(metadata, "add_space_prefix", True)
    to_mark = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), to_mark]) if space else to_mark
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(tokens: list[str], scores: list[float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best; written as a ranked list of pairs."""
    order = sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges: list[tuple[str, str]] = []
    for i in order:
        text = tokens[i]
        cuts = ((text[:k], text[k:]) for k in range(1, len(text)))
        pairs = [(a, b) for a, b in cuts if a in vocab and b in vocab]
        merges += sorted(pairs, key=lambda p: (vocab[p[0]], vocab[p[1]]))
    return merges


def _add_marked_tokens(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str]) -> None:
    """Control tokens become special; user-defined ones are matched whole but stay in the text."""
    types = _types(metadata, tokens)
    # Phi-3 swallows the white space after its control tokens, which the format cannot express
    swallow = metadata.get("general.architecture") == "phi3"
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for text, kind in zip(tokens, types, strict=True):
        rstrip = swallow and text not in ("<unk>", "<s>", "<|endoftext|>")
        if kind in (_UNKNOWN, _CONTROL):
            special.append(AddedToken(text, special=True, normalized=False, rstrip=rstrip))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(text, normalized=False, rstrip=rstrip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _types(metadata: dict[str, Any], tokens: list[str]) -> list[int]:
    """tokenizer.ggml.token_type, completed: ends of a turn are control tokens whatever the file
    calls them. Without types, so are those that a key names and those that look like it."""
    given = metadata.get(_GGML + "token_type") or []
    types = [*given, *[_NORMAL] * len(tokens)][: len(tokens)]
    named = set() if given else set(_ids(metadata, _SPECIAL, _HERE))
    for i, text in enumerate(tokens):
        if text in _END_OF_TURN or (not given and (i in named or _LOOKS_SPECIAL.fullmatch(text))):
            types[i] = _CONTROL
    return types
