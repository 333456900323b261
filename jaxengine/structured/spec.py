"""From what a request asks to a canonical grammar key, with every check that needs no compiling."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.structured.schema import parse_schema, show
from jaxengine.structured.structural_tag import parse_structural_tag

Kind = Literal["json", "regex", "choice", "grammar"]
MAX_REGEX = 16 * 1024
MAX_GRAMMAR = 128 * 1024
MAX_CHOICES = 10_000
MAX_CHOICE_CHARS = 128 * 1024
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A constraint in canonical form: equal specs share one compiled grammar.

    `text` is a JSON schema ("json"), a regular expression, a JSON list of strings ("choice") or
    a Lark or GBNF grammar (a structural tag is one by now). `field` names the request's field in
    error messages. `given` is what was asked as JSON text, where it may have been an object (json,
    structural_tag): that travels between processes, which not every value of an object can.
    """

    kind: Kind
    text: str
    field: str = "structured_outputs"
    given: str | None = dataclasses.field(default=None, compare=False)

    @property
    def key(self) -> tuple[Kind, str]:
        return self.kind, self.text


def from_response_format(response_format: object) -> StructuredOutputsParams | None:
    """An OpenAI `response_format` as StructuredOutputsParams; None for free text.

    json_schema may be an object or JSON text, and {"type": "json_object", "schema": ...} is
    taken as a schema too. Raises ValueError, one sentence naming the field.
    """
    name = "response_format"
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise ValueError(f"{name} must be an object, got {type(response_format).__name__}")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema")
        if schema is None:
            return StructuredOutputsParams(json_object=True)
        return _json(schema, f"{name}.schema")
    if kind == "json_schema":
        wrapper = response_format.get("json_schema")
        if not isinstance(wrapper, Mapping):
            raise ValueError(
                f'{name}.json_schema is missing: give {{"name": ..., "schema": {{...}}}}'
            )
        if wrapper.get("schema") is None:
            raise ValueError(f"{name}.json_schema.schema is missing")
        return _json(wrapper["schema"], f"{name}.json_schema.schema")
    if kind == "structural_tag":
        text, _ = parse_structural_tag(response_format, name)
        return StructuredOutputsParams(structural_tag=text)
    known = ", ".join(RESPONSE_FORMATS)
    raise ValueError(f"{name}.type must be one of {known}, got {show(kind)}")


def _json(schema: object, field: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=parse_schema(schema, field))


def check_structured(
    params: StructuredOutputsParams | None, field: str = "structured_outputs"
) -> Spec | None:
    """The canonical spec; None when nothing is asked. Raises ValueError naming the field.

    Whether the grammar compiles is the compiler's to say (`Validator`, `GrammarCompiler`).
    """
    if params is None:
        return None
    given = [name for name in _KINDS if getattr(params, name) not in (None, False)]
    if len(given) != 1:
        got = ", ".join(given) or "none"
        raise ValueError(f"{field} needs exactly one of {', '.join(_KINDS)}; got {got}")
    name = f"{field}.{given[0]}"
    if params.json_object not in (None, False):
        if params.json_object is not True:
            raise ValueError(f"{name} must be true or false, got {show(params.json_object)}")
        return Spec("json", '{"type":"object"}', name)
    if params.json is not None:
        text = parse_schema(params.json, name)
        return Spec("json", text, name, text)
    if params.regex is not None:
        return Spec("regex", _text(params.regex, name, MAX_REGEX), name)
    if params.choice is not None:
        return Spec("choice", _choices(params.choice, name), name)
    if params.structural_tag is not None:
        text, grammar = parse_structural_tag(params.structural_tag, name)
        return Spec("grammar", _text(grammar, name, MAX_GRAMMAR), name, text)
    return Spec("grammar", _text(params.grammar, name, MAX_GRAMMAR, blank_counts=False), name)


def _choices(value: Any, name: str) -> str:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be a list of strings, got {show(value)}")
    if not value:
        raise ValueError(f"{name} must not be empty")
    if len(value) > MAX_CHOICES:
        raise ValueError(f"{name} has {len(value)} entries, above the limit {MAX_CHOICES}")
    choices = [_text(choice, f"{name}[{i}]", MAX_CHOICE_CHARS) for i, choice in enumerate(value)]
    if sum(map(len, choices)) > MAX_CHOICE_CHARS:
        raise ValueError(f"{name} is longer than {MAX_CHOICE_CHARS} characters in all")
    return json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False)


def _text(value: object, name: str, limit: int, blank_counts: bool = True) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {show(value)}")
    if len(value) > limit:
        raise ValueError(f"{name} is {len(value)} characters long, above the limit {limit}")
    if not (value if blank_counts else value.strip()):
        raise ValueError(f"{name} must not be empty")
    if "\0" in value:
        raise ValueError(f"{name} must not hold a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds a lone surrogate: not valid Unicode") from None
    return value
