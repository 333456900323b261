"""What a request asks of the sampler: names, defaults and rules are vLLM's."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxengine.sched.batch import GREEDY_BELOW


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of these fields is set; see `jaxengine.structured`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError unless there is one constraint."""
        names = self.__struct_fields__
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = ", ".join(given) or "none"
            raise ValueError(
                f"structured_outputs needs exactly one of {', '.join(names)}; got {got}"
            )


class ThinkingBudget(msgspec.Struct, array_like=True, frozen=True):
    """What an engine is told. The thought begins with the answer (`inside`) or with `begin`, and
    ends with `end`. `channels`: the messages of gpt-oss before the final one are the thought; then
    `begin` opens a message's text, and `end` begins the final message."""

    tokens: int
    inside: bool
    begin: list[int]
    end: list[int]
    begin_text: str
    end_text: str
    channels: bool = False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request. Frozen; build variants with `msgspec.structs.replace`.

    >>> lively = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=200, stop="\\n\\n", seed=7)
    >>> exact = SamplingParams(temperature=0, logprobs=3)  # the most likely token at every step
    >>> SamplingParams(temperature=-1)
    Traceback (most recent call last):
    jaxengine.validation.RequestError: temperature must be between 0 and 2, got -1

    `temperature` 0 (or below 1e-5) is greedy. `top_k` 0 or -1 is off. `max_tokens` None means
    up to the context limit. `thinking_token_budget` N ends the model's thoughts after N tokens; it
    needs a reasoning parser. `logprobs` N returns the N best and the sampled token.

    A value that no model could be asked for raises RequestError, a ValueError, when the object is
    made; what depends on the model is checked with the request (`jaxengine.validation`).
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None  # "left" (the default): the last tokens stay; "right"
    skip_reading_prefix_cache: bool | None = None
    stream_interval: int | None = None  # tokens in a chunk, where that is more than the server's

    def __post_init__(self) -> None:
        from jaxengine.validation import check_values

        check_values(self)

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW
