"""What one page is: the bytes of one block of one KV group, in canonical order.

Canonical bytes are, for every layer of the group in ascending order, [2, G, P, C] in C order
(keys, then values) in the cache's dtype; latent caches have [P, X] a layer. They do not depend on
how the cache is laid out or sharded, so any engine of the same namespace can read them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Kind = Literal["token_major", "head_major", "latent"]

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


@dataclass(frozen=True)
class KVLayout:
    """Shape letters: N blocks, P block size, G kv heads, C head width, X latent width.

    kind: "token_major", a layer is (keys, values) of [N, P, G*C] each; "head_major", one
    [N, 2, G, P, C]; "latent", one [N, P, X], where `head_dim` is X and `kv_heads` is 1.
    """

    layer_group: tuple[int, ...]  # [num_layers] KV group of each layer
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    kind: Kind = "token_major"

    def __post_init__(self) -> None:
        """Raises ValueError that names the field."""
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")
        if self.kind not in ("token_major", "head_major", "latent"):
            raise ValueError(f"kind must be token_major, head_major or latent, got {self.kind!r}")
        for name in ("block_size", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        groups = sorted(set(self.layer_group))
        if not groups or groups != list(range(len(groups))):
            raise ValueError(f"layer_group must name groups 0, 1, ... without a gap, got {groups}")
        if self.kind == "latent" and self.kv_heads != 1:
            raise ValueError(f"a latent cache has kv_heads 1, got {self.kv_heads}")

    @property
    def num_layers(self) -> int:
        return len(self.layer_group)

    @property
    def num_groups(self) -> int:
        return max(self.layer_group) + 1

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def layers_of(self, group: int) -> tuple[int, ...]:
        return tuple(i for i, own in enumerate(self.layer_group) if own == group)

    def page_shape(self, group: int) -> tuple[int, ...]:
        """Elements of a canonical page: [layers, 2, G, P, C], or [layers, P, X]."""
        layers = len(self.layers_of(group))
        if self.kind == "latent":
            return (layers, self.block_size, self.head_dim)
        return (layers, 2, self.kv_heads, self.block_size, self.head_dim)

    def page_bytes(self, group: int) -> int:
        size = self.item_bytes
        for dim in self.page_shape(group):
            size *= dim
        return size

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest group's page: what a slot of the host pool must hold."""
        return max(self.page_bytes(group) for group in range(self.num_groups))

    def facts(self) -> dict[str, object]:
        """For the namespace. `kind` is not among them: pages are canonical; nor is any sharding."""
        facts = asdict(self)
        latent = facts.pop("kind") == "latent"
        return {**facts, "layer_group": list(self.layer_group), "latent": latent}
