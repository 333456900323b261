"""Structural tags: free text in which tags, once begun, hold what their schema says.

Two forms are taken, those of the OpenAI-compatible servers:

    {"structures": [{"begin": "<f>", "schema": {...}, "end": "</f>"}], "triggers": ["<f"]}
    {"format": {"type": "triggered_tags", "triggers": [...], "tags": [{"begin": ..., "content":
     {"type": "json_schema", "json_schema": {...}}, "end": ...}]}}

A format is one of const_string, json_schema, regex, any_text, tag, or, sequence, triggered_tags
and tags_with_separator. Both become a Lark grammar. Where a trigger appears in the text, a tag
must follow; free text between tags therefore ends, lazily, with a trigger.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxengine.structured.probe import JSON_OPTIONS
from jaxengine.structured.schema import MAX_BYTES, parse_schema, show, to_text
from jaxengine.structured.schema import MAX_DEPTH as SCHEMA_DEPTH

MAX_PARTS = 1024  # formats in all, and triggers of one
MAX_DEPTH = 16
_META = frozenset("\\.+*?()|[]{}^$#&-~/")
_KEYS = {
    "const_string": {"value"},
    "json_schema": {"json_schema"},
    "regex": {"pattern"},
    "any_text": set[str](),
    "tag": {"begin", "content", "end"},
    "or": {"elements"},
    "sequence": {"elements"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
}
_OPEN = ("any_text", "triggered_tags")  # nothing tells where they end


def parse_structural_tag(value: object, name: str) -> tuple[str, str]:
    """The structural tag `value` (an object or its JSON text) as JSON text, and as a Lark grammar.
    Raises ValueError, one sentence that names the part at fault."""
    tag = _object(value, name)
    text = to_text(tag, name, SCHEMA_DEPTH + 4 * MAX_DEPTH)
    if tag.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f'{name}.type must be "structural_tag", got {show(tag["type"])}')
    given = set(tag) - {"type"}
    rules = _Rules()
    if given == {"format"}:
        start = _expression(tag["format"], f"{name}.format", rules, 0)
    elif given == {"structures", "triggers"}:
        start = _expression(_from_structures(tag, name), name, rules, 0)
    else:
        raise ValueError(f'{name} needs "format", or "structures" and "triggers", and no more')
    return text, "\n".join([*rules.lines, f"start: {start}"]) + "\n"


def structural_tag_grammar(value: object, name: str) -> str:
    """Only the grammar of `parse_structural_tag`."""
    return parse_structural_tag(value, name)[1]


def json_expression(schema: Any) -> str:
    """A JSON schema as part of a Lark rule."""
    if schema is True:
        schema = {}
    text = json.dumps({"x-guidance": JSON_OPTIONS, **schema}, ensure_ascii=False)
    return f"%json {text}"


def plain(text: str) -> str:
    """A regular expression that matches just `text`, for use between slashes."""
    return "".join(_escaped(char) for char in text)


def _escaped(char: str) -> str:
    if char in _META:
        return "\\" + char
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char, char)


@dataclass
class _Rules:
    """The rules that were needed so far."""

    lines: list[str] = field(default_factory=list)
    count: int = 0

    def enter(self, where: str) -> int:
        self.count += 1
        if self.count > MAX_PARTS:
            raise ValueError(f"{where}: more than {MAX_PARTS} formats in one structural tag")
        return self.count

    def add(self, name: str, expression: str) -> str:
        self.lines.append(f"{name}: {expression}")
        return name.removesuffix("[lazy]")


def _from_structures(tag: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The older form in terms of the newer one."""
    tags = []
    for i, part in enumerate(_list(tag["structures"], f"{name}.structures")):
        where = f"{name}.structures[{i}]"
        structure = _object(part, where)
        if set(structure) != {"begin", "schema", "end"}:
            raise ValueError(f"{where} must have begin, schema and end, and no more")
        content = {"type": "json_schema", "json_schema": structure["schema"]}
        begin, end = structure["begin"], structure["end"]
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _expression(node: object, where: str, rules: _Rules, depth: int) -> str:
    """A format as the right side of a rule."""
    rules.enter(where)
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} is nested deeper than {MAX_DEPTH} levels")
    part = _object(node, where)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(f"{where}.type must be one of {', '.join(_KEYS)}, got {show(kind)}")
    unknown = sorted(set(part) - _KEYS[kind] - {"type"})
    if unknown:
        raise ValueError(f"{where}.{unknown[0][:60]} is not supported")
    if kind == "const_string":
        return json.dumps(_string(part, "value", where), ensure_ascii=False)
    if kind == "json_schema":
        return json_expression(json.loads(_schema(part, where)))
    if kind == "regex":
        return f"/{slashes(_string(part, 'pattern', where))}/"
    if kind == "any_text":
        return "/(?s:.*)/"
    if kind == "tag":
        return _tag(part, where, rules, depth)
    if kind in ("or", "sequence"):
        return _elements(part, where, rules, depth)
    tags = _tags(part, where)
    if kind == "triggered_tags":
        return _triggered(part, tags, where, rules, depth)
    return _separated(part, tags, where, rules, depth)


