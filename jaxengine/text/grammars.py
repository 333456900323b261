"""Whether a constraint can be enforced, found out before its request is queued."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from jaxengine.sampling_params import SamplingParams, StructuredOutputsParams
from jaxengine.structured import GrammarError, Spec, Validator, check_structured
from jaxengine.validation import RequestError, shown

MAX_PENDING = 32  # different constraints that may wait for their check


class TooManyGrammarsError(RuntimeError):
    """Too many constraints wait to be checked already; try again later."""


class GrammarChecks:
    """Builds grammars in child processes, which start with the first constraint.

    Equal constraints share one check, and its verdict is kept. `wait` belongs to one event loop;
    `check` may be called from any thread.
    """

    def __init__(self) -> None:
        self._validator: Validator | None = None
        self._waiters: dict[tuple[str, str], int] = {}

    def check(self, spec: Spec) -> None:
        """Block until it is known. Raises RequestError."""
        try:
            self._get().check(spec)
        except GrammarError as error:
            raise RequestError("structured_outputs", str(error)) from None

    async def wait(self, spec: Spec) -> None:
        """As `check`, without blocking the loop. A check that nobody waits for any longer is
        dropped if it has not begun. Raises TooManyGrammarsError too."""
        key = spec.key
        future = self._get().submit(spec)
        if not future.done() and key not in self._waiters and len(self._waiters) >= MAX_PENDING:
            future.cancel()
            raise TooManyGrammarsError(
                f"{len(self._waiters)} constraints wait to be checked already"
            )
        self._waiters[key] = self._waiters.get(key, 0) + 1
        try:
            # shielded: the future is shared, and one client's hang-up must not end it for all
            await asyncio.shield(asyncio.wrap_future(future))
        except GrammarError as error:
            raise RequestError("structured_outputs", str(error)) from None
        finally:
            self._leave(key, future)

    def close(self) -> None:
        """End the child processes."""
        if self._validator is not None:
            self._validator.close()
            self._validator = None

    def _get(self) -> Validator:
        if self._validator is None:
            self._validator = Validator()
        return self._validator

    def _leave(self, key: tuple[str, str], future: Future[str]) -> None:
        self._waiters[key] -= 1
        if not self._waiters[key]:
            del self._waiters[key]
            future.cancel()  # does nothing once it runs or is done


def check_structured_outputs(params: SamplingParams) -> Spec | None:
    """The constraint in canonical form; None without one. Whether its grammar compiles is found
    out elsewhere (`text.grammars`)."""
    field, asked = "structured_outputs", params.structured_outputs
    if asked is None:
        return None
    if not isinstance(asked, StructuredOutputsParams):
        raise RequestError(field, f"{field} must be StructuredOutputsParams, got {shown(asked)}")
    try:
        spec = check_structured(asked)
    except ValueError as error:
        raise RequestError(field, str(error)) from None
    if spec is not None and params.allowed_token_ids is not None:
        # together they can leave no legal token in the middle of a text
        raise RequestError(
            "allowed_token_ids", f"allowed_token_ids cannot be combined with {spec.field}"
        )
    return spec
