"""Random legal walks through a grammar, and a small tokenizer to walk with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from jaxengine.sched.grammar import Grammar
from jaxengine.structured import GrammarCompiler
from jaxengine.structured.matcher import Matcher
from jaxengine.structured.spec import Spec
from jaxengine.text.tokenizer import load_tokenizer
from jaxengine.weights.resolve import resolve_model

PAD = 37  # logits wider than the vocabulary


@dataclass(frozen=True)
class Vocabulary:
    tk: tokenizers.Tokenizer
    size: int
    eos: tuple[int, ...]
    compiler: GrammarCompiler

    @property
    def width(self) -> int:
        return self.size + PAD

    @property
    def words(self) -> int:
        return -(-self.width // 32)

    def encode(self, text: str) -> list[int]:
        return list(self.tk.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.tk.decode(ids, skip_special_tokens=True))


def _vocabulary(tk: tokenizers.Tokenizer, eos: tuple[int, ...]) -> Vocabulary:
    size = tk.get_vocab_size(with_added_tokens=True)
    return Vocabulary(tk, size, eos, GrammarCompiler(tk.to_str(), size + PAD, eos, time_limit=8))


@functools.cache
def byte_vocabulary() -> Vocabulary:
    """A token for each byte, a few merged ones, and two end tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    merges = [('"', ":"), ("t", "r"), ("u", "e"), ("tr", "ue"), ("}", "}"), ("1", "2"), ('"', ",")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tk = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tk.decoder = decoders.ByteLevel()
    tk.add_special_tokens(["<end>", "<turn>", "<pad>"])
    return _vocabulary(tk, (len(vocab), len(vocab) + 1))


@functools.cache
def demo_vocabulary() -> Vocabulary:
    tokenizer = load_tokenizer(resolve_model("demo"))
    return _vocabulary(tokenizer.tk, tokenizer.eos_ids)


VOCABULARIES = {"bytes": byte_vocabulary, "demo": demo_vocabulary}


def ready_matcher(vocabulary: Vocabulary, spec: Spec) -> Matcher:
    vocabulary.compiler.compile(spec).result(timeout=60)
    matcher = vocabulary.compiler.matcher(spec)
    assert matcher.ready
    return matcher


def legal_bits(grammar: Grammar, words: int) -> NDArray[np.bool_]:
    row = np.full(words, -1, np.int32)
    grammar.fill_bitmask(row)
    return np.unpackbits(row.view(np.uint8), bitorder="little").astype(np.bool_)


def legal_ids(grammar: Grammar, words: int) -> list[int]:
    return np.flatnonzero(legal_bits(grammar, words)).tolist()


def walk(
    vocabulary: Vocabulary,
    grammar: Grammar,
    rng: np.random.Generator,
    free_steps: int = 25,
    wish: Sequence[int] = (),
) -> str:
    """The text of a random legal walk to an end token, which is accepted too.

    After `free_steps` tokens it closes what is open. Tokens in `wish` are taken whenever legal.
    """
    closing = [i for text in '"}]:,0n' for i in vocabulary.encode(text)]
    eos = sorted(vocabulary.eos)
    taken: list[int] = []
    for step in range(2000):
        legal = legal_bits(grammar, vocabulary.words)
        assert legal.any(), f"nothing legal after {vocabulary.decode(taken)!r}"
        assert not legal[vocabulary.size :].any()
        wished = [i for i in wish if legal[i]]
        enders = [i for i in eos if legal[i]]
        closers = [i for i in closing if legal[i]]
        if wished:
            token = wished[0]
        elif step >= free_steps and (enders or closers):
            token = (enders or closers)[0]
        elif closers and rng.random() < 0.3:
            token = closers[int(rng.integers(len(closers)))]
        else:
            token = int(rng.choice(np.flatnonzero(legal)))
        if grammar.terminated:
            assert np.flatnonzero(legal).tolist() == eos
        assert grammar.validate([token]) == 1
        assert grammar.accept([token])
        if token in eos:
            return vocabulary.decode(taken)
        taken.append(token)
    raise AssertionError(f"no end after {len(taken)} tokens: {vocabulary.decode(taken)[:300]!r}")
