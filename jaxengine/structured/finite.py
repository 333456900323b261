"""Whether some value of finite length satisfies a schema: without one, generation could never end.

A schema can end when each of its parts that must be there can. Every such condition is a gate that
opens when enough of what it waits for has; the time is linear in the schema, however it recurs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

Schema = dict[str, Any]


class _Gate:
    """Opens when `left` more have opened; then `into` is told, a gate or a schema."""

    __slots__ = ("into", "left")

    def __init__(self, left: int, into: _Gate | Schema) -> None:
        self.left = left
        self.into = into


class _Gates:
    def __init__(self) -> None:
        self.open: list[_Gate] = []
        self.waiting: dict[int, list[_Gate]] = {}  # by the id of the schema that they wait for

    def add(
        self, into: _Gate | Schema, needed: Sequence[Any], least: Literal["all", "any"]
    ) -> None:
        """A gate for schemas that are not known to end yet; any other value ends."""
        unknown = [schema for schema in needed if isinstance(schema, dict)]
        if least == "any":
            gate = _Gate(1 if len(unknown) == len(needed) else 0, into)
        else:
            gate = _Gate(len(unknown), into)
        for schema in unknown:
            self.waiting.setdefault(id(schema), []).append(gate)
        if gate.left == 0:
            self.open.append(gate)

    def run(self) -> set[int]:
        """Open all that open; the ids of the schemas that can end."""
        finite: set[int] = set()
        while self.open:
            into = self.open.pop().into
            if isinstance(into, _Gate):
                told = [into]
            elif id(into) not in finite:
                finite.add(id(into))
                told = self.waiting.get(id(into), [])
            else:
                told = []
            for gate in told:
                gate.left -= 1
                if gate.left == 0:
                    self.open.append(gate)
        return finite


def is_finite(root: Schema, nodes: Sequence[Schema], target: Callable[[Schema], list[Any]]) -> bool:
    """`nodes` are all schemas that the root reaches, itself among them; `target` gives what a
    schema's $ref names, as a list of none or one."""
    gates = _Gates()
    for node in nodes:
        kinds = _kinds(node)
        choices = [node[key] for key in ("anyOf", "oneOf") if key in node]
        top = _Gate(1 + len(choices) + (1 if kinds else 0), node)
        gates.add(top, [*target(node), *_as_list(node.get("allOf"))], "all")
        for parts in choices:
            gates.add(top, parts, "any")
        if kinds:
            either = _Gate(1, top)
            for kind in kinds:
                gates.add(either, _members(node) if kind == "object" else _items(node), "all")
    return id(root) in gates.run()


def _kinds(node: Schema) -> set[str]:
    """Of object and array, where it can be nothing else and no value is given."""
    kind = node.get("type")
    kinds = {kind} if isinstance(kind, str) else set(map(str, _as_list(kind)))
    free = "const" in node or "enum" in node or kinds - {"object", "array"}
    return set() if free else kinds


def _members(node: Schema) -> list[Any]:
    properties = node.get("properties")
    named = properties if isinstance(properties, dict) else {}
    other = node.get("additionalProperties")
    names = [name for name in _as_list(node.get("required")) if isinstance(name, str)]
    return [named.get(name, other) for name in names]


def _items(node: Schema) -> list[Any]:
    least = node.get("minItems", 0)
    if not isinstance(least, int) or least <= 0:
        return []
    items = node.get("items")
    first = _as_list(node.get("prefixItems")) or _as_list(items)
    rest = node.get("additionalItems") if isinstance(items, list) else items
    return [*first[:least], *([rest] if least > len(first) else [])]


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
