"""Reading a compiled program: which collectives it has, and what is scheduled beside each.

The text is XLA's scheduled HLO (`compiled.as_text()` of a GPU program): the order of lines is the
order of launches, and an asynchronous collective runs from its start to its done.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COLLECTIVES = (
    "all-to-all",
    "ragged-all-to-all",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "collective-permute",
    "collective-broadcast",
)
_BYTES = {  # of an element; anything else is an 8-bit float
    **dict.fromkeys(("s4", "u4"), 0.5),
    **dict.fromkeys(("pred", "s8", "u8"), 1),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")

Shape = tuple[str, tuple[int, ...]]  # element type, dimensions


@dataclass(frozen=True)
class Instruction:
    """One line. `shapes` are the arrays of the result, `attributes` the text after operands."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def called(self) -> tuple[str, ...]:
        found = _CALLED.findall(self.attributes)
        for group in _BRANCHES.findall(self.attributes):
            found += [n.strip().lstrip("%") for n in group.split(",")]
        return tuple(found)


@dataclass(frozen=True)
class Program:
    """Computations by name, each in scheduled order."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]]


@dataclass(frozen=True)
class Pair:
    """One collective: what it is, the FLOPs of matrix products launched while it runs, the
    products' instructions, and the bytes of its result. A synchronous one has none."""

    op: str
    name: str
    flops_between: float
    bytes: int
    products: tuple[str, ...] = ()
    synchronous: bool = False


# FLOPs of a custom call from the shapes of its operands; None where this is no matrix product.
Hint = Callable[[Instruction, list[Shape]], float | None]


def parse(text: str) -> Program:
    """Raises ValueError where the text has no entry computation."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name = "", ""
    lines: list[Instruction] = []
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name, lines = head.group(1), []
            if line.startswith("ENTRY"):
                entry = name
        elif line.startswith("}") and name:
            computations[name], name = tuple(lines), ""
        elif name and (match := _LINE.match(line)):
            lines.append(_instruction(match.group(1), match.group(2)))
    if not entry:
        raise ValueError("the text is no HLO module: it has no ENTRY computation")
    return Program(entry, computations)


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    open_ = rest.index("(")
    close = _closing(rest, open_)
    operands = re.findall(r"%([\w.\-]+)", rest[open_ + 1 : close])
    return Instruction(name, rest[:open_], _shapes(shape), tuple(operands), rest[close + 1 :])


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text) - 1


def _shapes(text: str) -> tuple[Shape, ...]:
    found = _ARRAY.findall(text)
    return tuple((kind, tuple(int(d) for d in dims.split(",") if d)) for kind, dims in found)


def _size(dims: tuple[int, ...]) -> int:
    total = 1
    for d in dims:
        total *= d
    return total


def _num_bytes(shape: Shape) -> int:
    return int(_BYTES.get(shape[0], 1) * _size(shape[1]))


def expert_kernel_flops(call: Instruction, operands: list[Shape]) -> float | None:
    """A Mosaic call on rows [R, K] and weights [E, N, K] multiplies every row once."""
    if "mosaic" not in call.attributes:
        return None
    rows = next((d for _, d in operands if len(d) == 2), None)
    weights = next((d for _, d in operands if len(d) == 3), None)
    if rows is None or weights is None or rows[1] != weights[2]:
        return None
    return 2.0 * rows[0] * rows[1] * weights[1]


def flops(program: Program, item: Instruction, computation: str, hint: Hint) -> float:
    """FLOPs of matrix products in one instruction, called computations included."""
    if item.opcode in ("fusion", "call", "async-start"):
        return sum(_total(program, name, hint) for name in item.called)
    if item.opcode == "conditional":
        return max((_total(program, name, hint) for name in item.called), default=0.0)
    if item.opcode == "while":
        trips = re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', item.attributes)
        once = sum(_total(program, name, hint) for name in item.called)
        return once * (int(trips.group(1)) if trips else 1)
    if item.opcode not in ("dot", "custom-call", "ragged-dot"):
        return 0.0
    by_name = {i.name: i for i in program.computations[computation]}
    operands = [s for o in item.operands if o in by_name for s in by_name[o].shapes[:1]]
    if item.opcode == "custom-call" and "cublas" not in item.attributes:
        return hint(item, operands) or 0.0
    depth = re.search(r"lhs_contracting_dim\w*\"?[=:][{\[]([\d,\"]*)[}\]]", item.attributes)
    if depth is None or not operands or not item.shapes:
        return 0.0
    contracted = [int(d) for d in depth.group(1).replace('"', "").split(",") if d]
    k = _size(tuple(operands[0][1][d] for d in contracted))
    return 2.0 * _size(item.shapes[0][1]) * k


def _total(program: Program, computation: str, hint: Hint) -> float:
    items = program.computations.get(computation, ())
    return sum(flops(program, item, computation, hint) for item in items)


def _launched(program: Program, computation: str) -> Iterator[str]:
    """The computation and, once a call, those that run inside it as sequences of launches."""
    yield computation
    for item in program.computations.get(computation, ()):
        if item.opcode in ("while", "call", "conditional"):
            for name in item.called:
                yield from _launched(program, name)


def _collective(program: Program, item: Instruction) -> str:
    """The collective that an instruction starts or runs; "" if none."""
    if item.opcode in COLLECTIVES:
        return item.opcode
    if item.opcode == "async-start":
        inside = [i.opcode for n in item.called for i in program.computations.get(n, ())]
        return next((op for op in inside if op in COLLECTIVES), "")
    base = item.opcode.removesuffix("-start")
    return base if base != item.opcode and base in COLLECTIVES else ""


def overlap_report(text: str, hint: Hint = expert_kernel_flops) -> list[Pair]:
    """Every collective of the program with what is scheduled between its start and its done."""
    program = parse(text)
    found = []
    for computation in _launched(program, program.entry):
        items = program.computations.get(computation, ())
        for at, item in enumerate(items):
            op = _collective(program, item)
            if not op:
                continue
            last = _done(items, at)
            bytes_ = sum(_num_bytes(s) for s in (items[last].shapes if last else item.shapes))
            if last == 0 or re.search(r'is_sync\\?":\s*true', item.attributes):
                found.append(Pair(op, item.name, 0.0, bytes_, (), True))
                continue
            work = [(i.name, flops(program, i, computation, hint)) for i in items[at + 1 : last]]
            products = tuple(name for name, f in work if f > 0)
            found.append(Pair(op, item.name, sum(f for _, f in work), bytes_, products))
    return found


def _done(items: tuple[Instruction, ...], start: int) -> int:
    """Index of the instruction that waits for `start`; 0 for a synchronous collective."""
    if not items[start].opcode.endswith("-start"):
        return 0
    waiting = {items[start].name}
    for at in range(start + 1, len(items)):
        if waiting & set(items[at].operands):
            if items[at].opcode.endswith("-done"):
                return at
            if items[at].opcode.endswith("-update"):
                waiting.add(items[at].name)
    return 0


def count_collectives(text: str) -> dict[str, int]:
    """How many of each collective one run launches (a loop's body counts once)."""
    return dict(Counter(pair.op for pair in overlap_report(text)))
