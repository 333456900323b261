"""Where experts and copies of busy experts lie, computed from measured load. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Placement:
    """Slots of all devices, device after device. One layer, or leading axis L.

    `expert_of_slot` [P] is the expert whose weights lie in a slot. The slots of expert e are
    `slots` [E, R] at e, its first `copies` [E] entries; the rest repeats the first one.
    """

    expert_of_slot: Ints
    slots: Ints
    copies: Ints
    num_devices: int

    def device_load(self, load: Floats) -> Floats:
        """[num_devices] (or [L, num_devices]) load if every expert's is shared by its copies."""
        if self.expert_of_slot.ndim == 2:
            parts = [_layer(self, i).device_load(row) for i, row in enumerate(load)]
            return np.stack(parts)
        share = (load / self.copies)[self.expert_of_slot]
        total: Floats = share.reshape(self.num_devices, -1).sum(axis=1)
        return total


def _layer(placement: Placement, index: int) -> Placement:
    return Placement(
        placement.expert_of_slot[index],
        placement.slots[index],
        placement.copies[index],
        placement.num_devices,
    )


def place(load: Floats, num_devices: int, slots_per_device: int) -> Placement:
    """Give every expert a slot, spare slots to the busiest, and devices nearly equal load.

    `load` [E] or [L, E] holds tokens per expert, in any unit. Raises ValueError for load that is
    negative or not finite, and for fewer slots than experts.
    """
    load = np.asarray(load, np.float64)
    if load.ndim not in (1, 2):
        raise ValueError(f"load must be [E] or [L, E], not of shape {load.shape}")
    if not np.isfinite(load).all() or (load < 0).any():
        raise ValueError("load must be finite and not negative")
    experts, total = load.shape[-1], num_devices * slots_per_device
    if total < experts:
        raise ValueError(
            f"{num_devices} devices with {slots_per_device} slots have {total} slots, "
            f"fewer than {experts} experts"
        )
    if load.ndim == 1:
        return _place(load, num_devices, slots_per_device)
    layers = [_place(row, num_devices, slots_per_device) for row in load]
    most = max(p.slots.shape[1] for p in layers)
    return Placement(
        np.stack([p.expert_of_slot for p in layers]),
        np.stack([_widen(p.slots, most) for p in layers]),
        np.stack([p.copies for p in layers]),
        num_devices,
    )


def _widen(slots: Ints, width: int) -> Ints:
    extra = np.repeat(slots[:, :1], width - slots.shape[1], axis=1)
    return np.concatenate([slots, extra], axis=1)


def _place(load: Floats, num_devices: int, slots_per_device: int) -> Placement:
    experts = load.shape[0]
    copies = np.ones(experts, np.int32)
    for _ in range(num_devices * slots_per_device - experts):
        # More copies than devices would not spread an expert any further.
        open_ = copies < num_devices
        share = np.where(open_, load / copies, -1.0) if open_.any() else load / copies
        copies[int(np.argmax(share))] += 1
    # Longest processing time first, each copy to the least loaded device with a free slot.
    order = np.argsort(-(load / copies), kind="stable")
    used = np.zeros(num_devices)
    held: list[list[int]] = [[] for _ in range(num_devices)]
    for expert in order.tolist():
        for _ in range(int(copies[expert])):
            free = [d for d in range(num_devices) if len(held[d]) < slots_per_device]
            device = min(free, key=lambda d: (expert in held[d], used[d], len(held[d]), d))
            held[device].append(expert)
            used[device] += load[expert] / copies[expert]
    expert_of_slot = np.array([e for row in held for e in row], np.int32)
    slots = np.zeros((experts, int(copies.max())), np.int32)
    for expert in range(experts):
        own = np.flatnonzero(expert_of_slot == expert)
        slots[expert] = own[0]
        slots[expert, : len(own)] = own
    return Placement(expert_of_slot, slots, copies, num_devices)
