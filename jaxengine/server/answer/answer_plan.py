"""What tools and reasoning change: the constraint, the prompt, how the answer is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from jaxengine.front.async_llm import AsyncLLM
from jaxengine.sampling_params import SamplingParams
from jaxengine.server.answer.answers import Style, is_harmony, make_parser, markers
from jaxengine.server.answer.constraints import Asked
from jaxengine.server.answer.tool_grammar import after_reasoning, enforced_calls, free_calls
from jaxengine.server.answer.tools import ToolChoice
from jaxengine.server.errors import ApiError
from jaxengine.server.openai.protocol import ChatBody
from jaxengine.text.reasoning import FINAL, AnswerGate, Start, thinking_start
from jaxengine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerPlan:
    params: SamplingParams
    prompt: str  # may begin the answer
    style: Style
    thinking: Start  # where the answer begins, seen from the model's thoughts
    gate: Callable[[], AnswerGate] | None  # tells the answer from the thoughts; None: no thoughts


def plan_answer(
    body: ChatBody,
    params: SamplingParams,
    asked: Asked,
    tools: ToolChoice,
    prompt: str,
    engine: AsyncLLM,
) -> AnswerPlan:
    """A constraint holds for what follows the reasoning. A model with channels (gpt-oss) has no
    reasoning then: its answer begins in the final channel. Raises ApiError 400."""
    config, tokenizer = engine.config.server, engine.tokenizer
    assert tokenizer is not None  # the prompt was rendered
    constraint = asked.constraint
    ours = False
    # response_format is for the answer, beside which calls may stand; what is given as
    # structured_outputs is for whatever the model writes
    alone = constraint is not None and not asked.field.startswith("response_format")
    if tools.enforced:
        constraint = enforced_calls(tools)
    elif not alone and tools.mode == "auto" and (constraint is not None or tools.strict):
        parser = config.tool_call_parser or ""
        constraint, ours = free_calls(tools, constraint, parser, _token_ids(tokenizer)), True
    special = [
        m for m in markers(config, tools) if tokenizer.tk.token_to_id(m) in tokenizer.special_ids
    ]
    start: Start = "outside"
    thinking: Start | None = None
    if is_harmony(config):
        if ours and body.continue_final_message:
            raise ApiError(
                400,
                "a form of the answer or of its calls cannot be enforced beside tools when "
                "continue_final_message is set",
                param="continue_final_message",
            )
        final = constraint is not None and not ours
        thinking = "outside" if final else "maybe"
        if final and not body.continue_final_message:
            prompt += FINAL
    elif config.reasoning_parser is not None:
        start = thinking_start(config.reasoning_parser, prompt, _continued(body))
        if constraint is not None and start != "outside":
            if special:
                raise ApiError(
                    400,
                    f"{special[0]} is a special token of this model, so that the answer's form "
                    "cannot be enforced after reasoning: switch the reasoning off",
                    param="response_format",
                )
            constraint = after_reasoning(constraint, start, ours)
    params = replace(params, structured_outputs=constraint)
    if special:
        params = replace(params, skip_special_tokens=False)
    constrained = constraint is not None and not ours
    style = Style(
        lambda: make_parser(config, tools, start, constrained),
        reasoning=body.include_reasoning is not False,
        calls=tools.mode != "none",
        one_call=not tools.parallel,
        short_ids=config.tool_call_parser == "mistral",
    )
    begins = thinking or start
    gate = None
    if config.reasoning_parser is not None and (begins != "outside" or is_harmony(config)):
        found = tools.tools if tools.mode == "auto" else ()
        gate = partial(AnswerGate, config.reasoning_parser, begins, config.tool_call_parser, found)
    return AnswerPlan(params, prompt, style, begins, gate)


def _token_ids(tokenizer: Tokenizer) -> Callable[[str], int | None]:
    def token_id(text: str) -> int | None:
        found = tokenizer.tk.token_to_id(text)
        return found if found in tokenizer.special_ids else None

    return token_id


def _continued(body: ChatBody) -> str:
    """The text of the message that the answer goes on with; "" if it begins a new one."""
    if not body.continue_final_message:
        return ""
    content = body.messages[-1].get("content")
    return content if isinstance(content, str) and content else " "
