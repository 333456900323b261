"""What must be true of a JSON schema before it is worth compiling.

The grammar library refuses most keywords that it cannot enforce. Here are the rest: keywords that
it would pass over in silence, recursion that never consumes or never ends, and size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from jaxengine.structured.finite import is_finite

MAX_DEPTH = 64
MAX_BYTES = 512 * 1024

_IN_PLACE = ("allOf", "anyOf", "oneOf")  # apply to the same value: they consume no text
_LISTS = (*_IN_PLACE, "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("additionalProperties", "items", "additionalItems")
# x-guidance would let a request switch the checks of the grammar library off; the others are
# assertions of old drafts that it does not know.
_REFUSED = ("x-guidance", "disallow", "extends", "divisibleBy")


def parse_schema(schema: object, field: str) -> str:
    """The schema as compact JSON, keys in the given order. Accepts a dict, a bool or JSON text.

    Raises ValueError, one sentence that begins with `field`.
    """
    if isinstance(schema, str):
        schema = _loads(schema, field)
    if schema is True:
        schema = {}
    if schema is False:
        raise ValueError(f"{field} is false: no value satisfies it")
    if not isinstance(schema, dict):
        raise ValueError(f"{field} must be a JSON object, got {type(schema).__name__}")
    text = to_text(schema, field)
    try:
        _check_nodes(schema)
    except _BadSchema as e:
        raise ValueError(f"{field} {e}") from None
    return text


class _BadSchema(Exception):
    """What is wrong, to be put after the field's name."""


def to_text(value: dict[str, Any], field: str, max_depth: int = MAX_DEPTH) -> str:
    """A JSON object as compact text, keys in the given order. Raises ValueError for what JSON or
    UTF-8 cannot hold and for what is too large, the latter without writing it."""
    _check_size(value, field, max_depth)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{field} holds a lone surrogate: not valid Unicode") from None
    except (TypeError, ValueError) as e:
        raise ValueError(f"{field} cannot be written as JSON: {e}") from None
    if len(text) > MAX_BYTES:
        raise ValueError(f"{field} is {len(text)} characters long, above the limit {MAX_BYTES}")
    return text


def _loads(text: str, field: str) -> object:
    if len(text) > MAX_BYTES:
        raise ValueError(f"{field} is {len(text)} characters long, above the limit {MAX_BYTES}")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{field} is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as e:
        raise ValueError(f"{field} is not valid JSON: {e}") from None


def _check_size(root: object, field: str, max_depth: int) -> None:
    """Level by level, and no further than MAX_BYTES characters certainly go."""
    level, length = [root], 0
    for _ in range(max_depth + 1):
        deeper: list[object] = []
        for node in level:
            parts: Iterable[object] = ()
            if isinstance(node, dict):
                length += 4 * len(node)
                parts = node.values()
            elif isinstance(node, list | tuple):
                length += len(node)
                parts = node
            elif isinstance(node, str):
                length += len(node)
            length += 1
            if length > MAX_BYTES:
                raise ValueError(f"{field} is too large, above the limit {MAX_BYTES} characters")
            if isinstance(node, dict):
                if not all(isinstance(key, str) for key in node):
                    raise ValueError(f"{field} has a key that is not a string")
                length += sum(map(len, node))
            deeper.extend(parts)
        level = deeper
        if not level:
            return
    raise ValueError(f"{field} is nested deeper than {max_depth} levels")


def _check_nodes(root: dict[str, Any]) -> None:
    targets: dict[str, list[Any]] = {}

    def target(node: dict[str, Any]) -> list[Any]:
        ref = node.get("$ref")
        if not isinstance(ref, str):
            return _target(root, node)
        if ref not in targets:
            targets[ref] = _target(root, node)
        return targets[ref]

    def everything(node: dict[str, Any]) -> list[Any]:
        return [*_children(node), *target(node)]

    def in_place(node: dict[str, Any]) -> list[Any]:
        parts = [part for key in _IN_PLACE for part in _as_list(node.get(key))]
        return [*parts, *target(node)]

    nodes, _ = _walk([root], everything)
    for node in nodes:
        _check_keywords(node, node is root)
    if _walk(nodes, in_place)[1]:
        raise _BadSchema("has a $ref that leads back to itself with nothing in between")
    if not is_finite(root, nodes, target):
        raise _BadSchema("has no finite value: it requires itself within itself")


