"""Programs to compile before they are needed, in the order in which they will be."""

from __future__ import annotations

from collections.abc import Sequence

from jaxengine.runner.draft.drafter import Drafter
from jaxengine.runner.programs import Key
from jaxengine.sched.buckets import in_halves
from jaxengine.sched.shapes import ProgramKey, StepShapes
from jaxengine.sched.verify_batch import verify_bucket


def first_keys(
    shapes: StepShapes,
    *,
    greedy: bool = False,
    token_by_token: bool = False,
) -> list[Key]:
    """The programs that a first short prompt and its decode need. `token_by_token`: no step has
    more than one token of a prompt, so that the decode program runs it."""
    decode = next(b for b in shapes.buckets if b.decode_only)
    mixed = next(b for b in shapes.buckets if not b.decode_only)
    sampler = Key("greedy" if greedy else "sample", shapes.row_sizes[0])
    keys = [Key("forward", mixed), sampler, Key("forward", decode)]
    return keys[1:] if token_by_token else keys


def warmup_keys(shapes: StepShapes) -> list[Key]:
    """All programs but those of drafts.

    After the first request's come the largest shapes: any batch fits those while its own is still
    compiling.
    """
    buckets, row_sizes = shapes.buckets, shapes.row_sizes
    decode = [b for b in buckets if b.decode_only]
    mixed = [b for b in buckets if not b.decode_only]
    largest = [
        Key("forward", mixed[-1]),
        Key("sample", row_sizes[-1]),
        Key("forward", decode[-1]),
    ]
    halves = in_halves(buckets, shapes.overlap)
    rest = [Key("forward", b) for b in (*mixed, *decode, *halves)]
    rest += [Key("sample", n) for n in row_sizes]
    rest += [Key("score", b.tokens) for b in mixed]
    rest += [Key("seed"), *(Key("pool", b.tokens) for b in mixed)]
    return list(dict.fromkeys([*first_keys(shapes), *largest, *rest]))


def draft_keys(
    shapes: StepShapes, drafts: Sequence[tuple[int, int]], drafter: Drafter | None
) -> list[Key]:
    """The programs that drafts add to every step, then steps with drafts of these (rows, K)."""
    # Notes first: they are taken after the first step already.
    steps: list[ProgramKey] = [("forward", b) for b in shapes.buckets]
    steps += [("sample", n) for n in shapes.row_sizes]
    keys = [key for step in steps for key in programs_of(step, drafter)[1:]]
    buckets = [verify_bucket(*shape) for shape in drafts]
    for bucket in buckets + in_halves(buckets, shapes.overlap):
        keys += programs_of(("verify", bucket), drafter)
    return keys


def programs_of(key: ProgramKey, drafter: Drafter | None) -> list[Key]:
    """The programs of a step with drafts, by ("verify", bucket), in their order; else the program
    itself, and what the drafter runs behind it."""
    kind, size = key
    if kind == "verify":
        keys = [Key("lookup" if drafter is None else "draft", size)]
        keys += [Key("verify", size), Key("accept", size)]
        if drafter is not None and drafter.layers is not None and drafter.reads_hidden:
            keys.append(Key("follow", size))
        return keys
    keys = [Key(*key)]  # type: ignore[arg-type]
    if drafter is not None and kind == "forward" and drafter.layers is not None:
        keys.append(Key("follow", size))
    if drafter is not None and kind in ("sample", "greedy") and drafter.remembers:
        keys.append(Key("remember", size))
    return keys
