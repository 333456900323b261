"""Grammars of calls beside free text, for the parsers whose calls are not hermes' JSON: mistral,
pythonic, qwen3_coder and gpt-oss. Each gives Lark rules without a "start" rule, and the start's
expression. Markers that are special tokens of the model are written as tokens, others as text.

Arguments that are written one by one (pythonic, qwen3_coder) come in the order of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxengine.server.errors import ApiError
from jaxengine.structured.structural_tag import json_expression, plain

Schema = Mapping[str, Any]
_PLAIN_KEYS = {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
    *("description", "title", "$schema", "$id"),
}
_STRING_KEYS = {"type", "description", "title", "default", "examples", "enum"}
_ANY = json_expression({})


@dataclass(frozen=True)
class Calls:
    """What may be called: names and schemas of arguments (None: any object)."""

    functions: Sequence[tuple[str, Schema | None]]
    parallel: bool
    token_id: Callable[[str], int | None]  # of a marker that is a special token
    rules: list[str] = field(default_factory=list)

    def marker(self, text: str) -> str:
        number = self.token_id(text)
        return quoted(text) if number is None else f"<[{number}]>"

    def add(self, name: str, expression: str) -> str:
        self.rules.append(f"{name}: {expression}")
        return name.removesuffix("[lazy]")

    def free_text(self, begin: str) -> tuple[str, str]:
        """The text before a call, with the marker that begins it; and the text behind the last."""
        number = self.token_id(begin)
        if number is not None:
            self.add("TEXT", "/(?s:.*)/")  # no special token is text
            return f"TEXT <[{number}]>", "TEXT"
        self.add("text[lazy]", f"/(?s:.*){plain(begin)}/")
        self.add("TAIL", f"/(?s:.*)/ & ~/(?s:.*){plain(begin)}(?s:.*)/")
        return "text", "TAIL"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def mistral_calls(calls: Calls, answer: str | None) -> str:
    """One list of calls, or NAME and arguments behind a marker of their own each."""
    bodies = [
        calls.add(f"args_{i}", json_expression(_object(schema)))
        for i, (_, schema) in enumerate(calls.functions)
    ]
    names = [name for name, _ in calls.functions]
    item = " | ".join(
        f"{quoted(f'{{"name": {quoted(name)}, "arguments": ')} {body} {quoted('}')}"
        for name, body in zip(names, bodies, strict=True)
    )
    args, begin = calls.marker("[ARGS]"), calls.marker("[TOOL_CALLS]")
    named = " | ".join(
        f"{quoted(name)} {args}? {body}" for name, body in zip(names, bodies, strict=True)
    )
    more, again = r"(/, ?/ item)*", rf"(/\s{{0,2}}/ {begin} named)*"
    calls.add("item", item)
    calls.add("named", named)
    many = calls.parallel
    body = f'/ ?\\[/ item {more if many else ""} "]" | named {again if many else ""}'
    calls.add("calls", body)
    if answer is not None:
        return f"{begin} calls | {answer}"
    before, tail = calls.free_text("[TOOL_CALLS]")
    return f"{before} calls | {tail}"


def pythonic_calls(calls: Calls, answer: str | None) -> str:
    """[f(a=1), g()], from the first character on."""
    for i, (name, schema) in enumerate(calls.functions):
        if schema is None:
            calls.add(f"args_{i}", r"(pair (/, ?/ pair)*)?")
        else:
            pairs = [
                (f"{quoted(f'{key}=')} {_literal(part)}", needed)
                for key, part, needed in _arguments(name, schema, identifiers=True)
            ]
            _in_order(calls, f"args_{i}", pairs, "/, ?/")
        calls.add(f"call_{i}", f'{quoted(f"{name}(")} args_{i} ")"')
    calls.add("pair", f'/[A-Za-z_][A-Za-z0-9_]*/ "=" ({_literal({})})')
    calls.add("call", " | ".join(f"call_{i}" for i in range(len(calls.functions))))
    more = "(/, ?/ call)*" if calls.parallel else ""
    calls.add("calls", f'"[" call {more} "]"')
    if answer is not None:
        return f"calls | {answer}"
    calls.add("TEXT", r"/[^\s\[](?s:.*)/")
    return "calls | TEXT?"


def qwen3_coder_calls(calls: Calls, answer: str | None) -> str:
    """<tool_call> with a function and its parameters as tags; strings are written bare."""
    end = "\n</parameter>\n"
    calls.add("string[lazy]", rf"/(?s:.*){plain(end)}/")
    calls.add("other[lazy]", rf"/<parameter=[^>\n]+>\n(?s:.*){plain(end)}/")
    for i, (name, schema) in enumerate(calls.functions):
        if schema is None:
            calls.add(f"args_{i}", "other*")
        else:
            parts = [
                (f"{quoted(f'<parameter={key}>{chr(10)}')} {_bare(name, key, part, end)}", needed)
                for key, part, needed in _arguments(name, schema)
            ]
            _in_order(calls, f"args_{i}", parts, "")
        head, tail = quoted(f"<function={name}>\n"), quoted("</function>\n")
        calls.add(f"call_{i}", f"{head} args_{i} {tail}")
    begin, close = calls.marker("<tool_call>"), calls.marker("</tool_call>")
    which = " | ".join(f"call_{i}" for i in range(len(calls.functions)))
    calls.add("call", f'"\\n" ({which}) {close}')
    if answer is not None:
        more = rf"(/\s{{0,2}}/ {begin} call)*" if calls.parallel else ""
        return f"{begin} call {more} | {answer}"
    before, tail = calls.free_text("<tool_call>")
    return f"({before} call){'*' if calls.parallel else '?'} {tail}"


def gpt_oss_calls(calls: Calls, answer: str | None) -> str:
    """Messages in channels: thoughts and remarks, then the call or the final text."""
    names = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    missing = [name for name in names if calls.token_id(name) is None]
    if missing:
        raise ApiError(
            400,
            f"strict tools need the special token {missing[0]}, which the tokenizer does not have",
            param="tools",
        )
    channel, message, end, start = (calls.marker(name) for name in names)
    json_mark = calls.marker("<|constrain|>")
    calls.add("TEXT", "/(?s:.*)/")
    calls.add(
        "aside",
        f'{channel} ("analysis" | "commentary") {message} TEXT {end} {start} "assistant"',
    )
    for i, (name, schema) in enumerate(calls.functions):
        to = quoted(f" to=functions.{name}")
        kind = f'(/ ?/ {json_mark}? "json")? {message}'
        head = f'{to} {channel} "commentary" {kind} | {channel} "commentary" {to} {kind}'
        calls.add(f"call_{i}", f"({head}) {json_expression(_object(schema))}")
    which = " | ".join(f"call_{i}" for i in range(len(calls.functions)))
    text = "TEXT" if answer is None else f"({answer})"
    return f'aside* ({which} | {channel} "final" {message} {text})'


Maker = Callable[[Calls, str | None], str]
MAKERS: dict[str, Maker] = {
    "mistral": mistral_calls,
    "pythonic": pythonic_calls,
    "qwen3_coder": qwen3_coder_calls,
    "qwen3_xml": qwen3_coder_calls,
    "gpt-oss": gpt_oss_calls,
    "openai": gpt_oss_calls,
}


def _object(schema: Schema | None) -> Schema:
    return {"type": "object"} if schema is None else schema


def _in_order(calls: Calls, name: str, parts: Sequence[tuple[str, bool]], between: str) -> None:
    """The parts in this order, those that are not needed or not there; `between` two of them."""
    last = len(parts)
    for i in range(last, -1, -1):
        for kind, lead in (("first", ""), ("more", f"{between} ")):
            if i == last:
                calls.add(f"{name}_{kind}_{i}", '""')
                continue
            expression, needed = parts[i]
            taken = f"{lead}({expression}) {name}_more_{i + 1}"
            left = "" if needed else f" | {name}_{kind}_{i + 1}"
            calls.add(f"{name}_{kind}_{i}", taken + left)
    calls.add(name, f"{name}_first_0")


def _arguments(
    name: str, schema: Schema, identifiers: bool = False
) -> list[tuple[str, dict[str, Any], bool]]:
    """(name, schema, needed) of each argument. Raises ApiError for what cannot be taken apart."""
    where = f"the parameters of the function {name!r} in tools"
    odd = sorted(set(schema) - _PLAIN_KEYS)
    if odd:
        raise _bad(f"{where} use {odd[0]!r} at their top, which this tool parser cannot enforce")
    if schema.get("additionalProperties", False) is not False:
        raise _bad(f"{where} need additionalProperties: false with this tool parser")
    found = []
    required = schema.get("required", ())
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties: Mapping[str, Any] = schema.get("properties", {})
    unknown = sorted(set(required) - set(properties))
    if unknown:
        raise _bad(f"{where} require {unknown[0]!r}, which is not among the properties")
    for key, part in properties.items():
        if identifiers and not key.isidentifier():
            raise _bad(f"{where}: {key!r} cannot be the name of an argument")
        if re.search(r"[<>\n]", key):
            raise _bad(f"{where}: {key!r} cannot be the name of a parameter")
        whole = {} if part is True else dict(part)
        if '"$ref": "#"' in json.dumps(whole):
            raise _bad(f"{where} refer to themselves, which this tool parser cannot enforce")
        found.append((key, whole | shared, key in required))
    return found


def _literal(schema: Schema) -> str:
    """A Python literal: JSON, or the words that only Python has."""
    words = {"boolean": '"True" | "False"', "null": '"None"'}
    kinds = schema.get("type")
    listed = kinds if isinstance(kinds, list) else [kinds]
    more = [words[kind] for kind in listed if kind in words and "enum" not in schema]
    if not set(schema) - {"$defs", "definitions"}:
        more = [*words.values()]
    return f"({' | '.join([json_expression(schema), *more])})"


def _bare(name: str, key: str, schema: Schema, end: str) -> str:
    """A value of qwen3_coder, up to its closing tag."""
    close = quoted(end)
    if schema.get("type") != "string":
        return f"{json_expression(schema)} {close}"
    odd = sorted(set(schema) - _STRING_KEYS - {"$defs", "definitions"})
    if odd:
        raise _bad(
            f"the parameters of the function {name!r} in tools: {key!r} uses {odd[0]!r}, which "
            "cannot be enforced of a string with the tool parser qwen3_coder"
        )
    if "enum" in schema:
        words = [word for word in schema["enum"] if isinstance(word, str)]
        return f"({' | '.join(map(quoted, words))}) {close}"
    return "string"


def _bad(message: str) -> ApiError:
    return ApiError(400, message, param="tools")
