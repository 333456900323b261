"""KV offload never changes a token: tiny device pools, returning prompts, aborts, preemption."""

import random
from typing import Any

import pytest
from engine_runs import VOCAB, alone, depth, engine, oracle_engine, request, run

TINY = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 24}
HOST = {"kv_offloading_size": 0.001}


def conversation(rng: random.Random, turns: int) -> list[list[int]]:
    """Prompts that begin alike: every turn repeats what came before."""
    text = [rng.randrange(3, VOCAB) for _ in range(rng.randint(20, 40))]
    prompts = []
    for _ in range(turns):
        prompts.append(list(text))
        text += [rng.randrange(3, VOCAB) for _ in range(rng.randint(3, 12))]
    return prompts


DRAFTS = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}
CASES = [
    ("llama", 1, {}),
    ("llama", 2, DRAFTS),
    pytest.param("gemma3", 2, {}, marks=pytest.mark.slow),
    pytest.param("deepseek-v3", 2, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "steps", "more"), CASES)
def test_same_ids(model: str, steps: int, more: dict[str, Any]) -> None:
    rng = random.Random(f"{model}{steps}")
    talks = [conversation(rng, 3) for _ in range(5)]
    size: dict[str, Any] = {"model": model, "max_model_len": 96, "warmup": "lazy"}
    core = engine(**size, **TINY, **HOST, **more)
    with depth(core, steps):
        seen = {}
        for turn in range(3):
            requests = [
                request(f"{turn}-{i}", talk[turn], max_tokens=6) for i, talk in enumerate(talks)
            ]
            rng.shuffle(requests)
            gone = request("gone", talks[0][turn][:-1], max_tokens=40)

            def leave(core: Any, step: int) -> None:
                if step == 4:
                    core.abort_requests(["gone"])

            got = run(core, [*requests, gone], leave)
            got.pop("gone")
            seen |= got
            wait_until_idle(core)
    figures = core.stats().extra
    assert figures["kv_offload_external_hits"] > 0, figures
    prompts = [request(n, talks[int(n[2:])][int(n[0])], max_tokens=6) for n in seen]
    expected = alone(oracle_engine(model), prompts)
    assert {n: s.ids for n, s in seen.items()} == {n: s.ids for n, s in expected.items()}
    assert any(s.cached for s in seen.values())


def wait_until_idle(core: Any) -> None:
    """Stores in flight end."""
    for _ in range(10_000):
        if not core.has_work():
            return
        core.step()
    raise AssertionError("transfers do not end")
