"""What an answer must look like, as one constraint: calls of tools, and reasoning before it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from jaxengine.config import HARMONY_PARSERS
from jaxengine.sampling_params import StructuredOutputsParams
from jaxengine.server.answer.call_grammars import MAKERS, Calls
from jaxengine.server.answer.tools import ToolChoice
from jaxengine.server.errors import ApiError
from jaxengine.structured.schema import parse_schema
from jaxengine.structured.structural_tag import json_expression as _json
from jaxengine.structured.structural_tag import slashes, structural_tag_grammar
from jaxengine.text.reasoning import Start
from jaxengine.text.tools.hermes import BEGIN, END

# How calls are written, of the parsers whose calls a grammar can tell from other text by their
# first characters: the tag before one, the arguments' key, the tag behind one.
_FORMS = {
    "hermes": (BEGIN, "arguments", END),
    "qwen3": (BEGIN, "arguments", END),
    "llama3_json": ("", "parameters", ""),
}
# of the other parsers, those whose calls an answer of any form can stand beside
_CLEAR = ("mistral", "qwen3_coder", "qwen3_xml", *HARMONY_PARSERS)
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# keywords whose values are data, not schemas: a "$ref" in there is no reference
_DATA = ("const", "enum", "default", "examples")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # by names of any kind


def enforced_calls(choice: ToolChoice) -> StructuredOutputsParams:
    """tool_choice "required": a list of calls; a named function: its arguments. Raises ApiError
    400 for a schema that cannot be enforced."""
    schemas = _schemas(choice)
    if choice.mode == "named":
        return StructuredOutputsParams(json=json.dumps(schemas[0], ensure_ascii=False))
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "parameters": {"$ref": f"#/$defs/p{i}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(choice.tools)
    ]
    whole: dict[str, Any] = {
        # references stay inside their own schema, wherever it is put
        "$defs": {f"p{i}": _moved(s, f"#/$defs/p{i}") for i, s in enumerate(schemas)},
        "type": "array",
        "items": {"anyOf": calls},
        "minItems": 1,
    }
    if not choice.parallel:
        whole["maxItems"] = 1
    return StructuredOutputsParams(json=json.dumps(whole, ensure_ascii=False))


def free_calls(
    choice: ToolChoice,
    answer: StructuredOutputsParams | None,
    parser: str,
    token_id: Callable[[str], int | None] = lambda _: None,
) -> StructuredOutputsParams:
    """tool_choice "auto": calls as `parser` reads them, their arguments as their schemas say;
    beside them any text, or instead of them an `answer` of the given form. `token_id`: the id of a
    marker that is a special token of the model. Raises ApiError 400."""
    form = _FORMS.get(parser)
    if answer is not None and (form is None or not form[0]) and parser not in _CLEAR:
        raise ApiError(
            400,
            'a form of the answer beside tool_choice "auto" cannot be enforced with the parser '
            f"{parser}: its calls cannot be told from an answer by how they begin",
            param="tool_choice",
        )
    if form is None:
        names = [tool["function"]["name"] for tool in choice.tools]
        schemas = [
            schema if tool["function"].get("strict") else None
            for tool, schema in zip(choice.tools, _schemas(choice, lenient=True), strict=True)
        ]
        found = Calls(list(zip(names, schemas, strict=True)), choice.parallel, token_id)
        start = MAKERS[parser](found, None if answer is None else _expression(answer))
        return StructuredOutputsParams(grammar="\n".join([*found.rules, f"start: {start}"]) + "\n")
    begin, key, end = form
    heads = [f'{{"name": {json.dumps(t["function"]["name"])}, "{key}": ' for t in choice.tools]
    body = " | ".join(
        f"{json.dumps(head)} {_json(schema)} {json.dumps('}')}"
        for head, schema in zip(heads, _schemas(choice, lenient=True), strict=True)
    )
    rules = [f"body: {body}"]
    calls = f"calls: call {_repeated(choice, begin)}"
    rest = rf"/\s{{0,2}}/ body /\s{{0,2}}/ {json.dumps(end)}" if begin else "body"
    if answer is not None:
        rules += [
            calls,
            "start: calls | answer",
            f"call: {json.dumps(begin)} {rest}",
            f"answer: {_expression(answer)}",
        ]
    elif begin:
        rules += [
            "start: (text call)* TAIL" if choice.parallel else "start: (text call)? TAIL",
            f"text[lazy]: /(?s:.*){begin}/",
            f"call: {rest}",
            f"TAIL: /(?s:.*)/ & ~/(?s:.*){begin}(?s:.*)/",
        ]
    else:
        rules += [calls, "start: calls | TEXT?", f"call: {rest}", r"TEXT: /[^\s{](?s:.*)/"]
    return StructuredOutputsParams(grammar="\n".join(rules) + "\n")


def _repeated(choice: ToolChoice, begin: str) -> str:
    if not choice.parallel:
        return ""
    return r"(/\s{0,2}/ call)*" if begin else r"(/; ?/ call)*"


def after_reasoning(
    constraint: StructuredOutputsParams, start: Start, ours: bool
) -> StructuredOutputsParams:
    """The constraint on what follows the reasoning. A grammar is `ours` if `free_calls` made it;
    raises ApiError 400 for the client's own."""
    if start == "outside":
        return constraint
    own = constraint.grammar or ""
    if constraint.structural_tag is not None:
        own, ours = structural_tag_grammar(constraint.structural_tag, "structural_tag"), True
    if own and not ours:
        raise ApiError(
            400,
            "structured_outputs.grammar cannot begin after reasoning: switch the reasoning off "
            "(chat_template_kwargs enable_thinking: false) or give json, regex or choice",
            param="structured_outputs",
        )
    rules = (
        re.sub(r"(?m)^start: ", "after: ", own) if own else f"after: {_expression(constraint)}\n"
    )
    opened = r"think /\n{0,2}/"
    if start == "maybe":
        opened = rf"(/\n?<think>/ {opened})?"
    think = r"think[lazy]: /(?s:.*)<\/think>/"
    return StructuredOutputsParams(grammar=f"start: {opened} after\n{think}\n{rules}")


