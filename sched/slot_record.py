"""What the device keeps for one slot beside KV: token history, logit edits, bad words, allow mask.

Written once, when a request that needs any of it gets its slot (`pack_slot`); the step then only
reads it. Fixed sizes, so that no request brings a new shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxengine.sched.plan import Int32

MAX_EDITS = 512  # logit edits of one request: bias entries, banned and stop tokens
MAX_BAD_WORDS = 64  # multi-token bad words of one request
MAX_BAD_WORD_LEN = 16  # tokens of a bad word

# Kinds of logit edit (the sampler's numbers).
EDIT_NONE, EDIT_ADD, EDIT_BAN, EDIT_MIN_TOKENS = 0, 1, 2, 4


@dataclass(frozen=True)
class SlotShape:
    """R slots of H history entries, V vocabulary."""

    num_slots: int
    max_model_len: int
    vocab_size: int

    def fields(self) -> dict[str, tuple[int, ...]]:
        """One slot's record, by field."""
        return {
            "history": (self.max_model_len,),
            "edit_token": (MAX_EDITS,),
            "edit_kind": (MAX_EDITS,),
            "edit_value": (MAX_EDITS,),  # float bits
            "bad_prefix": (MAX_BAD_WORDS, MAX_BAD_WORD_LEN - 1),  # left-aligned, -1 padded
            "bad_last": (MAX_BAD_WORDS,),  # -1 unused
            "allow_mask": (-(-self.vocab_size // 32),),  # bit v % 32 of word v // 32
        }

    @property
    def blob_size(self) -> int:
        return 1 + sum(int(np.prod(dims)) for dims in self.fields().values())


def pack_slot(
    shape: SlotShape,
    slot: int,
    history: Int32,
    edits: Sequence[tuple[int, int, float]] = (),
    bad_words: Sequence[Sequence[int]] = (),
    allowed: Sequence[int] | None = None,
) -> Int32:
    """One slot's record as a blob: [slot, fields...].

    edits are (token, kind, value), at most MAX_EDITS; bad words have 2 to MAX_BAD_WORD_LEN
    tokens, at most MAX_BAD_WORDS of them.
    """
    parts = {name: np.zeros(dims, np.int32) for name, dims in shape.fields().items()}
    parts["history"][: len(history)] = history
    if edits:
        tokens, kinds, values = zip(*edits, strict=True)
        parts["edit_token"][: len(edits)] = tokens
        parts["edit_kind"][: len(edits)] = kinds
        parts["edit_value"][: len(edits)] = np.asarray(values, np.float32).view(np.int32)
    parts["bad_prefix"][:] = -1
    parts["bad_last"][:] = -1
    for i, word in enumerate(bad_words):
        parts["bad_prefix"][i, : len(word) - 1] = word[:-1]
        parts["bad_last"][i] = word[-1]
    if allowed is not None:
        bits = np.zeros(parts["allow_mask"].size * 32, bool)
        bits[list(allowed)] = True
        parts["allow_mask"][:] = np.packbits(bits, bitorder="little").view(np.int32)
    flat = [part.reshape(-1) for part in parts.values()]
    return np.concatenate([np.asarray([slot], np.int32), *flat])
