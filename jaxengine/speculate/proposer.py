"""What the engine asks of a drafter on the host."""

from __future__ import annotations

from typing import Protocol

from jaxengine.sched.plan import Int32
from jaxengine.speculate.config import SpeculativeConfig
from jaxengine.speculate.ngram import NgramProposer


class Proposer(Protocol):
    """Drafts are certain guesses (a point mass): a drafter gives tokens, not probabilities."""

    def propose(self, request_id: str, tokens: Int32, k: int) -> list[int]:
        """Up to k tokens to follow `tokens` [n] (prompt and output, valid during the call).
        Tokens of a request only ever grow."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended. Unknown ids are ignored."""
        ...


def make_proposer(config: SpeculativeConfig) -> Proposer:
    """The drafter of the method."""
    if config.method == "suffix":
        from jaxengine.speculate.suffix_proposer import SHARED_TOKENS, SuffixProposer

        return SuffixProposer(
            max_tree_depth=config.suffix.max_tree_depth,
            max_spec_factor=config.suffix.max_spec_factor,
            min_token_prob=config.suffix.min_token_prob,
            shared_tokens=SHARED_TOKENS if config.suffix.shares else 0,
        )
    return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
