"""Full and windowed layers in one model: KV groups of their own, against a dense oracle (B72)."""

import json
import shutil

import numpy as np
import pytest
from dense_oracle import DenseQwen2
from testdata import GOLDENS

from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.sampling_params import SamplingParams
from jaxengine.wire.messages import EngineRequest

GOLDEN = GOLDENS / "qwen2"
WINDOWS = [8, 0, 8]
NEW = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    shutil.copy(GOLDEN / "model.safetensors", folder)
    config = json.loads((GOLDEN / "config.json").read_text())
    config |= {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in WINDOWS],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder), config


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(72)
    first = rng.integers(3, 300, 40).tolist()
    return [first, first[:29] + rng.integers(3, 300, 6).tolist(), first[:17]]


@pytest.fixture(scope="module")
def expected(model, prompts):
    folder, config = model
    oracle = DenseQwen2(folder, config, WINDOWS)
    return [oracle.greedy(prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize("chunk", [4, 16, pytest.param(40, marks=pytest.mark.slow)])
def test_equals_the_dense_oracle(model, prompts, expected, chunk) -> None:
    core = EngineCore(
        EngineConfig.of(
            model=model[0],
            block_size=4,
            max_num_batched_tokens=chunk,
            max_num_seqs=4,
            max_model_len=128,
            warmup="lazy",
        )
    )
    assert core.facts.spec.groups == (0, 8)
    try:
        for turn in range(2):  # the second finds the first's prefixes
            got: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
            for i, prompt in enumerate(prompts):
                core.add_request(
                    EngineRequest(
                        request_id=str(i),
                        prompt_token_ids=prompt,
                        params=SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True),
                        arrival_time=0.0,
                    )
                )
            while core.has_work():
                for output in core.step():
                    got[output.request_id] += output.new_token_ids
                core.scheduler.check_integrity()
            assert list(got.values()) == expected, f"turn {turn}"
        assert core.stats().prefix_hits > 0
        assert core.scheduler.kv_usage == 0
    finally:
        core.shutdown()