def _tag(part: Mapping[str, Any], where: str, rules: _Rules, depth: int, skip: str = "") -> str:
    """`skip` of its beginning was written already."""
    begin = _string(part, "begin", where).removeprefix(skip)
    ends = part.get("end")
    ends = [ends] if isinstance(ends, str) else ends
    if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
        raise ValueError(f"{where}.end must be a string, or a list of strings")
    content = _object(part.get("content"), f"{where}.content")
    head = json.dumps(begin, ensure_ascii=False) + " " if begin else ""
    if content.get("type") == "any_text":
        if "" in ends:
            raise ValueError(f"{where}.end must not be empty behind any_text")
        any_end = "|".join(map(plain, ends))
        body = rules.add(f"text_{rules.enter(where)}[lazy]", f"/(?s:.*)({any_end})/")
        return f"{head}{body}"
    if content.get("type") in _OPEN:
        raise ValueError(f"{where}.content cannot be {content['type']}: nothing would end it")
    inner = _expression(content, f"{where}.content", rules, depth + 1)
    tail = " | ".join(json.dumps(end, ensure_ascii=False) for end in ends)
    return f"{head}({inner}) ({tail})"


def _elements(part: Mapping[str, Any], where: str, rules: _Rules, depth: int) -> str:
    elements = _list(part.get("elements"), f"{where}.elements")
    found = []
    for i, element in enumerate(elements):
        kind = element.get("type") if isinstance(element, Mapping) else None
        if part["type"] == "sequence" and kind in _OPEN and i < len(elements) - 1:
            raise ValueError(f"{where}.elements[{i}] cannot be {kind}: nothing would end it")
        found.append(f"({_expression(element, f'{where}.elements[{i}]', rules, depth + 1)})")
    return (" " if part["type"] == "sequence" else " | ").join(found)


def _triggered(
    part: Mapping[str, Any], tags: list[dict[str, Any]], where: str, rules: _Rules, depth: int
) -> str:
    triggers = _list(part.get("triggers"), f"{where}.triggers")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError(f"{where}.triggers must be strings that are not empty")
    if len(triggers) > MAX_PARTS:
        raise ValueError(
            f"{where}.triggers has {len(triggers)} entries, above the limit {MAX_PARTS}"
        )
    number = rules.enter(where)
    bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for i, tag in enumerate(tags):
        begin = _string(tag, "begin", f"{where}.tags[{i}]")
        trigger = max((t for t in triggers if begin.startswith(t)), key=len, default=None)
        if trigger is None:
            raise ValueError(
                f"{where}.tags[{i}].begin {show(begin)} begins with none of the triggers"
            )
        bodies[trigger].append(_tag(tag, f"{where}.tags[{i}]", rules, depth + 1, skip=trigger))
    called = []
    for i, (trigger, found) in enumerate(bodies.items()):
        if not found:
            raise ValueError(f"{where}.triggers[{i}] {show(trigger)} begins none of the tags")
        text = rules.add(f"text_{number}_{i}[lazy]", f"/(?s:.*){plain(trigger)}/")
        called.append(f"{text} ({' | '.join(f'({body})' for body in found)})")
    once = rules.add(f"call_{number}", " | ".join(f"({call})" for call in called))
    any_trigger = "|".join(map(plain, triggers))
    rules.add(f"TAIL_{number}", f"/(?s:.*)/ & ~/(?s:.*)({any_trigger})(?s:.*)/")
    least = bool(part.get("at_least_one"))
    if part.get("stop_after_first"):
        return once if least else f"{once} | TAIL_{number}"
    return f"{once}{'+' if least else '*'} TAIL_{number}"


def _separated(
    part: Mapping[str, Any], tags: list[dict[str, Any]], where: str, rules: _Rules, depth: int
) -> str:
    found = [_tag(tag, f"{where}.tags[{i}]", rules, depth + 1) for i, tag in enumerate(tags)]
    once = rules.add(f"tag_{rules.enter(where)}", " | ".join(f"({tag})" for tag in found))
    between = json.dumps(_string(part, "separator", where), ensure_ascii=False)
    many = once if part.get("stop_after_first") else f"{once} ({between} {once})*"
    return many if part.get("at_least_one") else f"({many})?"


def _tags(part: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    found = []
    for i, tag in enumerate(_list(part.get("tags"), f"{where}.tags")):
        checked = _object(tag, f"{where}.tags[{i}]")
        unknown = sorted(set(checked) - _KEYS["tag"] - {"type"})
        if checked.get("type", "tag") != "tag" or unknown:
            raise ValueError(f"{where}.tags[{i}] must be a tag: begin, content and end")
        found.append(checked)
    return found


def _object(value: object, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        if len(value) > MAX_BYTES:
            raise ValueError(
                f"{where} is {len(value)} characters long, above the limit {MAX_BYTES}"
            )
        try:
            value = json.loads(value)
        except RecursionError:
            raise ValueError(f"{where} is nested too deep") from None
        except ValueError as error:
            raise ValueError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object, got {type(value).__name__}")
    return dict(value)


def _list(value: object, where: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} must be a list that is not empty")
    return value


def _string(part: Mapping[str, Any], key: str, where: str) -> str:
    value = part.get(key)
    if not isinstance(value, str) or (key != "separator" and not value):
        raise ValueError(f"{where}.{key} must be a string that is not empty")
    return value


def _schema(part: Mapping[str, Any], where: str) -> str:
    if part.get("json_schema") is None:
        raise ValueError(f"{where}.json_schema is missing")
    return parse_schema(part["json_schema"], f"{where}.json_schema")


def slashes(regex: str) -> str:
    """The regular expression with its plain slashes escaped, on one line."""
    out, escaped = [], False
    for char in regex.replace("\n", r"\n"):
        out.append("\\/" if char == "/" and not escaped else char)
        escaped = char == "\\" and not escaped
    return "".join(out)
