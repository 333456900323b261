"""Requests in: prompt and parameters -> checked, tokenized `EngineRequest`s."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import force_setattr

from jaxengine.sampling_params import SamplingParams, StructuredOutputsParams
from jaxengine.sched.slot_record import MAX_BAD_WORD_LEN
from jaxengine.settings.generation import default_params
from jaxengine.text.grammars import GrammarChecks, check_structured_outputs
from jaxengine.text.thinking import thinking_budget
from jaxengine.validation import (
    Limits,
    RequestError,
    check_cache_salt,
    check_params,
    check_priority,
    check_prompt_ids,
    check_prompt_length,
    check_text,
    fit_to_context,
)
from jaxengine.wire.messages import EngineRequest, siblings_of

if TYPE_CHECKING:
    from jaxengine.structured import Spec
    from jaxengine.text.reasoning import AnswerGate
    from jaxengine.text.tokenizer import Tokenizer

# text, token ids, or {"prompt": text, "prompt_token_ids": ids, "cache_salt": text,
# "add_special_tokens": bool, "thinking": whether an answer to it begins "inside" a thought, "maybe"
# or "outside", "gate": makes what tells the answer from the thoughts (`reasoning.AnswerGate`)}
Prompt = str | list[int] | Mapping[str, Any]
_PROMPT_KEYS = (
    *("prompt", "prompt_token_ids", "cache_salt"),
    *("add_special_tokens", "thinking", "gate"),
)
# Keys of vLLM's prompts for what is not served: None and empty ask for nothing.
_NOT_SERVED = (
    "multi_modal_data",
    "multi_modal_uuids",
    "mm_processor_kwargs",
    "prompt_embeds",
    "encoder_prompt",
    "decoder_prompt",
    "token_type_ids",
)
# Tokens behind those that are kept of a truncated text: where it is cut its first words may become
# other tokens than in the whole text.
_MARGIN = 64


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """A user's request, ready to run. `requests` has one engine request for each of the n."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    requests: list[EngineRequest]
    arrival_time: float  # seconds since the epoch
    grammar: Spec | None = None
    gate: Callable[[], AnswerGate] | None = None  # None: all text is answer


