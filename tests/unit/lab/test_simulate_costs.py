"""Device models: the table's fit and file, the roofline's bytes and bounds."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from testdata import CONFIGS

from jaxengine.lab.aot import aot
from jaxengine.lab.simulate import roofline
from jaxengine.lab.simulate.cost import StepShape
from jaxengine.lab.simulate.gpus import GPUS, gpu_of
from jaxengine.lab.simulate.roofline import Roofline
from jaxengine.lab.simulate.table import Sample, Table, Work, fit, interpolate, load_table
from jaxengine.models.families import spec_from_config
from jaxengine.models.spec import DecoderSpec
from jaxengine.runner import kv_room
from jaxengine.sched.batch import Bucket


def shape(contexts: list[int] = [], chunks: list[tuple[int, int]] = []) -> StepShape:  # noqa: B006
    starts, counts = zip(*chunks, strict=True) if chunks else ((), ())
    return StepShape(
        np.array(contexts, np.int64), np.array(starts, np.int64), np.array(counts, np.int64)
    )


# -- the table --------------------------------------------------------------------------------


def test_work_is_what_the_loops_do() -> None:
    # Turns of two rows wait for the longer one; contexts go in whole chunks of 128.
    contexts = shape([100, 200, 10])
    assert Work.of(contexts, Bucket(4, 4, True), 2, 4) == Work(2 * 256 + 2 * 128, 0, 0)
    # 200 queries behind 100 tokens: 128 of them see up to 256, all see up to 384 tokens.
    prompt = shape(chunks=[(100, 200)])
    assert Work.of(prompt, Bucket(256, 8, False), 8, 1) == Work(0, 128 * (256 + 384), 1)


def samples() -> list[Sample]:
    """Steps of a device that is exactly linear, and some disturbed ones."""
    found = []
    for tokens in (1, 2, 4):
        for context in (128, 256, 1024):
            work = Work(tokens * context, 0, 0)
            device = 0.01 * tokens + 1e-6 * work.decode_tokens
            plan = 1e-3 + 1e-4 * tokens
            one = Sample(tokens, True, tokens, 0, 0, work, plan, device, 2e-3)
            found += [one] * 5 + [dataclasses.replace(one, device_s=5 * device)]
    for tokens in (64, 128):
        for pairs, rows in ((128 * 128, 1), (128 * 512, 1), (128 * 128, 8)):
            work = Work(0, pairs, rows)
            device = 0.02 * tokens + 3e-7 * pairs + 1e-3 * rows
            plan = 1e-3 + 1e-4 * rows + 1e-5 * tokens
            found.append(Sample(tokens, False, rows, 1, tokens, work, plan, device, 2e-3))
    return found


def table(**changes: Any) -> Table:
    engine = {
        "max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 2048,
        "block_size": 16, "num_blocks": 64, "windows": [0],
    }  # fmt: skip
    made = Table(
        model="m", machine="x", engine=engine, depth=2, rows_per_turn=8, byte_s=1e-9,
        page_bytes=(64,), **fit(samples()),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def test_the_fit_finds_the_device() -> None:
    found = fit(samples())
    assert found["decode"] == pytest.approx({1: 0.01, 2: 0.02, 4: 0.04})
    assert found["mixed"] == pytest.approx({64: 1.28, 128: 2.56})
    assert found["decode_token_s"] == pytest.approx(1e-6)
    assert found["prefill_pair_s"] == pytest.approx(3e-7)
    assert found["sampler_row_s"] == pytest.approx(1e-3)
    assert found["plan_s"] == pytest.approx((1e-3, 1e-4, 0, 1e-5), abs=1e-9)
    assert found["finish_s"] == pytest.approx((2e-3, 0), abs=1e-9)
    assert found["residual"] == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match="prefill"):
        fit([s for s in samples() if s.decode_only])


def test_no_fitted_time_is_negative() -> None:
    """Steps that get shorter with their context cannot be: the slope is 0 then."""
    odd = [
        Sample(1, True, 1, 0, 0, Work(128 * i, 0, 0), 1e-3, 0.02 / i, 1e-3) for i in range(1, 5)
    ] + [Sample(64, False, 1, 1, 64, Work(0, 128, 1), 1e-3, 0.1, 1e-3)]
    found = fit(odd)
    assert found["decode_token_s"] == 0.0 and found["decode"][1] > 0


def test_a_step_costs_what_was_measured() -> None:
    cost = table().step(shape([1000, 1000]))
    assert cost.device_s == pytest.approx(0.02 + 1e-6 * 2 * 1024)
    assert cost.plan_s == pytest.approx(1e-3 + 2e-4) and cost.bound == "decode"
    mixed = table().step(shape([100], [(0, 100)]))
    # 101 tokens: the bucket of 128. Two rows: the sampler of two. Turns of four rows at least.
    assert mixed.device_s == pytest.approx(2.56 + 3e-7 * 128 * 128 + 2e-3 + 1e-6 * 4 * 128)
    with pytest.raises(ValueError, match="bucket"):
        table().step(shape(chunks=[(0, 500)]))


def test_shapes_between_measured_ones() -> None:
    assert interpolate({1: 1.0, 4: 4.0, 8: 6.0}, 6) == pytest.approx(5.0)
    assert interpolate({1: 1.0, 4: 4.0}, 16) == pytest.approx(16.0)
    assert interpolate({4: 4.0, 8: 6.0}, 1) == pytest.approx(4.0)


def test_the_file_gives_the_table_back(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "t.json"
    table().save(path)
    assert load_table(path) == table()
    fields = json.loads(path.read_text())
    for wrong, message in (
        ("x", "not JSON"),
        ("[]", "no table"),
        (json.dumps({**fields, "format": 9}), "no table"),
        (json.dumps({**fields, "extra": 1}), "damaged"),
        (json.dumps({**fields, "decode": {"x": 1}}), "damaged"),
    ):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=message):
            load_table(path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_table(tmp_path / "none.json")


# -- the roofline -----------------------------------------------------------------------------


def llama_8b() -> DecoderSpec:
    return DecoderSpec(
        family="llama", vocab_size=128256, num_layers=32, hidden_size=4096, num_heads=32,
        num_kv_heads=8, head_dim=128, ffn_size=14336, max_position=131072,
    )  # fmt: skip


def test_a_lone_decode_reads_the_weights() -> None:
    model = Roofline(llama_8b(), gpu_of("h100"), efficiency=1.0, memory_efficiency=1.0)
    cost = model.step(shape([1]))
    least = (model.weight_bytes - 2 * 128256 * 4096) / gpu_of("h100").memory  # without embedding
    launches = (32 * (4 + 4) + 1) * 3e-6
    assert least < cost.device_s < least + launches + 1e-4
    assert cost.bound == "memory"


def test_a_long_prompt_computes() -> None:
    model = Roofline(llama_8b(), gpu_of("h100"), efficiency=0.5)
    cost = model.step(shape(chunks=[(0, 8192)]))
    flops = 2 * 6.98e9 * 8192 + 32 * 4 * 32 * 128 * 8192 * 4096
    assert cost.device_s == pytest.approx(flops / (0.5 * 989.4e12), rel=0.05)
    assert cost.bound == "compute"


def test_times_grow_with_the_work() -> None:
    model = Roofline(llama_8b(), gpu_of("a100"))
    rows = [model.step(shape([1000] * n)).device_s for n in (1, 8, 64, 256)]
    contexts = [model.step(shape([n] * 64)).device_s for n in (100, 1000, 10000)]
    assert rows == sorted(rows) and contexts == sorted(contexts)
    faster = Roofline(llama_8b(), gpu_of("h200")).step(shape([1000] * 64)).device_s
    assert faster < rows[2]


def test_devices_share_and_talk() -> None:
    one = Roofline(llama_8b(), gpu_of("h100"))
    four = Roofline(llama_8b(), gpu_of("h100"), tensor_parallel=4)
    assert four.step(shape([1000] * 64)).device_s < one.step(shape([1000] * 64)).device_s
    assert four.weight_bytes == one.weight_bytes // 4
    assert four.kv_blocks(64) > 4 * one.kv_blocks(64)
    # Two sums a layer, each twelve microseconds at least.
    slow = dataclasses.replace(gpu_of("h100"), collective_latency=1e-3)
    talk = Roofline(llama_8b(), slow, tensor_parallel=4).step(shape([1]))
    assert talk.device_s > 64e-3 and talk.bound == "communication"


def test_a_window_bounds_what_is_read() -> None:
    plain = Roofline(llama_8b(), gpu_of("h100"))
    windowed = Roofline(dataclasses.replace(llama_8b(), windows=(128,) * 32), gpu_of("h100"))
    long = shape([30000] * 32)
    assert windowed.step(long).device_s == windowed.step(shape([128] * 32)).device_s
    assert windowed.step(long).device_s < plain.step(long).device_s


def test_sizes_and_mistakes() -> None:
    model = Roofline(llama_8b(), gpu_of("h100"))
    assert model.token_bytes == 32 * 2 * 8 * 128 * 2
    with pytest.raises(ValueError, match="does not fit"):
        Roofline(dataclasses.replace(llama_8b(), num_layers=400), gpu_of("l40s")).kv_blocks(64)
    with pytest.raises(ValueError, match="float8"):
        Roofline(llama_8b(), gpu_of("a100"), dtype="float8")
    with pytest.raises(ValueError, match="efficiency"):
        Roofline(llama_8b(), gpu_of("a100"), efficiency=0.0)
    with pytest.raises(ValueError, match="3 devices"):
        Roofline(llama_8b(), gpu_of("a100"), tensor_parallel=3)
    with pytest.raises(ValueError, match="device must be one of a100"):
        gpu_of("h1000")
    assert roofline.RESERVE == kv_room.RESERVE


def test_figures_agree_with_the_compilers_targets() -> None:
    for name, target in aot.TARGETS.items():
        known = GPUS[name]
        sizes = known.memory_bytes, known.memory
        assert sizes == (target.memory, target.bandwidth), name


@pytest.mark.parametrize("devices", [1, 4])
def test_published_models(devices: int) -> None:
    for folder in sorted(p for p in CONFIGS.iterdir() if p.is_dir()):
        spec = spec_from_config(json.loads((folder / "config.json").read_text()))
        expected = json.loads((folder / "expected.json").read_text())
        if devices > 1 and (spec.num_heads % devices or spec.num_kv_heads % devices):
            continue
        model = Roofline(spec, gpu_of("b200"), devices, expert_parallel=spec.moe is not None)
        assert model.weight_bytes == expected["bytes_bf16"] // devices, folder.name
        if devices == 1:
            assert model.token_bytes == expected["kv_bytes_per_token_bf16"], folder.name
        cost = model.step(shape([1000] * 8, [(0, 512)]))
        active = expected["param_count_active_per_token"]
        # Each token's share of the weights is multiplied at least; and no step takes seconds.
        assert 2 * active * 0.3 / devices / 2250e12 < cost.device_s < 1.0, folder.name
