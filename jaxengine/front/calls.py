"""Calls to engines that wait for their answers, as the clients of engines keep them."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Iterable
from typing import Any

from jaxengine.wire.messages import UtilityResult


def answer_call(calls: dict[int, Future[Any]], result: UtilityResult) -> None:
    """Give the result to whoever waits for it: a RuntimeError when the engine told an error."""
    future = calls.pop(result.call_id, None)
    if future is None or future.done():
        return
    if result.error is None:
        future.set_result(result.result)
    else:
        future.set_exception(RuntimeError(result.error))


def fail_all(waiting: Iterable[Future[Any]], error: Exception) -> None:
    """End with `error` what has not ended."""
    for future in waiting:
        if not future.done():
            future.set_exception(error)
