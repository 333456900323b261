"""Embeddings: hidden states of a prompt, pooled to one vector.

The device sums rows of final-normed hidden states; which tokens count is the host's choice: all
of them (mean pooling) or the last (last-token pooling). A prompt computed in chunks brings a sum
for each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jaxengine.sched.batch import first_tokens
from jaxengine.sched.plan import Int32, StepPlan
from jaxengine.sched.request import Request

NO_ROW = 2**30


def pool_index(plan: StepPlan, num_tokens: int) -> Int32 | None:
    """[num_tokens] the row that a token counts for, NO_ROW for none; None when no row of the step
    wants a vector. `num_tokens` are the bucket's."""
    rows = [row for row in range(plan.num_decode, plan.num_rows) if _pooling(plan.requests[row])]
    if not rows:
        return None
    index = np.full(num_tokens, NO_ROW, np.int32)
    first = first_tokens(plan)
    for row in rows:
        request, begin, at = plan.requests[row], int(plan.start[row]), int(first[row])
        end = min(begin + int(plan.num_new[row]), request.num_prompt_tokens)
        if _pooling(request) == "mean":
            index[at : at + end - begin] = row
        elif end == request.num_prompt_tokens:
            index[at + end - 1 - begin] = row
    return index


def _pooling(request: Request) -> str | None:
    wire = request.params.wire
    return wire.pooling if request.num_output_tokens == 0 else None


class Pooled:
    """Sums by request over the chunks of its prompt. A prompt that is computed again may be cut
    otherwise: what was there before its new beginning does not count."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, NDArray[np.float32]]] = {}

    def add(self, request: Request, start: int, part: NDArray[np.float32]) -> None:
        """The sum [D] of the step that began at `start`. Steps come in their order."""
        if request.is_finished:
            return
        found = self._parts.setdefault(request.request_id, {})
        for old in [at for at in found if at >= start]:
            del found[old]
        found[start] = part.copy()  # a view would keep the whole step's result

    def take(self, request: Request) -> bytes:
        """The pooled vector as float32 bytes."""
        parts = self._parts.pop(request.request_id)
        if request.params.wire.pooling == "last":
            return parts[max(parts)].tobytes()
        total = np.sum(list(parts.values()), axis=0, dtype=np.float32)
        return np.asarray(total / np.float32(request.num_prompt_tokens), np.float32).tobytes()

    def drop(self, request_id: str) -> None:
        self._parts.pop(request_id, None)

    def __len__(self) -> int:
        """Requests with something here."""
        return len(self._parts)
