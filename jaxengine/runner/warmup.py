"""Which programs to compile before they are needed, in the order in which they will be."""

from __future__ import annotations

from collections.abc import Sequence

from jaxengine.runner.programs import Key
from jaxengine.sched.batch import Bucket


def first_keys(
    buckets: list[Bucket],
    row_sizes: Sequence[int],
    *,
    greedy: bool = False,
    token_by_token: bool = False,
) -> list[Key]:
    """What a first short prompt and its decode need. `token_by_token`: no step has more than one
    token of a prompt, so that the decode program runs it."""
    decode = next(b for b in buckets if b.decode_only)
    mixed = next(b for b in buckets if not b.decode_only)
    sampler = Key("greedy" if greedy else "sample", row_sizes[0])
    keys = [Key("forward", mixed), sampler, Key("forward", decode)]
    return keys[1:] if token_by_token else keys


def warmup_keys(
    buckets: list[Bucket], row_sizes: Sequence[int], halves: Sequence[Bucket] = ()
) -> list[Key]:
    """All programs; `halves` are the buckets' programs of two microbatches.

    After the first request's come the largest shapes: any batch fits those while its own is still
    compiling.
    """
    decode = [b for b in buckets if b.decode_only]
    mixed = [b for b in buckets if not b.decode_only]
    largest = [
        Key("forward", mixed[-1]),
        Key("sample", row_sizes[-1]),
        Key("forward", decode[-1]),
    ]
    rest = [Key("forward", b) for b in (*mixed, *decode, *halves)]
    rest += [Key("sample", n) for n in row_sizes]
    rest += [Key("score", b.tokens) for b in mixed]
    rest += [Key("seed"), *(Key("pool", b.tokens) for b in mixed)]
    order = [*first_keys(buckets, row_sizes), *largest, *rest]
    return list(dict.fromkeys(order))
