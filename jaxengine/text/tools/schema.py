"""The tools of a request as parsers need them: which names there are, and what types their
arguments may have, however the JSON schema says so ($ref, anyOf, enum, lists of types, ...)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import unquote

Types = frozenset[str]

_MAX_DEPTH = 200  # of references and combinations
_MAX_PARTS = 512  # schemas that one place may be made of
# what a schema without a type must be about, by the keywords it uses
_HINTS = {
    "object": ("properties", "additionalProperties", "patternProperties", "required"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_PREFIXES = ("functions.", "function.", "tools.", "tool.")


class Shape:
    """One place of a schema: what a value there may be.

    `types` are JSON schema's names, "number" always with "integer"; None: nothing is known.
    `values` are those of enum and const; `keys` the properties that are named, None without any.
    """

    def __init__(self, node: Any, root: Any) -> None:
        self._node = node
        self._root = root

    @cached_property
    def types(self) -> Types | None:
        return _types(self._node, self._root, {}, 0) or None

    @cached_property
    def values(self) -> tuple[Any, ...]:
        found: list[Any] = []
        for part in _parts(self._node, self._root):
            found += _list(part.get("enum"))
            if "const" in part:
                found.append(part["const"])
        return tuple(found)

    @cached_property
    def keys(self) -> tuple[str, ...] | None:
        found: dict[str, None] = {}
        for part in _parts(self._node, self._root):
            found.update(dict.fromkeys(_map(part.get("properties"))))
        return tuple(found) or None

    def member(self, key: str) -> Shape:
        """The property's."""
        named: list[Any] = []
        others: list[Any] = []
        for part in _parts(self._node, self._root):
            properties = _map(part.get("properties"))
            if key in properties:
                named.append(properties[key])
            elif isinstance(part.get("additionalProperties"), Mapping):
                others.append(part["additionalProperties"])
        return _one_of(named or others, self._root)

    def item(self, index: int) -> Shape:
        """The list's element's."""
        found: list[Any] = []
        for part in _parts(self._node, self._root):
            first = _list(part.get("prefixItems"))
            if index < len(first):
                found.append(first[index])
            elif isinstance(part.get("items"), Mapping):
                found.append(part["items"])
        return _one_of(found, self._root)


ANY = Shape({}, {})


class Tools:
    """Those of a request."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._parameters: dict[str, Any] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._parameters[function["name"]] = function.get("parameters")

    def find(self, name: str) -> str | None:
        """The function that a written name stands for: models add blanks and "functions."."""
        name = name.strip()
        if name in self._parameters:
            return name
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                return self.find(name.removeprefix(prefix))
        return None

    def shape(self, name: str) -> Shape:
        """Of the function's arguments."""
        parameters = self._parameters.get(name)
        return Shape(parameters, parameters) if isinstance(parameters, Mapping) else ANY


def type_of(value: Any) -> str:
    """JSON schema's name for the type of a decoded JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == value // 1 else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _types(node: Any, root: Any, memo: dict[int, Types | None], depth: int) -> Types | None:
    """`memo` by the identity of a node; one that is still being worked out has no types in there:
    a reference to itself adds nothing."""
    if not isinstance(node, Mapping) or depth > _MAX_DEPTH:
        return None
    if id(node) in memo:
        return memo[id(node)]
    memo[id(node)] = frozenset()
    said = [_direct(node)]
    if "$ref" in node:
        said.append(_types(_target(node["$ref"], root), root, memo, depth + 1))
    said += [_types(part, root, memo, depth + 1) for part in _list(node.get("allOf"))]
    for key in ("anyOf", "oneOf"):
        options = [_types(part, root, memo, depth + 1) for part in _list(node.get(key))]
        known = [option for option in options if option is not None]
        if len(known) == len(options):
            said.append(frozenset().union(*known))
    found: Types | None = None
    for types in said:
        if types:
            # what contradicts itself says nothing new
            found = types if found is None else (found & types) or found
    if found is None:
        found = _hinted(node)
    if found is None and frozenset() in said:
        found = frozenset()
    if found and node.get("nullable") is True:
        found |= {"null"}
    memo[id(node)] = found
    return found


def _direct(node: Mapping[str, Any]) -> Types | None:
    kinds = node.get("type")
    named = [kinds] if isinstance(kinds, str) else _list(kinds)
    found = frozenset(kind for kind in named if isinstance(kind, str))
    if not found:
        values = _list(node.get("enum")) + ([node["const"]] if "const" in node else [])
        found = frozenset(map(type_of, values))
    if "number" in found:
        found |= {"integer"}
    return found or None


def _hinted(node: Mapping[str, Any]) -> Types | None:
    for kind, keywords in _HINTS.items():
        if any(keyword in node for keyword in keywords):
            return frozenset({kind, "integer"} if kind == "number" else {kind})
    return None


def _parts(node: Any, root: Any) -> Iterator[Mapping[str, Any]]:
    """The schemas that a place is made of, through references and combinations."""
    waiting, seen = [node], set[int]()
    while waiting and len(seen) < _MAX_PARTS:
        part = waiting.pop(0)
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if "$ref" in part:
            waiting.append(_target(part["$ref"], root))
        for key in ("allOf", "anyOf", "oneOf"):
            waiting += _list(part.get(key))


def _target(reference: Any, root: Any) -> Any:
    """What a reference inside the schema points to; None if there is nothing."""
    if not isinstance(reference, str):
        return None
    if not reference.startswith("#") or (len(reference) > 1 and reference[1] != "/"):
        for key in ("$defs", "definitions"):
            for part in _map(_map(root).get(key)).values():
                named = (f"#{_map(part).get('$anchor')}", _map(part).get("$id"))
                if reference in named:
                    return part
        return None
    node = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(step)
        elif isinstance(node, list) and step.isdecimal() and int(step) < len(node):
            node = node[int(step)]
        else:
            return None
    return node


def _one_of(nodes: list[Any], root: Any) -> Shape:
    if not nodes:
        return ANY
    return Shape(nodes[0] if len(nodes) == 1 else {"anyOf": nodes}, root)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
