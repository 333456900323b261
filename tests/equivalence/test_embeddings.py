"""Embeddings are the final-normed hidden states, however the prompt was computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from testdata import GOLDENS

from jaxengine import LLM, SamplingParams
from jaxengine.engine.core import EngineCore
from jaxengine.runner.forward import forward
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.state import new_state
from jaxengine.sched.batch import pack
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler
from jaxengine.settings.pooling import pooling_settings
from jaxengine.text.pooling import pooling_params
from jaxengine.validation import RequestError

LLAMA = GOLDENS / "llama"
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 200, n).tolist() for n in (1, 5, 16, 40, 33, 2)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        str(LLAMA),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=16,  # prompts come in chunks
        num_gpu_blocks_override=24,
        block_size=4,
        warmup="lazy",
    )


def hidden_states(llm: LLM, prompt: list[int]) -> np.ndarray:
    """[T, D] by the model itself, the whole prompt in one pass, with no engine around it."""
    core = llm._core
    assert isinstance(core, EngineCore)
    facts, runner = core.facts, core.executor
    assert isinstance(runner, ModelRunner)
    scheduler = Scheduler(dataclasses.replace(facts.sched_sizes, max_num_batched_tokens=64))
    scheduler.add(Request("x", prompt, max_tokens=1))
    plan = scheduler.schedule()
    mixed = next(b for b in facts.step_shapes.buckets if not b.decode_only)
    bucket = dataclasses.replace(mixed, tokens=64)
    num_slots = facts.slot_shape.num_slots
    blob = pack(plan, bucket, facts.batch_shape, scheduler.block_tables, num_slots)
    kv, slots = new_state(runner._shapes)
    config = runner.programs.shapes.config
    _, out = forward(config, bucket, runner.params, kv, slots.last_token, jnp.asarray(blob))
    return np.asarray(out.hidden)[: len(prompt)]


def test_last_and_mean(llm: LLM) -> None:
    for pooling in ("last", "mean"):
        found = llm.embed(PROMPTS, use_tqdm=False, pooling=pooling, normalize=False)
        for prompt, output in zip(PROMPTS, found, strict=True):
            states = hidden_states(llm, prompt)
            wanted = states[-1] if pooling == "last" else states.mean(0)
            assert output.prompt_token_ids == prompt
            np.testing.assert_allclose(output.embedding, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_beside_others_and_cut(llm: LLM, pooling: str) -> None:
    """A vector does not depend on what runs with it, nor on prefixes that are cached."""
    llm.reset_prefix_cache()
    alone = [llm.embed(p, use_tqdm=False, pooling=pooling)[0].embedding for p in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    llm.generate([PROMPTS[3], PROMPTS[4]], params, use_tqdm=False)
    hits = llm.get_metrics()["prefix_hits"]
    together = [o.embedding for o in llm.embed(PROMPTS * 3, use_tqdm=False, pooling=pooling)]
    assert (llm.get_metrics()["prefix_hits"] > hits) == (pooling == "last")
    for i, vector in enumerate(together):
        np.testing.assert_allclose(vector, alone[i % len(PROMPTS)], atol=1e-5)
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    (short,) = llm.embed(PROMPTS[1], use_tqdm=False, pooling=pooling, dimensions=8)
    head = alone[1][:8] / np.linalg.norm(alone[1][:8])
    np.testing.assert_allclose(short.embedding, head, atol=1e-5)


def test_refusals(llm: LLM) -> None:
    with pytest.raises(RequestError, match="dimensions 1000 are more"):
        llm.embed(PROMPTS[1], use_tqdm=False, dimensions=1000)
    with pytest.raises(RequestError, match="pooling must be last or mean"):
        llm.embed(PROMPTS[1], use_tqdm=False, pooling="max")
    with pytest.raises(RequestError):
        llm.embed([[]], use_tqdm=False)


def test_preempted_beside_others(llm: LLM) -> None:
    """A prompt that had to begin again, cut otherwise, gives the same vector."""
    core = llm._core
    assert isinstance(core, EngineCore)
    processor = llm._inputs
    before = core.stats().num_preemptions
    grows = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    wanted: dict[str, np.ndarray] = {}
    for i in range(24):
        if i % 2:
            prompt = RNG.integers(3, 200, 20 + i).tolist()
            request = processor.process(f"p{i}", prompt, pooling_params(), pooling="mean")
            wanted[f"p{i}"] = hidden_states(llm, prompt).mean(0)
        else:
            request = processor.process(f"p{i}", PROMPTS[2], grows)
        core.add_request(request.requests[0])
    found: dict[str, np.ndarray] = {}
    while core.has_work():
        for output in core.step():
            if output.embedding is not None:
                found[output.request_id] = np.frombuffer(output.embedding, np.float32)
    assert core.stats().num_preemptions > before
    assert found.keys() == wanted.keys()
    for name, vector in wanted.items():
        np.testing.assert_allclose(found[name], vector, rtol=2e-4, atol=2e-4)


def test_settings_of_the_engine() -> None:
    """`pooler_config` is what `embed` does unasked."""
    settings: dict[str, Any] = {"pooling_type": "MEAN", "normalize": False}
    assert pooling_settings(settings) == ("mean", False)
    with LLM(
        str(LLAMA),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=24,
        block_size=4,
        warmup="lazy",
        pooler_config=settings,
    ) as llm:
        (unasked,) = llm.embed(PROMPTS[1], use_tqdm=False)
        (asked,) = llm.embed(PROMPTS[1], use_tqdm=False, pooling="mean", normalize=False)
        (last,) = llm.embed(PROMPTS[1], use_tqdm=False, pooling="last")
    np.testing.assert_array_equal(unasked.embedding, asked.embedding)
    assert not np.allclose(unasked.embedding, last.embedding)
