"""The asynchronous face: requests in, streams of `RequestOutput` out, one engine process behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from jaxengine.config import EngineConfig
from jaxengine.engine import wire
from jaxengine.engine.client import EngineClient, EngineDeadError, EngineStartError
from jaxengine.engine.messages import EngineOutputs, EngineReady, EngineStats
from jaxengine.engine.stream import Kind, RequestStream
from jaxengine.frontend.output_processor import OutputProcessor
from jaxengine.frontend.outputs import RequestOutput
from jaxengine.frontend.processor import InputProcessor, ProcessedRequest, Prompt
from jaxengine.frontend.validation import Limits
from jaxengine.metrics.prometheus import Metrics
from jaxengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxengine.frontend.tokenizer import ChatTemplate, Tokenizer

log = logging.getLogger(__name__)

_INLINE_CHARS = 20_000  # a longer prompt is tokenized in a thread, so that streams go on
_INLINE_IDS = 100_000
_CHUNK = 128  # outputs processed before other tasks get the event loop

__all__ = [
    "AsyncLLM",
    "EngineDeadError",
    "EngineStartError",
    "Kind",
    "OverloadedError",
    "RequestStream",
    "ShuttingDownError",
    "off_loop",
]


class OverloadedError(RuntimeError):
    """Too many requests wait already; try again later (HTTP 503)."""


class ShuttingDownError(RuntimeError):
    """The engine takes no new requests, or had to end a running one, because it shuts down."""


async def off_loop[T](size: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread when `size` (characters) is big, else right here."""
    return await asyncio.to_thread(work) if size > _INLINE_CHARS else work()