def _expression(constraint: StructuredOutputsParams) -> str:
    """As the right side of a Lark rule."""
    if constraint.json_object:
        return _json({"type": "object"})
    if constraint.json is not None:
        schema = constraint.json
        return _json(json.loads(schema) if isinstance(schema, str) else schema)
    if constraint.choice is not None:
        return " | ".join(json.dumps(c, ensure_ascii=False) for c in constraint.choice)
    if constraint.regex is not None:
        escaped = constraint.regex.replace("\n", r"\n")
        return "/" + slashes(escaped) + "/"
    what = "grammar" if constraint.grammar is not None else "structural_tag"
    raise ApiError(
        400,
        f'structured_outputs.{what} cannot stand beside tool_choice "auto"',
        param="structured_outputs",
    )


def _schemas(choice: ToolChoice, lenient: bool = False) -> list[dict[str, Any]]:
    """Of the arguments of each tool; with `lenient`, of those that are not strict any object."""
    found: list[dict[str, Any]] = []
    for tool in choice.tools:
        function = tool["function"]
        if lenient and not function.get("strict"):
            found.append({"type": "object"})
            continue
        parameters = function.get("parameters") or _NO_ARGUMENTS
        name = f"the parameters of the function {function['name']!r} in tools"
        try:
            text = parse_schema({"type": "object", **parameters}, name)
        except ValueError as error:
            raise ApiError(400, str(error), param="tools") from None
        found.append(json.loads(text))
    return found


def _moved(schema: Any, root: str) -> Any:
    """The schema with its local references starting at `root`."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            moved[key] = {name: _moved(part, root) for name, part in value.items()}
        else:
            moved[key] = value if key in _DATA else _moved(value, root)
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = root + target[1:]
    return moved
