"""Device log-probabilities as wire types."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jaxengine.sched.plan import Int32, StepResult
from jaxengine.sched.request import Request
from jaxengine.wire.messages import TokenLogprobs

Part = tuple[Int32, NDArray[np.float32], Int32]  # ids [n, 1+K], log-probabilities, ranks [n]


def logprobs_of(result: StepResult, row: int, count: int, wanted: int) -> list[TokenLogprobs]:
    """Log-probabilities of the row's first `count` tokens, each with its `wanted` most likely
    alternatives."""
    assert result.logprob_ids is not None and result.logprobs is not None
    assert result.ranks is not None
    ids, values, ranks = result.logprob_ids[row], result.logprobs[row], result.ranks[row]
    if ids.ndim == 1:
        return _entries((ids[None], values[None], np.asarray([ranks])), wanted)[:count]
    return _entries((ids[:count], values[:count], ranks[:count]), wanted)


def _entries(part: Part, wanted: int) -> list[TokenLogprobs]:
    ids, values, ranks = part
    width = 1 + (wanted if wanted >= 0 else ids.shape[1] - 1)
    return [
        TokenLogprobs(*entry)
        for entry in zip(
            ids[:, :width].tolist(), values[:, :width].tolist(), ranks.tolist(), strict=True
        )
    ]


class PromptLogprobs:
    """Collects a prompt's entries over its chunks. A chunk computed again replaces the first."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, TokenLogprobs]] = {}

    def add(self, request: Request, start: int, part: Part) -> None:
        """Entries for prompt positions start + 1 and on. Ignored once nobody will take them: a
        preempted request computes its prompt again behind its first token, and an aborted one
        may still have a step in flight."""
        if request.is_finished or request.num_output_tokens:
            return
        wanted = request.params.wire.params.prompt_logprobs
        found = self._parts.setdefault(request.request_id, {})
        for i, entry in enumerate(_entries(part, wanted)):
            found[start + 1 + i] = entry

    def take(self, request: Request) -> list[TokenLogprobs | None]:
        """The whole list; entry 0 is None (nothing comes before the first token), and so is what
        a prefix hit or an error left uncomputed."""
        found = self._parts.pop(request.request_id, {})
        return [found.get(i) for i in range(request.num_prompt_tokens)]

    def drop(self, request_id: str) -> None:
        self._parts.pop(request_id, None)

    def __len__(self) -> int:
        """Requests with something here."""
        return len(self._parts)
