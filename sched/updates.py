"""What `Scheduler.update` tells its caller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxengine.sched.plan import Int32
from jaxengine.sched.request import Request, RequestStatus


class Finish(NamedTuple):
    """How a request ended. finish_reason: stop | length | abort | error."""

    status: RequestStatus
    finish_reason: str
    stop_reason: int | None = None


LENGTH = Finish(RequestStatus.FINISHED_LENGTH, "length")
ABORTED = Finish(RequestStatus.FINISHED_ABORTED, "abort")
ERROR = Finish(RequestStatus.FINISHED_ERROR, "error")


def finish_of(request: Request, last_token: int) -> Finish:
    """Why a request stops at this token: EOS, then stop ids, then length.

    A stop id before min_tokens is the sampler's to prevent; one that slips through does stop.
    """
    if last_token in request.eos_token_ids:
        return Finish(RequestStatus.FINISHED_STOPPED, "stop")
    if last_token in request.stop_token_ids:
        return Finish(RequestStatus.FINISHED_STOPPED, "stop", last_token)
    return LENGTH


def cut_at_stop(request: Request, token_ids: Sequence[int]) -> tuple[list[int], Finish | None]:
    """The tokens to keep of a request without a slot, and its end if it ends with them."""
    kept: list[int] = []
    room = request.stop_length - request.num_tokens
    for token in token_ids:
        if len(kept) >= room:
            break
        kept.append(token)
        if token in request.eos_token_ids or token in request.stop_token_ids:
            return kept, finish_of(request, token)
    return kept, LENGTH if len(kept) >= room else None


@dataclass(frozen=True)
class RequestUpdate:
    """What one step brought for one request."""

    request: Request
    row: int  # of the plan
    new_token_ids: list[int]
    first: int  # index of new_token_ids[0] among the request's output tokens
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class UpdateBatch:
    """What one step brought: R requests that got tokens or ended, in row order.

    The arrays serve callers that treat all rows at once; iterating gives a `RequestUpdate` each.
    """

    rows: Int32  # [R] row of the plan
    requests: list[Request]  # [R]
    token_ids: Int32  # [R, M]
    num_new: Int32  # [R] tokens kept of each row of token_ids
    first: Int32  # [R] output tokens the request had before
    finished: dict[int, Finish]  # by row of the plan

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[RequestUpdate]:
        columns = zip(
            self.requests,
            self.rows.tolist(),
            self.token_ids.tolist(),
            self.num_new.tolist(),
            self.first.tolist(),
            strict=True,
        )
        for request, row, ids, count, first in columns:
            end = self.finished.get(row)
            yield RequestUpdate(
                request,
                row,
                ids[:count],
                first,
                end.finish_reason if end else None,
                end.stop_reason if end else None,
            )
