"""Placement of experts and copies of busy ones."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from jaxengine.parallel import eplb, expert_load


def check(placed: eplb.Placement, experts: int, devices: int, slots: int) -> None:
    assert placed.expert_of_slot.shape == (devices * slots,)
    assert set(placed.expert_of_slot.tolist()) == set(range(experts))
    assert placed.copies.sum() == devices * slots and placed.copies.min() >= 1
    for expert in range(experts):
        own = placed.slots[expert, : placed.copies[expert]]
        assert len(set(own.tolist())) == placed.copies[expert]
        assert (placed.expert_of_slot[own] == expert).all()
        assert np.isin(placed.slots[expert], own).all()


def test_skewed_load_is_balanced() -> None:
    load = np.random.default_rng(0).permutation(1.0 / np.arange(1, 129))
    placed = eplb.place(load, 8, 18)  # 16 spare slots
    check(placed, 128, 8, 18)
    busiest = placed.device_load(load).max() / placed.device_load(load).mean()
    plain = load.reshape(8, 16).sum(1)
    assert busiest < 1.05 < plain.max() / plain.mean()
    # Copies of one expert lie on different devices, or they would not help.
    devices = placed.slots[load.argmax(), : placed.copies[load.argmax()]] // 18
    assert len(set(devices.tolist())) == len(devices) > 1


def test_layers_are_placed_apart() -> None:
    load = np.array([[9.0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]])
    placed = eplb.place(load, 2, 3)
    for layer, row in enumerate(load):
        alone = eplb.place(row, 2, 3)
        assert (placed.expert_of_slot[layer] == alone.expert_of_slot).all()
        assert (placed.copies[layer] == alone.copies).all()
    assert placed.copies[0, 0] == 2  # never more copies than devices while others have fewer
    assert placed.device_load(load).shape == (3, 2)
    again = eplb.place(load, 2, 3)
    assert (again.slots == placed.slots).all()


def test_without_spare_slots_every_expert_has_one() -> None:
    check(eplb.place(np.ones(16), 8, 2), 16, 8, 2)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (np.ones(17), "16 slots, fewer than 17 experts"),
        (np.array([1.0, -1.0]), "finite and not negative"),
        (np.array([1.0, np.nan]), "finite and not negative"),
        (np.ones((1, 1, 4)), "must be"),
    ],
)
def test_bad_load_is_refused(load: eplb.Floats, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        eplb.place(load, 8, 2)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ([[0, 0], [0, 0]], "counts no token of any expert; record it"),
        ([[1, 2]], r"counts \(1, 2\) layers and experts"),
        ("x", "cannot be read"),
    ],
    ids=str,
)
def test_a_load_file_that_says_nothing_is_refused(
    tokens: object, why: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"tokens": tokens}))
    with pytest.raises(ValueError, match=f"^eplb_load {path} {why}"):
        expert_load.read(str(path), 2, 2)
    path.write_text(json.dumps({"tokens": [[0, 0], [0, 7]]}))  # a layer without experts counts none
    assert expert_load.read(str(path), 2, 2).sum() == 7