class InputProcessor:
    """Tokenizes and checks. `tokenizer` None (token ids only) refuses text and bad_words."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: Limits,
        generation_defaults: Mapping[str, Any] | None = None,
        reasoning_parser: str | None = None,
        takes_priorities: bool = True,
    ) -> None:
        """`takes_priorities`: the scheduler looks at them; else one that is not 0 is refused."""
        self.tokenizer = tokenizer
        self.limits = limits
        self.default_params = default_params(generation_defaults or {})
        self._reasoning_parser = reasoning_parser
        self._takes_priorities = takes_priorities
        self._eos = list(tokenizer.eos_ids) if tokenizer else []
        self.grammars = GrammarChecks()

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
        check_grammar: bool = True,
        pooling: str | None = None,
    ) -> ProcessedRequest:
        """Check and tokenize one request. Raises RequestError; nothing is kept here.

        A constraint's grammar is built to see whether it can be enforced, which blocks (cached:
        microseconds, new: milliseconds to seconds). With `check_grammar` False that is left to
        the caller: `grammars.wait(processed.grammar)`.

        Child i of n > 1 has the id "{i}_{request_id}" and the seed `seed + i`; child 0 alone
        scores the prompt (prompt_logprobs).
        """
        arrival = time.time() if arrival_time is None else arrival_time
        checked = check_params(self.default_params if params is None else params, self.limits)
        grammar = check_structured_outputs(checked)
        if grammar is not None and not self._eos:
            raise RequestError(
                "structured_outputs",
                "structured_outputs needs an end token, and the model has none",
            )
        if grammar is not None and grammar.given is not None:
            checked = _as_text(checked, grammar.given)
        if checked.stop and self.tokenizer is None:
            raise RequestError("stop", "stop strings need a tokenizer, and none is loaded")
        text, ids = self._prompt(prompt, checked)
        if isinstance(prompt, Mapping) and cache_salt is None:
            cache_salt = prompt.get("cache_salt")
        checked = fit_to_context(checked, len(ids), self.limits)
        bad_words = self._bad_words(checked)
        thinking = None
        if checked.thinking_token_budget is not None:
            start = prompt.get("thinking") if isinstance(prompt, Mapping) else None
            parser, tokens = self._reasoning_parser, checked.thinking_token_budget
            thinking = thinking_budget(tokens, parser, self.tokenizer, ids, start)
        priority, salt = check_priority(priority), check_cache_salt(cache_salt)
        if priority and not self._takes_priorities:
            raise RequestError(
                "priority", f"priority {priority} needs the scheduling_policy priority, not fcfs"
            )
        first = EngineRequest(
            request_id=request_id if checked.n == 1 else f"0_{request_id}",
            prompt_token_ids=ids,
            params=_alone(checked),
            arrival_time=arrival,
            eos_token_ids=self._eos,
            bad_words_token_ids=bad_words,
            priority=priority,
            cache_salt=salt,
            pooling=pooling,
            thinking=thinking,
        )
        others = [
            (f"{i}_{request_id}", None if checked.seed is None else (checked.seed + i) % 2**64)
            for i in range(1, checked.n)
        ]
        requests = [first, *siblings_of(first, others)]
        if grammar is not None and check_grammar:
            self.grammars.check(grammar)
        gate = prompt.get("gate") if isinstance(prompt, Mapping) else None
        return ProcessedRequest(request_id, text, ids, checked, requests, arrival, grammar, gate)

    def _prompt(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int]]:
        keep, right = params.truncate_prompt_tokens, params.truncation_side == "right"
        text: str | None = None
        special = True
        ids: Any = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            _check_keys(prompt)
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            special = bool(prompt.get("add_special_tokens", True))
            if text is None and ids is None:
                raise RequestError("prompt", "prompt needs the key prompt or prompt_token_ids")
        else:
            ids = prompt
        if text is not None:
            check_text("prompt", text)
            if ids is None:
                ids = self._encode(text, special, keep, right)
        if keep is not None and isinstance(ids, list | tuple):
            ids = ids[:keep] if right else ids[-keep:]
        return text, check_prompt_ids(ids, self.limits)

    def _encode(self, text: str, special: bool, keep: int | None, right: bool) -> list[int]:
        """Token ids of a text, or of the end of it that holds the tokens to keep."""
        if self.tokenizer is None:
            raise RequestError("prompt", "prompt must be token ids: no tokenizer is loaded")
        if keep is not None and len(text) > 16 * (keep + _MARGIN):
            most = (keep + _MARGIN) * self.longest_token
            text = text[:most] if right else text[-most:]
        # A text this long cannot fit whatever its tokens: refuse it without minutes of tokenizing.
        if keep is None and len(text) > 16 * self.limits.max_model_len:
            least = -(-len(text) // self.longest_token)
            check_prompt_length(least, self.limits, at_least=True)
        return self.tokenizer.encode(text, add_special_tokens=special)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; 1 without a tokenizer."""
        return 1 if self.tokenizer is None else max(map(len, self.tokenizer.tk.get_vocab()))

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Ids of each bad word, plain and as it appears after a space."""
        if not params.bad_words:
            return []
        if self.tokenizer is None:
            raise RequestError("bad_words", "bad_words needs a tokenizer, and none is loaded")
        banned: list[list[int]] = []
        most = MAX_BAD_WORD_LEN * self.longest_token
        for word in params.bad_words:
            if len(word) > most:  # it is not worth encoding
                raise RequestError(
                    "bad_words", f"bad_words holds a word of more than {MAX_BAD_WORD_LEN} tokens"
                )
            plain = self.tokenizer.encode(word, add_special_tokens=False)
            spaced = self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            if not plain:
                raise RequestError("bad_words", f"bad_words: {word!r} has no tokens")
            banned.append(plain)
            # another length means that the space became a token of its own
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                banned.append(spaced)
        singles = {ids[0] for ids in banned if len(ids) == 1}
        if params.allowed_token_ids and singles.issuperset(params.allowed_token_ids):
            raise RequestError("bad_words", "bad_words bans every one of allowed_token_ids")
        return banned


def _check_keys(prompt: Mapping[str, Any]) -> None:
    """Raises RequestError for a part of a prompt that would be left out of the answer."""
    for key, value in prompt.items():
        if key in _PROMPT_KEYS:
            continue
        if key not in _NOT_SERVED:
            raise RequestError("prompt", f"prompt has the key {key!r}, which is not known")
        if value is not None and value != {}:
            raise RequestError(str(key), f"{key} is not supported: prompts are text or token ids")


def _as_text(params: SamplingParams, constraint: str) -> SamplingParams:
    """With a constraint that may be an object as the text of it, which any process can be sent."""
    asked = params.structured_outputs
    if asked is None or asked.json is None:
        text = StructuredOutputsParams(structural_tag=constraint)
    else:
        text = StructuredOutputsParams(json=constraint)
    return msgspec.structs.replace(params, structured_outputs=text)


def _alone(params: SamplingParams) -> SamplingParams:
    """Of one of the n."""
    if params.n == 1:
        return params
    one = copy(params)  # not `replace`, which would check all of it again
    force_setattr(one, "n", 1)
    return one
