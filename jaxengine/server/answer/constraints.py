"""The many ways to ask for structured output over HTTP, as one constraint.

`response_format` is OpenAI's; `structured_outputs` is an object with exactly one of json, regex,
choice, grammar, json_object, structural_tag; `guided_json` and its like are the older names of the
same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.server.errors import ApiError
from jaxengine.structured import check_structured, from_response_format
from jaxengine.validation import RequestError

Constraint = StructuredOutputsParams | None

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
# Options of others' engines: True where ours does just that, whatever they say.
_OPTIONS = {
    "disable_any_whitespace": True,  # none is ever written
    "disable_fallback": True,  # there is one way
    "disable_additional_properties": False,
    "whitespace_pattern": False,
}


class Body(Protocol):
    """The fields of a request that can hold a constraint."""

    response_format: Any
    structured_outputs: Any
    guided_json: Any
    guided_regex: Any
    guided_choice: Any
    guided_grammar: Any


class Asked(NamedTuple):
    """A constraint as a request gave it: None without one, else with the field that it came in by,
    such as "guided_json" or "response_format.json_schema.schema"."""

    constraint: Constraint = None
    field: str = ""


def constraint_of(body: Body) -> Asked:
    """The constraint, checked: a schema of some size takes a while. ApiError 400 for one that is
    malformed, or for two of them."""
    found: list[tuple[Constraint, str]] = []
    try:
        found.append((from_response_format(body.response_format), _response_field(body)))
    except ValueError as error:
        raise ApiError(400, str(error), param="response_format") from None
    if body.structured_outputs is not None:
        found.append((_structured(body.structured_outputs), "structured_outputs"))
    for name, kind in _GUIDED.items():
        value = getattr(body, name)
        if value is not None:
            found.append((_checked(kind, value, name), name))
    given = [Asked(constraint, name) for constraint, name in found if constraint is not None]
    if len(given) > 1:
        names = [name.split(".")[0] for _, name in given]
        raise ApiError(400, f"{names[0]} and {names[1]} exclude each other", param=names[1])
    return given[0] if given else Asked()


def named_as_given(error: RequestError, field: str) -> RequestError:
    """An error about the constraint, in terms of the field that the client wrote."""
    if not field or field == "structured_outputs":
        return error
    pattern = r"structured_outputs(\.(json_object|json|regex|choice|grammar|structural_tag))?"
    message = re.sub(pattern, lambda _: field, error.message, count=1)
    name = field.split(".")[0] if error.field == "structured_outputs" else error.field
    return RequestError(name, message, error.code)


def _response_field(body: Body) -> str:
    asked = body.response_format
    if not isinstance(asked, Mapping):
        return "response_format"
    if asked.get("type") == "json_schema":
        return "response_format.json_schema.schema"
    return "response_format.schema" if asked.get("schema") is not None else "response_format"


def _structured(value: Any) -> StructuredOutputsParams:
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise ApiError(400, f"{name} must be an object", param=name)
    rest = dict(value)
    for option, ours in _OPTIONS.items():
        if rest.pop(option, None) not in (None, False) and not ours:
            raise ApiError(400, f"{name}.{option} is not supported", param=name)
    given = {k: v for k, v in rest.items() if v is not None and (k, v) != ("json_object", False)}
    unknown = sorted(set(given) - set(_KINDS))
    if unknown:
        raise ApiError(400, f"{name}.{unknown[0]} is not known", param=name)
    if len(given) != 1:
        known, got = ", ".join(_KINDS), ", ".join(sorted(given)) or "none"
        text = f"{name} needs exactly one of {known}; got {got}"
        raise ApiError(400, text, param=name)
    [(kind, constraint)] = given.items()
    return _checked(kind, constraint, name)


def _checked(kind: str, value: Any, field: str) -> StructuredOutputsParams:
    """Of one kind; its form is checked here, by its own name. What was given as an object is text
    from here on: not every value of an object travels between processes."""
    name = field if field in _GUIDED else f"{field}.{kind}"
    constraint = StructuredOutputsParams(**{kind: value})
    try:
        spec = check_structured(constraint, field)
    except ValueError as error:
        text = re.sub(rf"^{field}\.{kind}", lambda _: name, str(error))
        raise ApiError(400, text, param=field) from None
    if spec is not None and spec.given is not None:
        return msgspec.structs.replace(constraint, **{kind: spec.given})
    return constraint
