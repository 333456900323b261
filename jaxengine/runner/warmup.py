"""Which programs to compile before they are needed, in the order in which they will be."""

from __future__ import annotations

from collections.abc import Iterable

from jaxengine.runner.programs import Key
from jaxengine.sched.batch import Bucket


def warmup_keys(buckets: list[Bucket], row_sizes: Iterable[int]) -> list[Key]:
    """All programs. A short prompt and a lone decode come first, then the largest shapes: any
    batch fits those while its own is still compiling."""
    decode = [b for b in buckets if b.decode_only]
    mixed = [b for b in buckets if not b.decode_only]
    sizes = list(row_sizes)
    first = [
        Key("forward", mixed[0]),
        Key("sample", sizes[0]),
        Key("forward", decode[0]),
        Key("forward", mixed[-1]),
        Key("sample", sizes[-1]),
        Key("forward", decode[-1]),
    ]
    rest = [Key("forward", b) for b in (*mixed, *decode)]
    rest += [Key("sample", n) for n in sizes]
    rest += [Key("score", b.tokens) for b in mixed]
    return list(dict.fromkeys([*first, *rest, Key("seed")]))
