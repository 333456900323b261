"""Orders to the engines (retry, respawn, drain): checked, carried out beside, and looked up."""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from jaxengine.validation import RequestError
from jaxengine.wire.health import HEALTHY, Board
from jaxengine.wire.messages import FaultToleranceRequest, FaultToleranceResult

INSTRUCTIONS = ("retry", "respawn", "drain")
_KEPT = 256  # orders that can be looked up

Send = Callable[[int, FaultToleranceRequest], Awaitable[FaultToleranceResult]]


@dataclass
class Order:
    """One POST of a controller. `results` has an entry for each rank that has answered."""

    request_id: str
    instruction: str
    ranks: list[int]
    results: dict[int, FaultToleranceResult] = field(default_factory=dict)

    def payload(self) -> dict[str, Any]:
        """The body of GET /fault_tolerance/result/{request_id}."""
        done = len(self.results) == len(self.ranks)
        body: dict[str, Any] = {
            "request_id": self.request_id,
            "instruction": self.instruction,
            "status": "done" if done else "pending",
            "results": [
                {"id": rank, "success": r.success, **({"reason": r.reason} if r.reason else {})}
                for rank, r in sorted(self.results.items())
            ],
        }
        if done:
            body["success"] = all(r.success for r in self.results.values())
        return body


class Orders:
    """`send` has one rank carry out an order. Used by one event loop."""

    def __init__(self, board: Board, send: Send) -> None:
        self._board = board
        self._send = send
        self._orders: OrderedDict[str, Order] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def apply(self, body: Any) -> Order:
        """Check an order and have it carried out in the background. Raises RequestError.

        Without params.rank it goes to every rank that is not healthy (to all when all are, who
        will refuse a retry); drain goes to all.
        """
        instruction, rank, params = check_order(body, list(self._board.ranks))
        ranks = list(self._board.ranks)
        if rank is not None:
            ranks = [rank]
        elif instruction != "drain":
            ill = [r for r, health in self._board.ranks.items() if health.state != HEALTHY]
            ranks = ill or ranks
        order = Order(uuid.uuid4().hex, instruction, ranks)
        self._orders[order.request_id] = order
        while len(self._orders) > _KEPT:
            self._orders.popitem(last=False)
        for target in ranks:
            task = asyncio.create_task(self._carry_out(order, target, params))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return order

    async def _carry_out(self, order: Order, rank: int, params: dict[str, Any]) -> None:
        request = FaultToleranceRequest(order.request_id, order.instruction, params)
        order.results[rank] = await self._send(rank, request)

    def find(self, request_id: str) -> Order | None:
        return self._orders.get(request_id)

    async def close(self) -> None:
        """Wait for nothing any more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_order(body: Any, ranks: list[int]) -> tuple[str, int | None, dict[str, Any]]:
    """(instruction, rank or None, params) of a request's body. Raises RequestError."""
    if not isinstance(body, dict):
        raise RequestError("instruction", "the body must be a JSON object with an instruction")
    instruction, params = body.get("instruction"), body.get("params", {})
    known = ", ".join(INSTRUCTIONS)
    if instruction is None:
        raise RequestError("instruction", f"instruction is missing; known are {known}")
    if instruction not in INSTRUCTIONS:
        raise RequestError("instruction", f"unknown instruction {instruction!r}; known are {known}")
    if not isinstance(params, dict):
        raise RequestError("params", f"params must be an object, got {type(params).__name__}")
    rank = params.get("rank")
    if rank is not None and (type(rank) is not int or rank not in ranks):
        raise RequestError(
            "params", f"params.rank {rank!r} is not served here (ranks {ranks[0]} to {ranks[-1]})"
        )
    rest = {key: value for key, value in params.items() if key != "rank"}
    return str(instruction), rank, rest
