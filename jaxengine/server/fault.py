"""Routes of fault tolerance: the ranks' states, orders to them, what came of an order.

They exist only with --enable-fault-tolerance, and need the API key like all but /health.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from jaxengine.front.async_llm import AsyncLLM
from jaxengine.front.ranks.orders import INSTRUCTIONS
from jaxengine.server.errors import ApiError
from jaxengine.server.openapi import answers
from jaxengine.server.state import state_of

router = APIRouter(prefix="/fault_tolerance")

_ORDER = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "instruction": {"enum": list(INSTRUCTIONS)},
                        "params": {"type": "object", "properties": {"rank": {"type": "integer"}}},
                    },
                    "required": ["instruction"],
                }
            }
        },
    }
}


def _engine(request: Request) -> AsyncLLM:
    """The engine, whatever its ranks' health."""
    engine = state_of(request).engine
    if engine is None:
        raise ApiError(503, "the model is still loading", code="loading")
    return engine


@router.get("/status", responses=answers(503))
async def status(request: Request) -> dict[str, Any]:
    """The state of every rank, and the latest events. Asks no engine."""
    return _engine(request).board.payload()


@router.post(
    "/apply",
    response_model=None,
    status_code=202,
    responses=answers(400, 413, 503),
    openapi_extra=_ORDER,
)
async def apply(request: Request) -> Response:
    """Order `instruction` (retry, respawn, drain) for `params.rank`, or for all ranks that need
    it. Answers at once; /fault_tolerance/result/{request_id} tells what came of it."""
    engine = _engine(request)
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    order = engine.orders.apply(body)
    message = f"{order.instruction} was ordered for ranks {order.ranks}"
    return JSONResponse({"message": message, "request_id": order.request_id}, 202)


@router.get("/result/{request_id}", responses=answers(404, 503))
async def result(request_id: str, request: Request) -> dict[str, Any]:
    """What came of an order, by the id that it was given."""
    order = _engine(request).orders.find(request_id)
    if order is None:
        raise ApiError(404, f"no order {request_id!r} is known", param="request_id")
    return order.payload()
