"""Eviction policies of the host tier, by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from jaxengine.offload.policies.arc import ARCPolicy
from jaxengine.offload.policies.base import EvictionPolicy
from jaxengine.offload.policies.lru import LRUPolicy

ENTRY_POINTS = "jaxengine.offload_policies"
BUILT_IN: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LRUPolicy, "arc": ARCPolicy}


def make_policy(name: str, num_slots: int) -> EvictionPolicy:
    """A built-in policy, or one that an installed package offers as an entry point of the group
    jaxengine.offload_policies. Raises ValueError for an unknown name."""
    if name in BUILT_IN:
        return BUILT_IN[name](num_slots)
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join([*BUILT_IN, *sorted(found)])
        raise ValueError(f"eviction_policy must be one of {known}, got {name!r}")
    policy: EvictionPolicy = found[name].load()(num_slots)
    return policy
