"""Suffix decoding for the engine: a trie for each request, and one of recent outputs for all."""

from __future__ import annotations

from dataclasses import dataclass

from jaxengine.sched.plan import Int32
from jaxengine.speculate.suffix import NOTHING, CountTrie, Drafts

SHARED_TOKENS = 200_000


@dataclass
class _Own:
    trie: CountTrie
    num_prompt: int  # tokens before the first draft: they are not shared


class SuffixProposer:
    """Drafts from the request's own prompt and output and, with `shared_tokens`, from outputs of
    requests that have ended. Of both, the drafts with the better score are taken.

    Memory is bounded: a request's trie goes with it, and shared outputs lie in two tries of at
    most shared_tokens / 2 tokens, of which the older one is dropped when the newer is full.
    """

    def __init__(
        self,
        *,
        max_tree_depth: int = 24,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        min_match: int = 2,
        shared_tokens: int = SHARED_TOKENS,
    ) -> None:
        """`max_spec_factor`: most drafts for every token of the suffix that was found, 0 = no such
        limit. `shared_tokens` 0 keeps every request to itself. Raises ValueError naming what is
        out of range."""
        if min_match < 1:
            raise ValueError(f"min_match must be at least 1, got {min_match}")
        if not 0 <= min_token_prob <= 1:
            raise ValueError(f"min_token_prob must be from 0 to 1, got {min_token_prob}")
        if max_spec_factor < 0 or shared_tokens < 0:
            raise ValueError("max_spec_factor and shared_tokens must not be negative")
        if max_tree_depth <= min_match:
            raise ValueError(
                f"max_tree_depth must be more than min_match {min_match}, got {max_tree_depth}"
            )
        self._depth = max_tree_depth
        self._factor = max_spec_factor
        self._min_prob = min_token_prob
        self._min_match = min_match
        self._half = shared_tokens // 2
        self._own: dict[str, _Own] = {}
        self._new, self._old = CountTrie(max_tree_depth), CountTrie(max_tree_depth)

    def propose(self, request_id: str, tokens: Int32, k: int) -> list[int]:
        """Up to k tokens to follow `tokens` [n], the request's prompt and output so far."""
        return self.draft(request_id, tokens, k).tokens

    def draft(self, request_id: str, tokens: Int32, k: int) -> Drafts:
        """`propose` with its score."""
        trie = self._update(request_id, tokens)
        if k <= 0:
            return NOTHING
        room = min(k, self._depth - self._min_match)
        best = self._follow(trie, *trie.longest(room), k)
        certain = best.score > k - 1e-9  # cannot be better
        if not certain and (self._new.text or self._old.text):
            recent = trie.text[-self._depth :]
            for shared in (self._new, self._old):
                other = self._follow(shared, *shared.find(recent, room), k)
                if other.score > best.score:
                    best = other
        return best

    def extend(self, request_id: str, tokens: Int32) -> None:
        """Let the request's trie catch up with its tokens [n] without drafting."""
        self._update(request_id, tokens)

    def forget(self, request_id: str) -> None:
        """The request has ended; its output may serve others. Unknown ids are ignored."""
        own = self._own.pop(request_id, None)
        if own is None or not self._half:
            return
        output = own.trie.text[own.num_prompt :][-self._half :]
        if len(self._new.text) + len(output) + 1 > self._half:
            self._old, self._new = self._new, CountTrie(self._depth)
        if output:
            self._new.extend(output)
            self._new.end_text()

    def _update(self, request_id: str, tokens: Int32) -> CountTrie:
        own = self._own.get(request_id)
        if own is None or len(own.trie.text) > len(tokens):
            own = _Own(CountTrie(self._depth), max(0, len(tokens) - 1))
            self._own[request_id] = own
        seen = len(own.trie.text)
        if seen < len(tokens):
            own.trie.extend(tokens[seen:].tolist())
        return own.trie

    def _follow(self, trie: CountTrie, place: object, match: int, k: int) -> Drafts:
        if place is None or match < self._min_match:
            return NOTHING
        limit = min(k, int(self._factor * match)) if self._factor else k
        return trie.follow(place, match, limit, self._min_prob)  # type: ignore[arg-type]
