"""A `tokenizers` tokenizer rebuilt from the vocabulary inside a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from jaxengine.weights.errors import ModelLoadError, UnsupportedModelError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type

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
    return tokenizer, bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))


def eos_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end generation: eos, end of turn, end of message; the file's own eos first."""
    found = [metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom")]
    types = metadata.get("tokenizer.ggml.token_type") or []
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    found += [
        i
        for i, (text, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and text in _END_OF_TURN
    ]
    return tuple(dict.fromkeys(i for i in found if i is not None))


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE:
        raise UnsupportedModelError(f"GGUF pre-tokenizer {pre!r} is not supported")
    bpe = _PRE[pre]
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges") or []]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=bpe.ignore_merges))
    cuts: list[PreTokenizer] = [pre_tokenizers.Split(Regex(c), "isolated") for c in bpe.cuts]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, bpe.add_bos


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelLoadError("the GGUF file's vocabulary has no score for each token")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges(tokens, scores, vocab),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = metadata.get("tokenizer.ggml.add_space_prefix", True)
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
    types = metadata.get("tokenizer.ggml.token_type") or []
    # Phi-3 swallows the white space after its control tokens, which the format cannot express
    swallow = metadata.get("general.architecture") == "phi3"
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for text, kind in zip(tokens, types, strict=False):
        rstrip = swallow and text not in ("<unk>", "<s>", "<|endoftext|>")
        if kind in (_UNKNOWN, _CONTROL):
            special.append(AddedToken(text, special=True, normalized=False, rstrip=rstrip))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(text, normalized=False, rstrip=rstrip))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
