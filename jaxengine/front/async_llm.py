"""The asynchronous face: requests in, streams of `RequestOutput` out, engine processes behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jaxengine.config import EngineConfig
from jaxengine.front.admission import (
    OverloadedError,
    ShuttingDownError,
    UnavailableError,
    WaitingRoom,
)
from jaxengine.front.client import EngineDeadError, EngineStartError
from jaxengine.front.model_files import load_front, off_loop, request_size, served_name
from jaxengine.front.ranks.balancer import ANYWHERE, Placement
from jaxengine.front.ranks.group import EngineGroup
from jaxengine.front.ranks.orders import Orders
from jaxengine.front.stream import Kind, RequestStream
from jaxengine.front.streams import InFlight
from jaxengine.metrics.prometheus import Metrics
from jaxengine.sampling_params import SamplingParams
from jaxengine.settings.pooling import pooling_settings
from jaxengine.settings.ranks import local_ranks
from jaxengine.text.grammars import TooManyGrammarsError
from jaxengine.text.output_processor import OutputProcessor
from jaxengine.text.outputs import EmbeddingOutput, RequestOutput
from jaxengine.text.pooling import check_pooling, embedding_of, pooling_params
from jaxengine.text.processor import InputProcessor, Prompt
from jaxengine.validation import Limits
from jaxengine.wire import frames as wire
from jaxengine.wire.health import Board
from jaxengine.wire.messages import EngineOutputs, EngineReady, EngineStats

if TYPE_CHECKING:
    from jaxengine.front.hub.remote import RemoteGroup
    from jaxengine.text.tokenizer import ChatTemplate, Tokenizer

log = logging.getLogger(__name__)

_CHUNK = 128  # outputs processed before other tasks get the event loop

__all__ = [
    "AsyncLLM",
    "EngineDeadError",
    "EngineStartError",
    "Kind",
    "OverloadedError",
    "Placement",
    "RequestStream",
    "ShuttingDownError",
    "UnavailableError",
    "off_loop",
    "served_name",
]

MakeGroup = Callable[["AsyncLLM"], "RemoteGroup"]
PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")


class AsyncLLM:
    """`engine = await AsyncLLM.start(EngineConfig.of(model="demo"))`, then `generate`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        core: str = wire.DEFAULT_CORE,
        skip_tokenizer_init: bool = False,
        group: MakeGroup | None = None,
    ) -> None:
        """`group` makes what stands for the engines: those of another process, say."""
        self.config = config
        self.ready = EngineReady()
        self.stats = EngineStats()
        self.tokenizer: Tokenizer | None = None
        self.default_params = SamplingParams()
        self.chat_template: ChatTemplate = None
        length = config.model.max_model_len or 131072
        self.metrics = Metrics(served_name(config), length, local_ranks(config.data_parallel))
        self._skip_tokenizer = skip_tokenizer_init
        self._group: EngineGroup | RemoteGroup
        self._group = group(self) if group else EngineGroup(config, self.metrics.health, core)
        self.orders = Orders(self._group.board, self._group.order)
        self._waiting = WaitingRoom(config.scheduler)
        self._new_stats = asyncio.Event()
        self._fresh: set[int] = set()  # ranks that sent stats since they were last looked at
        self._dead: EngineDeadError | None = None
        self._death = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._processor: InputProcessor
        self._in_flight: InFlight | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig | None = None,
        *,
        core: str = wire.DEFAULT_CORE,
        skip_tokenizer_init: bool = False,
    ) -> AsyncLLM:
        """Start the engine processes and load the tokenizer beside.

        Raises EngineStartError, or ValueError for a model or tokenizer that cannot be read.
        """
        engine = cls(config or EngineConfig(), core=core, skip_tokenizer_init=skip_tokenizer_init)
        await engine.launch()
        return engine

    async def launch(self) -> None:
        """What `start` does; for a caller that wants the object first."""
        starting = asyncio.ensure_future(self._group.start())
        loading = asyncio.ensure_future(
            asyncio.to_thread(load_front, self.config, self._skip_tokenizer)
        )
        try:
            # the first failure is the cause to show; both name the file when a file is missing
            front, self.ready = await asyncio.gather(loading, starting)
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, loading, return_exceptions=True)
            await self._group.close(grace=0)
            raise
        self.tokenizer, self.chat_template = front.tokenizer, front.chat_template
        limits = Limits(
            max_model_len=self.ready.max_model_len,
            vocab_size=self.ready.vocab_size,
            max_logprobs=self.config.model.max_logprobs,
        )
        self._processor = InputProcessor(
            self.tokenizer,
            limits,
            front.sampling_defaults,
            self.config.server.reasoning_parser,
            takes_priorities=self.config.scheduler.scheduling_policy == "priority",
        )
        self.default_params = self._processor.default_params
        outputs = OutputProcessor(self.tokenizer, self.config.server.stream_interval)
        self._in_flight = InFlight(self._group.placer, outputs, self.metrics, self._waiting)
        self._task = asyncio.create_task(self._run(self._in_flight), name="jaxengine-outputs")

    # -- requests ------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        return self._processor.limits

    @property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return self._processor.longest_token

    async def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        kind: Kind = "cumulative",
        priority: int = 0,
        cache_salt: str | None = None,
        placement: Placement = ANYWHERE,
        pooling: str | None = None,
    ) -> RequestStream:
        """Check, tokenize and admit one request; its outputs come from the returned stream.

        Raises RequestError (bad input), OverloadedError, UnavailableError, ShuttingDownError,
        EngineDeadError.
        """
        in_flight = self.check()
        self._group.placer.check(placement)
        arrival = time.time()
        clock = time.monotonic()
        request_id = request_id or uuid.uuid4().hex
        internal_id = f"{request_id}-{uuid.uuid4().hex[:8]}"  # users may reuse their ids
        count = params.n if params is not None else 1
        try:
            processed = await off_loop(
                request_size(prompt, params),
                lambda: self._processor.process(
                    internal_id,
                    prompt,
                    params,
                    priority=priority,
                    cache_salt=cache_salt,
                    arrival_time=arrival,
                    check_grammar=False,
                    pooling=pooling,
                ),
            )
            if processed.grammar is not None:
                await self._processor.grammars.wait(processed.grammar)
            self.check()  # it may have died or begun to close meanwhile
            self._waiting.check(len(processed.prompt_token_ids))
        except (OverloadedError, TooManyGrammarsError) as error:
            self.metrics.rejected()
            raise OverloadedError(str(error)) from None
        except asyncio.CancelledError:
            self.metrics.aborted_early(count)
            raise
        return in_flight.add(processed, request_id, kind, clock, placement)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        kind: Kind = "cumulative",
        priority: int = 0,
        cache_salt: str | None = None,
        placement: Placement = ANYWHERE,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come; see `add`. Leaving the loop early aborts it.

        >>> async def main() -> str:
        ...     engine = await AsyncLLM.start(EngineConfig.of(model="demo"))
        ...     text, params = "", SamplingParams(max_tokens=5)
        ...     async for output in engine.generate("The sky is", params, kind="delta"):
        ...         text += output.outputs[0].text
        ...     await engine.shutdown()
        ...     return text
        >>> text = asyncio.run(main())

        `kind`: "cumulative" repeats all text so far, "delta" brings only what is new, "final"
        one output at the end.
        """
        async with await self.add(
            prompt,
            params,
            request_id,
            kind=kind,
            priority=priority,
            cache_salt=cache_salt,
            placement=placement,
        ) as stream:
            async for output in stream:
                yield output

    async def embed(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        placement: Placement = ANYWHERE,
    ) -> EmbeddingOutput:
        """One vector for a prompt: the model's final-normed hidden states, of the last token or
        the mean of all (`pooling`); `pooler_config` for what is not said. Raises as `add`, and
        RuntimeError when it was aborted."""
        usual, normal = pooling_settings(self.config.model.pooler_config)
        stream = await self.add(
            prompt,
            pooling_params(),
            request_id,
            kind="final",
            priority=priority,
            cache_salt=cache_salt,
            placement=placement,
            pooling=check_pooling(pooling or usual),
        )
        async with stream:
            async for output in stream:
                wanted = normal if normalize is None else normalize
                return embedding_of(output, wanted, dimensions)
        raise RuntimeError("the engine ended the request without an output")

    async def abort(self, request_id: str) -> None:
        """End every running request with this id; their streams end with finish_reason "abort"."""
        if self._in_flight is not None:
            self._in_flight.abort(request_id)

    # -- the output task -----------------------------------------------------------------------

    async def _run(self, in_flight: InFlight) -> None:
        async def take(rank: int, message: EngineOutputs) -> None:
            if message.stats is not None:
                self.metrics.stats(message.stats, rank)
                self.stats = self.metrics.totals.stats
                self._fresh.add(rank)
                self._new_stats.set()
            for first in range(0, len(message.outputs), _CHUNK):
                in_flight.deliver(message.outputs[first : first + _CHUNK], rank)
                await asyncio.sleep(0)

        try:
            await self._group.run(take)
        except EngineDeadError as error:
            if not self._closing:
                log.error("%s", error)
            self._die(error)
        except Exception as error:
            log.exception("the output task failed")
            self._die(EngineDeadError(f"the output task failed: {error}"))
            raise

    def _die(self, error: EngineDeadError) -> None:
        self._dead = error
        self._death.set()
        self._new_stats.set()
        self.metrics.engine_gone()
        self._group.fail_calls(error)
        if self._in_flight is not None:
            self._in_flight.fail_all(error, "error")

    # -- state ---------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self._task is not None and self._dead is None and not self._closing

    @property
    def errored(self) -> bool:
        return self._dead is not None and not self._closing

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._dead

    async def wait_dead(self) -> None:
        """Returns when an engine process has died whose end is the server's."""
        await self._death.wait()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return 0 if self._in_flight is None else len(self._in_flight)

    @property
    def engine_pid(self) -> int | None:
        return self._group.pid

    @property
    def engine_pids(self) -> dict[int, int | None]:
        """Process ids by rank."""
        return self._group.pids()

    @property
    def board(self) -> Board:
        """The health of every rank."""
        return self._group.board

    def check(self) -> InFlight:
        """Raises EngineDeadError, ShuttingDownError or UnavailableError unless requests can be
        taken."""
        if self._closing:
            raise ShuttingDownError("the engine is shutting down")
        if self._dead is not None:
            raise self._dead
        if self._in_flight is None:
            raise RuntimeError("the engine is not started (await launch())")
        self._group.placer.check()
        return self._in_flight

    # -- calls of the engine ---------------------------------------------------------------------

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; False when some are in use. With `reset_running_requests`
        none are: what runs starts over for it, and goes on with the tokens that it has."""
        args = [True] if reset_running_requests else []
        return bool(await self.call("reset_prefix_cache", *args))

    async def pause(self, mode: PauseMode = "wait", clear_cache: bool = True) -> None:
        """Start nothing new until `resume`; requests are still taken and wait.

        What runs is ended ("abort"), finished first ("wait": returns when it has), or stands
        still ("keep"). `clear_cache` forgets the cached prefixes too.
        """
        await self.call("pause", mode)
        while mode == "wait":
            self._fresh.clear()
            await self.call("is_paused")  # stats follow any call, of an idle engine too
            while not self._fresh.issuperset(self.board.healthy()) and self._dead is None:
                self._new_stats.clear()
                await self._new_stats.wait()
            if self._dead is not None:
                raise self._dead
            if self.stats.num_running == 0:
                break
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        """Undo `pause`."""
        await self.call("resume")

    async def is_paused(self) -> bool:
        return bool(await self.call("is_paused"))

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give the device's memory back: the KV cache is forgotten, and the weights move to host
        memory (level 1) or are dropped and loaded again on waking (2). What runs is ended
        ("abort"), finished first ("wait"), or goes on after `wake_up` ("keep")."""
        if mode == "wait":
            await self.pause("wait", clear_cache=False)
        if mode == "abort":
            await self.call("sleep", level)
        else:
            await self.call("sleep", level, "keep")

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Undo `sleep`, or of it what `tags` name ("weights", "kv_cache"); returns whether all of
        it is undone: until then requests wait. Raises RuntimeError for another tag."""
        awake = await self.call("wake_up", *([] if tags is None else [list(tags)]))
        return awake is not False

    async def is_sleeping(self) -> bool:
        return bool(await self.call("is_sleeping"))

    async def call(self, method: str, *args: Any) -> Any:
        """A named call of every engine core. Raises RuntimeError with its message."""
        if self._dead is not None:
            raise self._dead
        return await self._group.call(method, *args)

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Take nothing new, give running requests `timeout` seconds, end the rest, stop the
        process. Idempotent."""
        self._closing = True
        if self._in_flight is not None:
            if timeout > 0 and self._dead is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._in_flight.idle.wait(), timeout)
            late = ShuttingDownError("the server shut down before the request was done")
            self._in_flight.fail_all(late, "abort" if self._dead is None else "error")
            self._processor.grammars.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self.orders.close()
        await self._group.close(grace=0 if self._dead is not None else 5.0)
        self.metrics.engine_gone()

    def kill(self) -> None:
        """End the engine processes at once."""
        self._group.kill()
