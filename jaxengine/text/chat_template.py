"""Chat messages to prompt text: normalisation, and Jinja in a sandbox.

Templates come with model files, so they are untrusted code: they render in Jinja's immutable
sandbox. The environment is the one that templates are written for (block trimming, loop controls,
`{% generation %}`, `tojson` without HTML escaping, `raise_exception`, `strftime_now`).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxengine.text.chat_messages import (
    ChatTemplateError,
    Message,
    as_text,
    for_template,
    loses_system,
    normalize_messages,
    plainer_turns,
    with_calls_in_content,
    with_null_content,
)

__all__ = [
    "ChatTemplateError",
    "normalize_messages",
    "pick_template",
    "render_chat",
    "render_conversation",
    "render_messages",
    "takes_content_parts",
    "takes_tools",
]


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; it has no effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _Environment(ImmutableSandboxedEnvironment):
    """Every turn of a loop, and every call of a macro, looks at the clock: a template that never
    ends is given up."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        found: list[Any] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in found:
            look = nodes.Call(nodes.Name(_LOOK, "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(look, lineno=node.lineno))
        tree.set_environment(self)
        return tree


_LOOK = "_look_at_the_clock"
_SECONDS = 5.0  # of CPU, that a template may take
_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


def _look_at_the_clock() -> str:
    if time.thread_time() > _deadline.get():
        raise jinja2.TemplateError(f"the chat template took more than {_SECONDS:g} s")
    return ""


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    env.globals[_LOOK] = _look_at_the_clock
    return env


@lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except (jinja2.TemplateError, RecursionError) as e:
        raise ChatTemplateError(f"the chat template is not valid: {e}") from e


def pick_template(
    template: str | Mapping[str, str] | None, name: str | None = None, tools: Any = None
) -> str:
    """One template out of the tokenizer's: by name, or "tool_use" with tools, or "default"."""
    if template is None:
        raise ChatTemplateError("the model has no chat template: give one with chat_template")
    if isinstance(template, str):
        return template
    wanted = name or ("tool_use" if tools and "tool_use" in template else "default")
    if wanted not in template:
        have = ", ".join(sorted(template))
        raise ChatTemplateError(f"the model has no chat template {wanted!r} (it has: {have})")
    return template[wanted]


@lru_cache(maxsize=64)
def takes_content_parts(template: str) -> bool:
    """Whether the template itself walks over a message's content parts."""
    try:
        tree = _environment().parse(template)
    except jinja2.TemplateError as e:
        raise ChatTemplateError(f"the chat template is not valid: {e}") from e

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        key = node.arg if isinstance(node, nodes.Getitem) else None
        return isinstance(key, nodes.Const) and key.value == "content"

    aliases = {
        a.target.name
        for a in tree.find_all(nodes.Assign)
        if isinstance(a.target, nodes.Name) and is_content(a.node)
    }
    loops = [f.iter for f in tree.find_all(nodes.For)]
    return any(is_content(i) or (isinstance(i, nodes.Name) and i.name in aliases) for i in loops)


@lru_cache(maxsize=64)
def takes_tools(template: str) -> bool:
    """Whether the template has a place for tools."""
    try:
        tree = _environment().parse(template)
    except jinja2.TemplateError as e:
        raise ChatTemplateError(f"the chat template is not valid: {e}") from e
    return any(node.name == "tools" for node in tree.find_all(nodes.Name))


# Appended to the message that is to be continued. Its last space tells whether the template trims.
_END = "\x02end-of-final-message\x03 "


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    bos_token: str | None = None,
    eos_token: str | None = None,
    **kwargs: Any,
) -> str:
    """Prompt text of messages that are as the template expects them (see normalize_messages).

    `continue_final_message` ends the prompt right after the last message's text, for the model to
    go on with it. A special token that is None is left undefined. Other keywords are template
    variables. Raises ChatTemplateError: also a template's own refusal, with its message.
    """
    if continue_final_message:
        if add_generation_prompt:
            raise ChatTemplateError(
                "continue_final_message and add_generation_prompt exclude each other"
            )
        messages = _marked(messages)
    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    variables = {k: v for k, v in tokens.items() if v is not None} | kwargs
    compiled = _compiled(template)
    began = _deadline.set(time.thread_time() + _SECONDS)
    try:
        text = compiled.render(
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except jinja2.TemplateError as e:
        raise ChatTemplateError(e.message or type(e).__name__) from e
    except Exception as e:  # noqa: BLE001  (a template is foreign code; its error is the request's)
        raise ChatTemplateError(f"the chat template failed: {e}") from e
    finally:
        _deadline.reset(began)
    return _cut(text) if continue_final_message else text


def _marked(messages: Sequence[Message]) -> list[Message]:
    last = dict(messages[-1]) if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _END
    elif isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        last["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END}]
    else:
        raise ChatTemplateError("continue_final_message needs a last message with text content")
    return [*messages[:-1], last]


def _cut(text: str) -> str:
    at = text.rfind(_END.strip())
    if at < 0:
        raise ChatTemplateError("the chat template does not show the final message to continue")
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


def render_messages(
    template: str | Mapping[str, str] | None,
    messages: Sequence[Message],
    *,
    template_name: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """Pick the template, normalise the messages, render.

    Some templates paste tool-call arguments as text; those that fail on mappings are given JSON
    text instead. Some show calls only where content is null; those that leave calls out are given
    that, and if it does not help, the calls as part of the content. Keywords are those of
    render_chat. Raises ChatTemplateError.
    """
    text = pick_template(template, template_name, tools)
    return _rendered(text, _normal(text, messages), tools, kwargs)


def render_conversation(
    template: str | Mapping[str, str] | None,
    messages: Sequence[Message],
    *,
    tools: list[dict[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """What a chat endpoint calls: as `render_messages`, with one thing more. Where a template
    refuses or passes over system turns, all or those in the middle, what these say is moved
    (`plainer_turns`). Raises ChatTemplateError with the template's own words."""
    text = pick_template(template, None, tools)
    normal = _normal(text, messages)
    shown, refusal = None, None
    try:
        shown = _rendered(text, normal, tools, kwargs)
        if not loses_system(normal, shown):
            return shown
    except ChatTemplateError as e:
        if not isinstance(e.__cause__, jinja2.TemplateError):
            raise
        refusal = e
    for plainer in plainer_turns(normal):
        with contextlib.suppress(ChatTemplateError):  # then it stays as it was
            other = _rendered(text, plainer, tools, kwargs)
            if not loses_system(normal, other):
                return other
    if refusal is not None:
        raise refusal
    assert shown is not None
    return shown


def _normal(text: str, messages: Sequence[Message]) -> list[Message]:
    return normalize_messages(messages, keep_parts=takes_content_parts(text))


def _rendered(
    text: str,
    normal: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    kwargs: Mapping[str, Any],
) -> str:
    ready = [for_template(m, text) for m in normal]
    try:
        shown = render_chat(text, ready, tools=tools, **kwargs)
    except ChatTemplateError as e:
        if not isinstance(e.__cause__, TypeError) or not any("tool_calls" in m for m in ready):
            raise
        shown = render_chat(text, [as_text(m) for m in ready], tools=tools, **kwargs)
    for other_way in (with_null_content, with_calls_in_content):
        if not _loses_calls(ready, shown):
            break
        with contextlib.suppress(ChatTemplateError):  # then it stays as it was
            other = render_chat(text, [other_way(m) for m in ready], tools=tools, **kwargs)
            shown = shown if _loses_calls(ready, other) else other
    return shown


def _loses_calls(messages: Sequence[Message], shown: str) -> bool:
    calls = (c for m in messages for c in m.get("tool_calls", ()))
    return any(c["function"]["name"] not in shown for c in calls)
