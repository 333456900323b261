"""`LLM`: the engine in this process, for scripts and notebooks.

llm = LLM("demo")
for out in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
    print(out.outputs[0].text)
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
from tqdm import tqdm

from jaxengine.config import EngineConfig, template_kwargs
from jaxengine.front.model_files import FrontModel, load_front, read_template
from jaxengine.sampling_params import SamplingParams
from jaxengine.settings.pooling import pooling_settings
from jaxengine.text.display import llm_html
from jaxengine.text.output_processor import OutputProcessor
from jaxengine.text.outputs import EmbeddingOutput, OutputKind, RequestOutput
from jaxengine.text.pooling import check_pooling, embedding_of, pooling_params
from jaxengine.text.processor import InputProcessor, ProcessedRequest, Prompt
from jaxengine.validation import Limits, RequestError
from jaxengine.vllm_names import note_vllm_environment
from jaxengine.wire.messages import EngineOutput, EngineReady, EngineRequest, EngineStats

if TYPE_CHECKING:
    from jaxengine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


class Core(Protocol):
    """What `LLM` uses of `EngineCore`."""

    def add_request(self, request: EngineRequest) -> None: ...
    def abort_requests(self, request_ids: list[str]) -> None: ...
    def step(self) -> list[EngineOutput]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def utility(self, method: str, args: list[Any]) -> Any: ...
    def ready(self) -> EngineReady: ...
    def shutdown(self) -> None: ...


class LLM:
    """Offline inference. Keywords are the settings of `EngineConfig`; unknown ones raise
    TypeError. `skip_tokenizer_init=True` serves token ids only. Not thread-safe."""

    def __init__(
        self, model: str = "demo", *, skip_tokenizer_init: bool = False, **settings: Any
    ) -> None:
        self._open(EngineConfig.of(model=model, **settings), skip_tokenizer_init)

    @classmethod
    def from_config(cls, config: EngineConfig, *, skip_tokenizer_init: bool = False) -> LLM:
        """The same from a config that exists already."""
        llm = cls.__new__(cls)
        llm._open(config, skip_tokenizer_init)
        return llm

    def _open(self, config: EngineConfig, skip_tokenizer_init: bool) -> None:
        if config.data_parallel.data_parallel_size > 1 or config.fault.enable_fault_tolerance:
            raise ValueError(
                "data_parallel_size and enable_fault_tolerance are for AsyncLLM and serve; an LLM "
                "is one engine in this process (attention_data_parallel_size uses several devices)"
            )
        from jaxengine import platform
        from jaxengine.weights.resolve import resolve_model

        note_vllm_environment()
        model = config.model
        resolve_model(model.model, model.revision, model.download_dir)  # fails at once, if at all
        with ThreadPoolExecutor(1) as pool:  # the tokenizer is read while JAX is imported
            loading = pool.submit(load_front, config, skip_tokenizer_init)
            platform.setup()  # before JAX is imported, which EngineCore's module does
            from jaxengine.engine.core import EngineCore
        front = loading.result()
        self._init(EngineCore(config), front, config)

    @classmethod
    def from_core(
        cls,
        core: Core,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> LLM:
        """An LLM over a core that exists already."""
        llm = cls.__new__(cls)
        template = None if tokenizer is None else tokenizer.chat_template
        front = FrontModel(tokenizer, template, generation_config or {})
        llm._init(core, front, config or EngineConfig())
        return llm

    def _init(self, core: Core, front: FrontModel, config: EngineConfig) -> None:
        ready = core.ready()
        limits = Limits(ready.max_model_len, ready.vocab_size, config.model.max_logprobs)
        self.config = config
        self._core = core
        self._front = front
        self._tokenizer = front.tokenizer
        self._inputs = InputProcessor(
            front.tokenizer,
            limits,
            front.sampling_defaults,
            config.server.reasoning_parser,
            takes_priorities=config.scheduler.scheduling_policy == "priority",
        )
        self._outputs = OutputProcessor(front.tokenizer)
        self._count = 0
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts; outputs in their order.

        >>> llm = LLM("demo")
        >>> greedy = SamplingParams(temperature=0, max_tokens=5)
        >>> sky, water = llm.generate(["The sky is", "Water is"], greedy)
        >>> text, reason = sky.outputs[0].text, sky.outputs[0].finish_reason

        `prompts`: a text, token ids, {"prompt_token_ids": ids} or a list of these.
        `sampling_params`: one for all, or one for each; None takes the model's generation
        defaults (generation_config.json; the built-in ones with generation_config="engine").
        Bad input raises RequestError before anything runs. A request that fails in the engine
        ends alone, with finish_reason "error". Ctrl-C aborts the batch and raises
        KeyboardInterrupt; the LLM stays usable.
        """
        if self._closed:
            raise RuntimeError("this LLM is closed")
        batch = [prompts] if _is_one(prompts) else list(cast(Sequence[Prompt], prompts))
        params = _spread("sampling_params", sampling_params, len(batch), SamplingParams)
        priorities = _spread("priority", priority, len(batch), int)
        processed = [
            self._inputs.process(str(self._count + i), prompt, p, priority=rank or 0)
            for i, (prompt, p, rank) in enumerate(
                zip(cast(list[Prompt], batch), params, priorities, strict=True)
            )
        ]
        self._count += len(processed)
        return self._run(processed, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput]:
        """Complete one prompt; outputs hold what is new since the one before, the last one the
        finish_reason too. Who leaves the loop early ends the request. Otherwise as `generate`."""
        if self._closed:
            raise RuntimeError("this LLM is closed")
        processed = self._inputs.process(str(self._count), prompt, sampling_params)
        self._count += 1
        return self._steps([processed], "delta")

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them. `chat_template`: text or file that replaces
        the model's. The rendered text is encoded without adding special tokens: templates write
        their own.

        >>> llm = LLM("demo")
        >>> asked = [{"role": "user", "content": "What is the capital of France?"}]
        >>> [answer] = llm.chat(asked, SamplingParams(temperature=0, max_tokens=20))
        >>> asked += [{"role": "assistant", "content": answer.outputs[0].text}]
        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if one else messages)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message",
                "continue_final_message needs add_generation_prompt=False",
            )
        options = dict(
            tools=None if tools is None else list(tools),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        options |= template_kwargs(self.config.server.default_chat_template_kwargs)
        options |= chat_template_kwargs or {}
        prompts = [self._render(c, chat_template, options) for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
    ) -> list[EmbeddingOutput]:
        """One vector for each prompt: the model's final-normed hidden states, of the last token or
        the mean of all (`pooling`: "last" | "mean"), of length 1 with `normalize`;
        `pooler_config` for what is not said. Raises RequestError for bad input, RuntimeError for a
        request that failed."""
        if self._closed:
            raise RuntimeError("this LLM is closed")
        batch = [prompts] if _is_one(prompts) else list(cast(Sequence[Prompt], prompts))
        usual, normal = pooling_settings(self.config.model.pooler_config)
        params, kind = pooling_params(), check_pooling(pooling or usual)
        processed = [
            self._inputs.process(str(self._count + i), prompt, params, pooling=kind)
            for i, prompt in enumerate(cast(list[Prompt], batch))
        ]
        self._count += len(processed)
        outputs = self._run(processed, use_tqdm)
        wanted = normal if normalize is None else normalize
        return [embedding_of(output, wanted, dimensions) for output in outputs]

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; RuntimeError with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise RuntimeError("no tokenizer is loaded (skip_tokenizer_init)")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's sampling defaults, as `generate` takes them when given none."""
        return self._inputs.default_params

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. False when blocks are in use."""
        return bool(self._core.utility("reset_prefix_cache", []))

    def get_metrics(self) -> dict[str, Any]:
        """The engine's gauges and counters (fields of EngineStats)."""
        return msgspec.structs.asdict(self._core.stats())

    def _repr_html_(self) -> str:
        """The engine as Jupyter shows it."""
        try:
            blocks = self._core.utility("kv_blocks", [])
        except ValueError:  # a core of another make
            blocks = {}
        return llm_html(self._core.ready(), self._core.stats(), blocks, closed=self._closed)

    def close(self) -> None:
        """Free the device. May be called again."""
        if not self._closed:
            self._closed = True
            self._core.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _render(
        self, messages: Sequence[Message], template: str | None, options: Mapping[str, Any]
    ) -> Prompt:
        from jaxengine.text.chat_template import ChatTemplateError, render_conversation

        tokenizer = self.get_tokenizer()
        chosen = self._front.chat_template if template is None else read_template(template)
        try:
            text = render_conversation(
                chosen,
                # what is no mapping is refused there, by its position
                [dict(m) if isinstance(m, Mapping) else m for m in messages],
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                **options,
            )
        except ChatTemplateError as error:
            raise RequestError("messages", str(error)) from error
        return {"prompt": text, "add_special_tokens": False}

    def _run(self, batch: list[ProcessedRequest], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        bar = tqdm(total=len(batch), desc="Requests", disable=not use_tqdm, dynamic_ncols=True)
        with bar, closing(self._steps(batch, "final")) as steps:
            for result in steps:
                done[result.request_id] = result
                bar.update()
        for result in done.values():
            if result.error is not None:
                logger.error("request %s failed: %s", result.request_id, result.error)
        return [done[p.request_id] for p in batch]

    def _steps(self, batch: list[ProcessedRequest], kind: OutputKind) -> Generator[RequestOutput]:
        """Outputs as they come, until all of the batch ended. One that is left early is aborted."""
        ended = 0
        try:
            for processed in batch:
                self._outputs.add(processed, kind)
                for request in processed.requests:
                    self._core.add_request(request)
            while ended < len(batch):
                with _interrupts() as interrupted:
                    outputs = self._core.step()
                    if not outputs and not self._core.has_work():
                        raise RuntimeError(f"the engine lost {len(self._outputs)} requests")
                    results, stopped = self._outputs.process(outputs)
                    if stopped:
                        self._core.abort_requests(stopped)
                if interrupted:
                    raise KeyboardInterrupt
                for result in results:
                    ended += result.finished
                    yield result
        finally:
            if ended < len(batch):
                self._abandon(batch)

    def _abandon(self, batch: list[ProcessedRequest]) -> None:
        """Abort what is left of a batch and let the steps in flight end."""
        ids: list[str] = []
        for processed in batch:
            self._outputs.abort(processed.request_id)
            ids += [r.request_id for r in processed.requests]
        try:
            self._core.abort_requests(ids)
            while self._core.has_work():
                self._core.step()
        except Exception:  # noqa: BLE001 - the error that ended the batch is the one to raise
            logger.exception("the engine could not be emptied after the batch was abandoned")


def _is_one(prompts: object) -> bool:
    """One prompt (text, dict, token ids), not a list of them."""
    if isinstance(prompts, str | Mapping):
        return True
    if not isinstance(prompts, Sequence):
        raise RequestError("prompt", f"prompts must be text, token ids or a list: {prompts!r:.60}")
    return bool(prompts) and isinstance(prompts[0], int)


def _spread(field: str, value: Any, count: int, kind: type) -> list[Any]:
    """One value for each of `count` prompts."""
    if value is None or isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence) or not all(isinstance(v, kind) for v in value):
        raise RequestError(field, f"{field} must be {kind.__name__} or a list of them")
    if len(value) != count:
        raise RequestError(field, f"{field} has {len(value)} entries for {count} prompts")
    return list(value)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C fills the list instead of raising inside a step, whose state would be torn; a second
    one raises at once. Handlers that the program set itself stay."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            signal.default_int_handler(number, frame)
        seen.append(number)

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