class AsyncLLM:
    """`engine = await AsyncLLM.start(EngineConfig.of(model="demo"))`, then `generate`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        core: str = wire.DEFAULT_CORE,
        skip_tokenizer_init: bool = False,
    ) -> None:
        self.config = config
        self.ready = EngineReady()
        self.stats = EngineStats()
        self.tokenizer: Tokenizer | None = None
        self.default_params = SamplingParams()
        self.chat_template: ChatTemplate = None
        self.metrics = Metrics(served_name(config), config.model.max_model_len or 131072)
        self._skip_tokenizer = skip_tokenizer_init
        self._client = EngineClient(config, core)
        self._streams: dict[str, RequestStream] = {}
        self._unstarted: dict[str, RequestStream] = {}  # by child id, until the first output
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_queued = 0  # requests without a first output
        self._queued_tokens = 0  # of their prompts
        self._dead: EngineDeadError | None = None
        self._death = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._processor: InputProcessor
        self._outputs: OutputProcessor

    @classmethod
    async def start(
        cls,
        config: EngineConfig | None = None,
        *,
        core: str = wire.DEFAULT_CORE,
        skip_tokenizer_init: bool = False,
    ) -> AsyncLLM:
        """Start the engine process and load the tokenizer beside.

        Raises EngineStartError, or ValueError for a model or tokenizer that cannot be read.
        """
        engine = cls(config or EngineConfig(), core=core, skip_tokenizer_init=skip_tokenizer_init)
        await engine.launch()
        return engine

    async def launch(self) -> None:
        """What `start` does; for a caller that wants the object first."""
        starting = asyncio.ensure_future(self._client.start())
        loading = asyncio.ensure_future(asyncio.to_thread(self._load_tokenizer))
        try:
            # the first failure is the cause to show; both name the file when a file is missing
            defaults, self.ready = await asyncio.gather(loading, starting)
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, loading, return_exceptions=True)
            await self._client.close(grace=0)
            raise
        limits = Limits(
            max_model_len=self.ready.max_model_len,
            vocab_size=self.ready.vocab_size,
            max_logprobs=self.config.model.max_logprobs,
        )
        self._processor = InputProcessor(self.tokenizer, limits, defaults)
        self.default_params = self._processor.default_params
        self._outputs = OutputProcessor(self.tokenizer)
        self._task = asyncio.create_task(self._run(), name="jaxengine-outputs")

    def _load_tokenizer(self) -> dict[str, Any]:
        """Tokenizer and chat template; returns the model's sampling defaults."""
        from jaxengine.frontend.tokenizer import load_tokenizer
        from jaxengine.weights.resolve import resolve_model

        model = self.config.model
        if self._skip_tokenizer:
            return {}
        files = resolve_model(model.model, model.revision, model.download_dir)
        self.tokenizer = load_tokenizer(files, model.tokenizer)
        template = model.chat_template
        if template is None:
            self.chat_template = self.tokenizer.chat_template
        elif "{" in template or "\n" in template:
            self.chat_template = template
        else:
            with open(template, encoding="utf-8") as file:
                self.chat_template = file.read()
        if model.generation_config == "engine":
            return {}
        defaults = dict(files.generation_config)
        if defaults:
            log.info("sampling defaults of the model's generation_config: %s", defaults)
        return defaults

    # -- requests ------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        return self._processor.limits

    async def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        kind: Kind = "cumulative",
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Check, tokenize and admit one request; its outputs come from the returned stream.

        Raises RequestError (bad input), OverloadedError, ShuttingDownError, EngineDeadError.
        """
        self.check()
        arrival = time.time()
        clock = time.monotonic()
        request_id = request_id or uuid.uuid4().hex
        internal_id = f"{request_id}-{uuid.uuid4().hex[:8]}"  # users may reuse their ids
        processed = await off_loop(
            _prompt_size(prompt),
            lambda: self._processor.process(
                internal_id,
                prompt,
                params,
                priority=priority,
                cache_salt=cache_salt,
                arrival_time=arrival,
            ),
        )
        self.check()  # it may have died or begun to close while a thread tokenized
        self._check_room(processed)
        stream = RequestStream(self.drop, request_id, internal_id, kind)
        stream.prompt_len = len(processed.prompt_token_ids)
        stream.child_ids = [request.request_id for request in processed.requests]
        self._outputs.add(processed, kind)
        self._streams[internal_id] = stream
        self._unstarted.update(dict.fromkeys(stream.child_ids, stream))
        self._idle.clear()
        self._num_queued += 1
        self._queued_tokens += stream.prompt_len
        self.metrics.added(processed.requests, clock)
        try:
            for request in processed.requests:
                self._client.add(request)
        except EngineDeadError:
            self.drop(internal_id)
            raise
        return stream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        kind: Kind = "cumulative",
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come; see `add`. Leaving the loop early aborts it.

        `kind`: "cumulative" repeats all text so far, "delta" brings only what is new, "final"
        one output at the end.
        """
        async with await self.add(
            prompt, params, request_id, kind=kind, priority=priority, cache_salt=cache_salt
        ) as stream:
            async for output in stream:
                yield output

    def _check_room(self, processed: ProcessedRequest) -> None:
        scheduler = self.config.scheduler
        most, tokens = scheduler.max_num_queued_reqs, scheduler.max_num_queued_tokens
        size = len(processed.prompt_token_ids)
        if most is not None and self._num_queued >= most:
            self.metrics.rejected()
            raise OverloadedError(f"{self._num_queued} requests wait already (the limit is {most})")
        if tokens is not None and self._num_queued and self._queued_tokens + size > tokens:
            self.metrics.rejected()
            raise OverloadedError(
                f"{self._queued_tokens} prompt tokens wait already (the limit is {tokens})"
            )

    async def abort(self, request_id: str) -> None:
        """End every running request with this id; their streams end with finish_reason "abort"."""
        for stream in [s for s in self._streams.values() if s.request_id == request_id]:
            output = self._abort_stream(stream)
            if output is not None:
                stream.put(output)

    def _abort_stream(self, stream: RequestStream) -> RequestOutput | None:
        output = self._outputs.abort(stream.internal_id)
        self._client.abort(stream.child_ids)
        self._forget(stream, "abort")
        return output

    def drop(self, internal_id: str) -> None:
        """The consumer is gone: abort without a last output. Unknown ids are finished ones."""
        stream = self._streams.get(internal_id)
        if stream is not None:
            self._abort_stream(stream)

    def _forget(self, stream: RequestStream, reason: str) -> None:
        """The stream ends; sequences that have not ended yet are counted under `reason`."""
        for child_id in stream.child_ids:
            self.metrics.finished(child_id, reason)
        if self._streams.pop(stream.internal_id, None) is not None:
            self._mark_started(stream)
        if not self._streams:
            self._idle.set()

    def _mark_started(self, stream: RequestStream) -> None:
        if not stream.started:
            stream.started = True
            for child_id in stream.child_ids:
                self._unstarted.pop(child_id, None)
            self._num_queued -= 1
            self._queued_tokens -= stream.prompt_len

    # -- the output task -----------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                self._deliver_stats(message := await self._client.receive())
                outputs = message.outputs
                for first in range(0, max(len(outputs), 1), _CHUNK):
                    self._deliver(
                        EngineOutputs(message.engine_index, outputs[first : first + _CHUNK])
                    )
                    await asyncio.sleep(0)
        except EngineDeadError as error:
            if not self._closing:
                log.error("%s", error)
            self._die(error)
        except Exception as error:
            log.exception("the output task failed")
            self._die(EngineDeadError(f"the output task failed: {error}"))
            raise

    def _deliver_stats(self, message: EngineOutputs) -> None:
        if message.stats is not None:
            self.stats = message.stats
            self.metrics.stats(message.stats)

    def _deliver(self, message: EngineOutputs) -> None:
        self.metrics.outputs(message.outputs, time.monotonic())
        for done in message.outputs:
            if done.finish_reason is not None:
                self.metrics.finished(done.request_id, done.finish_reason)
        results, stopped = self._outputs.process(message.outputs)
        if stopped:  # a stop string was found in the text; the engine does not know yet
            self._client.abort(stopped)
            for child_id in stopped:
                self.metrics.finished(child_id, "stop")
        if self._unstarted:
            for output in message.outputs:
                if output.request_id in self._unstarted:
                    self._mark_started(self._unstarted[output.request_id])
        for result in results:
            stream = self._streams.get(result.request_id)
            if stream is None:
                continue
            if result.finished:
                self._forget(stream, "stop")
            stream.put(result)

    def _die(self, error: EngineDeadError) -> None:
        self._dead = error
        self._death.set()
        self.metrics.engine_gone()
        self._client.fail_calls(error)
        self._fail_streams(error)

    def _fail_streams(self, error: Exception) -> None:
        for stream in list(self._streams.values()):
            self._outputs.abort(stream.internal_id)
            self._client.abort(stream.child_ids)
            self._forget(stream, "abort" if self._dead is None else "error")
            stream.fail(error)

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
        """Returns when the engine process has died or failed."""
        await self._death.wait()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def engine_pid(self) -> int | None:
        return self._client.pid

    def check(self) -> None:
        """Raises EngineDeadError or ShuttingDownError unless requests can be taken."""
        if self._closing:
            raise ShuttingDownError("the engine is shutting down")
        if self._dead is not None:
            raise self._dead

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when some are in use."""
        return bool(await self.call("reset_prefix_cache"))

    async def call(self, method: str, *args: Any) -> Any:
        """A named call of the engine core. Raises RuntimeError with its message."""
        if self._dead is not None:
            raise self._dead
        return await self._client.call(method, *args)

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Take nothing new, give running requests `timeout` seconds, end the rest, stop the
        process. Idempotent."""
        self._closing = True
        if timeout > 0 and self._dead is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout)
        self._fail_streams(ShuttingDownError("the server shut down before the request was done"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._client.close(grace=0 if self._dead is not None else 5.0)
        self.metrics.engine_gone()

    def kill(self) -> None:
        """End the engine process at once."""
        self._client.kill()


def served_name(config: EngineConfig) -> str:
    """The model's name in responses and metrics."""
    return config.server.served_model_name or config.model.model


def _prompt_size(prompt: Prompt) -> int:
    """Characters to tokenize, or the equivalent in ids to check."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):
        return len(prompt) * _INLINE_CHARS // _INLINE_IDS
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    return len(text) if isinstance(text, str) else len(ids or ()) * _INLINE_CHARS // _INLINE_IDS