def _check_keywords(node: dict[str, Any], is_root: bool) -> None:
    for key in _REFUSED:
        if key in node:
            raise _BadSchema(f"uses {key!r}, which is not supported")
    if "$id" in node and not is_root:
        raise _BadSchema("uses '$id' below its root, which is not supported")
    for key in _IN_PLACE:
        if key in node and not _as_list(node[key]):
            raise _BadSchema(f"has a {key!r} that is not a list of at least one schema")
    if "enum" in node and not _as_list(node["enum"]):
        raise _BadSchema("has an 'enum' that is not a list of at least one value")
    for value in (node.get("enum"), node.get("const")):
        if _has_control(value):
            raise _BadSchema("has an 'enum' or 'const' with a control character")
    least = node.get("minProperties", 0)
    required = node.get("required")
    certain = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > max(1, certain):
        # free names may repeat, and a repeated name counts once
        raise _BadSchema(
            "uses 'minProperties' above the number of required properties, which is not supported"
        )


def _has_control(value: object) -> bool:
    """Text that needs a unicode escape, which the grammar does not generate: escaped, a free key
    could spell a declared one."""
    if isinstance(value, str):
        return any((c < " " and c not in "\b\f\n\r\t") or c == "\x7f" for c in value)
    if isinstance(value, dict):
        return any(map(_has_control, [*value, *value.values()]))
    return isinstance(value, list) and any(map(_has_control, value))


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _children(node: dict[str, Any]) -> Iterator[Any]:
    for key in _LISTS:
        yield from _as_list(node.get(key))
    for key in _MAPS:
        part = node.get(key)
        if isinstance(part, dict):
            yield from part.values()
    for key in _SINGLE:
        if isinstance(node.get(key), dict):
            yield node[key]


def _target(root: dict[str, Any], node: dict[str, Any]) -> list[Any]:
    """The schema that the node's $ref names, as a list of none or one."""
    if "$ref" not in node:
        return []
    ref = node["$ref"]
    if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
        raise _BadSchema(f"has the $ref {show(ref)}: only '#' and '#/...' are supported")
    place: Any = root
    for part in unquote(ref[2:]).split("/") if ref != "#" else []:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and key in place:
            place = place[key]
        elif isinstance(place, list) and key.isdecimal() and len(key) < 7 and int(key) < len(place):
            place = place[int(key)]
        else:
            raise _BadSchema(f"has the $ref {show(ref)}, which leads nowhere")
    if not isinstance(place, dict | bool):
        raise _BadSchema(f"has the $ref {show(ref)}, which leads to no schema")
    return [place]


def show(value: object) -> str:
    """A value of a request in an error message: short, and always printable."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int) and abs(value) < 1 << 64:
        return repr(value)
    return type(value).__name__


def _walk(
    starts: list[dict[str, Any]], edges: Callable[[dict[str, Any]], list[Any]]
) -> tuple[list[dict[str, Any]], bool]:
    """Object schemas reachable from `starts`, children first; and whether there is a cycle.

    Iterative: chains of references may be longer than Python's stack.
    """
    done: list[dict[str, Any]] = []
    open_now: set[int] = set()
    seen: set[int] = set()
    cyclic = False
    for start in starts:
        if id(start) in seen:
            continue
        stack = [(start, iter(edges(start)))]
        seen.add(id(start))
        open_now.add(id(start))
        while stack:
            node, rest = stack[-1]
            for child in rest:
                cyclic |= id(child) in open_now
                if isinstance(child, dict) and id(child) not in seen:
                    seen.add(id(child))
                    open_now.add(id(child))
                    stack.append((child, iter(edges(child))))
                    break
            else:
                open_now.discard(id(node))
                done.append(node)
                stack.pop()
    return done, cyclic
