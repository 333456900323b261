"""The benches with an engine in this process, small, and what their files hold."""

from __future__ import annotations

import importlib
import json
import pathlib
from typing import Any

import pytest
from safetensors.numpy import load_file
from testdata import GOLDENS

from jaxengine.engine.core import EngineCore
from jaxengine.lab.bench.batch import random_prompts, run_batch
from jaxengine.lab.bench.flags import engine_config
from jaxengine.lab.bench.flatten import flatten
from jaxengine.lab.bench.floor import num_weights
from jaxengine.weights.load import load_spec
from jaxengine.weights.resolve import resolve_model
from jaxengine.wire.messages import EngineOutput, EngineRequest, EngineStats

LLAMA = GOLDENS / "llama"
SMALL = ["--model", str(LLAMA), "--warmup", "lazy"]


def run(name: str, argv: list[str], folder: pathlib.Path) -> dict[str, Any]:
    path = folder / f"{name}.json"
    bench = importlib.import_module(f"jaxengine.lab.bench.{name}")
    assert bench.main([*argv, "--output-json", str(path)]) == 0
    content: dict[str, Any] = json.loads(path.read_text())
    assert content["bench"] == name and content["machine"]["versions"]["jax"]
    return content


class FakeCore:
    """Two requests; the second gets its first token two steps after the first."""

    script = ({"0": [5]}, {"0": [6]}, {"0": [7], "1": [8]}, {"1": [9, 10]})

    def __init__(self) -> None:
        self.scheduler = self
        self.resets = 0
        self.requests: list[EngineRequest] = []
        self.counts = EngineStats(num_steps=10, host_seconds=1.0)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def add_request(self, request: EngineRequest) -> None:
        self.requests.append(request)

    def stats(self) -> EngineStats:
        return self.counts  # the same object every time, as the engine's

    def has_work(self) -> bool:
        return self.counts.num_steps < 10 + len(self.script)

    def step(self) -> list[EngineOutput]:
        given = self.script[self.counts.num_steps - 10]
        self.counts.num_steps += 1
        self.counts.host_seconds += 0.5
        return [EngineOutput(request_id=name, new_token_ids=ids) for name, ids in given.items()]


def test_batch_figures() -> None:
    core = FakeCore()
    done = run_batch(core, [[1, 2], [3]], 4)  # type: ignore[arg-type]
    assert done.ids == [[5, 6, 7], [8, 9, 10]] and core.resets == 1
    assert [r.prompt_token_ids for r in core.requests] == [[1, 2], [3]]
    assert all(r.params.max_tokens == 4 and r.params.ignore_eos for r in core.requests)
    assert done.steps == 4 and done.host_seconds == 2.0
    assert done.decode_steps == 1 and done.decode_tokens == 2  # after the third step
    assert 0 < done.first <= done.seconds and 0 <= done.decode_seconds < done.seconds


def test_batch_of_several_lengths() -> None:
    core = FakeCore()
    run_batch(core, [[1, 2], [3]], [4, 7])  # type: ignore[arg-type]
    assert [r.params.max_tokens for r in core.requests] == [4, 7]


def test_batch_tells_of_an_error() -> None:
    core = FakeCore()
    failed = EngineOutput(request_id="0", new_token_ids=[], error="broken")
    core.step = lambda: [failed]  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="broken"):
        run_batch(core, [[1]], 4)  # type: ignore[arg-type]


@pytest.mark.slow
def test_batch() -> None:
    core = EngineCore(
        engine_config(
            {"model": str(LLAMA), "warmup": "lazy"},
            max_num_seqs=2,
            max_model_len=64,
            max_num_batched_tokens=64,
        )
    )
    try:
        prompts = random_prompts(core, 2, 8, seed=0)
        first, again = run_batch(core, prompts, 4), run_batch(core, prompts, 4)
    finally:
        core.shutdown()
    assert first.ids == again.ids and [len(ids) for ids in first.ids] == [4, 4]
    assert 0 < again.first <= again.seconds and again.decode_seconds < again.seconds
    assert again.steps >= 4 and 0 < again.decode_tokens <= 6
    vocab = core.facts.spec.vocab_size
    assert all(0 <= token < vocab for prompt in prompts for token in prompt)


@pytest.mark.slow
def test_throughput_and_latency(tmp_path: pathlib.Path) -> None:
    sizes = ["--input-len", "8", "--output-len", "4"]
    few = ["--num-prompts", "1", "2", "--prefill-len", "16", "--repeat", "1"]
    content = run("throughput", [*SMALL, *sizes, *few, "--max-model-len", "64"], tmp_path)
    assert [row["requests"] for row in content["rows"]] == [1, 2]
    assert content["settings"]["warmup"] == "lazy" and content["prefill"]["tokens_per_s"] > 0
    assert flatten(content)["requests=2/tokens_per_s"] == content["rows"][1]["tokens_per_s"]
    assert content["rows"][1]["input_len"] == 8 and content["rows"][1]["output_len"] == 4
    assert flatten(content)["requests=2/requests_per_s"] > 0
    few = ["--batch-size", "2", "--num-iters", "3", "--num-iters-warmup", "1"]
    content = run("latency", [*SMALL, *sizes, *few, "--max-model-len", "64"], tmp_path)
    assert len(content["latencies"]) == 3
    assert min(content["latencies"]) <= content["avg_latency"] <= max(content["latencies"])
    assert content["percentiles"]["50"] == sorted(content["latencies"])[1]


@pytest.mark.slow
def test_spec(tmp_path: pathlib.Path) -> None:
    argv = [*SMALL, "--random", "--methods", "ngram", "--drafts", "2", "--output-len", "8"]
    content = run("spec", [*argv, "--repeat", "1", "--max-model-len", "256"], tmp_path)
    assert [row["method"] for row in content["rows"]] == ["none", "ngram"]
    assert all(row["same_ids"] for row in content["rows"])


@pytest.mark.slow
def test_offload(tmp_path: pathlib.Path) -> None:
    content = run("offload", ["--blocks", "4", "--layers", "2"], tmp_path)
    assert content["fs_write_MiB_s"] > 0 and content["device_to_host_MiB_s"] > 0


def test_floor_counts_the_checkpoints_weights() -> None:
    spec = load_spec(resolve_model(str(LLAMA)))
    tensors = load_file(LLAMA / "model.safetensors")
    matrices = sum(t.size for t in tensors.values() if t.ndim == 2)
    if "lm_head.weight" in tensors:  # a token is not multiplied with the embedding as well
        matrices -= tensors["model.embed_tokens.weight"].size
    assert num_weights(spec) == matrices
