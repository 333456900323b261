"""Token ids -> text, a few tokens at a time, never half a character.

The joined pieces equal `decode(prompt + output)` without `decode(prompt)`. Two ways:

- `ByteDetokenizer`: byte-level vocabularies, where a token is a string of bytes. Each id's bytes
  are looked up and fed to Python's incremental UTF-8 decoder: exact, and linear in the tokens.
- `WindowDetokenizer`: every other decoder (Metaspace with byte fallback, WordPiece ...), by
  decoding a short window of ids and taking what is new. It does what tokenizers' DecodeStream
  does, which alone leaks the prompt when that ends inside a character, takes quadratic time over
  bytes that never complete one, and raises where a completed run changes earlier text.

Ids without an entry in the tokenizer have no text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import decoders, pre_tokenizers

REPLACEMENT = "\ufffd"
_LOOK_BACK = 16  # prompt ids that give the first output token its context
_MAX_PENDING = 8  # ids without text after which lone bytes are given out as U+FFFD
_CHARACTER = 3  # most ids of an unfinished UTF-8 character


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Text that these ids complete."""
        ...

    def flush(self) -> str:
        """The end of the output: an unfinished character becomes U+FFFD."""
        ...


class TokenBytes:
    """The bytes of each id of a byte-level vocabulary, filled as ids are met; shared by requests.

    Same as the ByteLevel decoder: a token outside its alphabet (an added one) is its own UTF-8.
    """

    def __init__(self, tk: Any) -> None:
        self._tk = tk
        self._byte_of = _byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        self.special = special_ids(tk)

    def __getitem__(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            text = self._tk.id_to_token(token_id) or ""
            try:
                found = bytes([self._byte_of[c] for c in text])
            except KeyError:
                found = text.encode()
            self._bytes[token_id] = found
        return found


def special_ids(tk: Any) -> frozenset[int]:
    """Ids that skip_special_tokens leaves out."""
    added = tk.get_added_tokens_decoder()
    return frozenset(i for i, token in added.items() if token.special)


def token_bytes(tk: Any) -> TokenBytes | None:
    """The table for `make_detokenizer`, once per tokenizer; None where it is not byte-level."""
    return TokenBytes(tk) if isinstance(tk.decoder, decoders.ByteLevel) else None


def make_detokenizer(
    tk: Any,
    table: TokenBytes | None,
    prompt_token_ids: Sequence[int],
    skip_special_tokens: bool = True,
) -> Detokenizer:
    """A detokenizer that continues the prompt. `table` is `token_bytes(tk)`."""
    if table is not None:
        return ByteDetokenizer(table, prompt_token_ids, skip_special_tokens)
    return WindowDetokenizer(tk, prompt_token_ids, skip_special_tokens)


class ByteDetokenizer:
    def __init__(
        self, table: TokenBytes, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._table = table
        self._skipped = table.special if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._split = False
        self.push(prompt_token_ids[-_LOOK_BACK:])
        # The prompt may end inside a character. Its text already shows U+FFFD for that, so only
        # the whole character, if the output completes it, is output.
        self._split = bool(self._decoder.getstate()[0])

    def push(self, token_ids: Sequence[int]) -> str:
        table, skipped = self._table, self._skipped
        raw = b"".join([table[i] for i in token_ids if i not in skipped])
        return self._first(self._decoder.decode(raw)) if raw else ""

    def flush(self) -> str:
        return self._first(self._decoder.decode(b"", True))

    def _first(self, text: str) -> str:
        if self._split and text:
            self._split = False
            return text.removeprefix(REPLACEMENT)
        return text


class WindowDetokenizer:
    """`_ids[:_read]` is context whose text `_base` was given out; the rest is pending."""

    def __init__(self, tk: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tk = tk
        self._skip = skip_special_tokens
        self._ids, self._read = self._prime(prompt_token_ids)
        self._base = self._decode(self._ids[: self._read])
        # text of the pending ids that the prompt shows already (it ends inside a character)
        self._shown = self._decode(self._ids)[len(self._base) :]

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(i) for i in token_ids])

    def flush(self) -> str:
        if self._read == len(self._ids):
            return ""
        text = self._since_base(self._decode(self._ids))
        self._restart(len(self._ids))
        return text

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) > len(self._base) and not text.endswith(REPLACEMENT):
            new = self._since_base(text)
            self._restart(self._read)
            return new
        if len(self._ids) - self._read > _MAX_PENDING:
            return self._settle(text)
        return ""

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tk.decode(ids, skip_special_tokens=self._skip)
        return text

    def _since_base(self, text: str) -> str:
        if text.startswith(self._base):
            new = text[len(self._base) :]
        else:  # later bytes changed how earlier ones read: what was given out stays
            new = self._decode(self._ids[self._read :])
        if self._shown:
            new, self._shown = new.removeprefix(self._shown), ""
        return new

    def _restart(self, keep_from: int) -> None:
        """All ids are given out: those from `keep_from` on become the context (never an empty
        text: the first word after one would lose its leading space)."""
        kept = self._ids[keep_from:]
        base = self._decode(kept)
        if base:
            self._ids, self._base = kept, base
        else:
            self._base = self._decode(self._ids)
        self._read = len(self._ids)

    def _settle(self, text: str) -> str:
        """Give out pending ids that no later byte can complete, so that time stays linear."""
        if len(text) <= len(self._base):  # ids without text: forget them
            del self._ids[self._read :]
            return ""
        body = text[len(self._base) :]
        for cut in range(len(self._ids) - _CHARACTER, self._read, -1):
            # A cut inside a character shows as text that differs. The id before the cut stays as
            # context, since a bad byte also spoils the bytes that follow it directly.
            left = self._decode(self._ids[:cut])
            context = self._decode(self._ids[cut - 1 : cut])
            right = self._decode(self._ids[cut - 1 :])
            if context and left[len(self._base) :] + right[len(context) :] == body:
                pending = self._ids[cut:]
                self._ids = self._ids[:cut]
                new = self._since_base(left)
                self._restart(cut - 1)
                self._ids += pending
                return new
        return self.flush()

    def _prime(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """The prompt's last ids, and how many of them end in whole characters."""
        start = max(0, len(prompt) - _LOOK_BACK)
        # Begin at whole text: cutting a run of bytes would spoil all of it. Go back past skipped
        # special tokens: an empty context loses the space before the first word.
        while start > 0 and not self._starts_text(prompt, start):
            start -= 1
        window = list(prompt[start:])
        for read in range(len(window), max(0, len(window) - _LOOK_BACK), -1):
            if not self._decode(window[:read]).endswith(REPLACEMENT):
                return window, read
        return window, len(window)

    def _starts_text(self, prompt: Sequence[int], start: int) -> bool:
        first = self._decode([prompt[start]])
        return bool(first) and REPLACEMENT not in first


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level alphabet: printable Latin-1 stands for itself, the
    other bytes, in order, for the characters from U+0100 on."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    own = [b for b in range(256) if chr(b) in alphabet]
    others = [b for b in range(256) if chr(b) not in alphabet]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}
