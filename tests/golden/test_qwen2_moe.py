"""Qwen2-MoE has no published golden: random weights against a decoder in float64."""

import json

import numpy as np
import pytest
from dense_oracle import DenseQwen2
from safetensors.numpy import load_file, save_file
from testdata import GOLDENS

from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.sampling_params import SamplingParams
from jaxengine.wire.messages import EngineRequest

GOLDEN = GOLDENS / "qwen2"
NEW, EXPERTS, TOP = 12, 6, 2


class Qwen2Moe(DenseQwen2):
    """With experts and a gated shared expert in every layer but the first."""

    def mlp(self, layer: int, h: np.ndarray) -> np.ndarray:
        if layer == 0:
            return super().mlp(layer, h)
        p = f"model.layers.{layer}.mlp."
        out = []
        for row in h:
            logits = self.w[p + "gate.weight"] @ row
            scores = np.exp(logits - logits.max())
            scores /= scores.sum()
            y = self.expert(p + "shared_expert.", row)
            y = y / (1 + np.exp(-self.w[p + "shared_expert_gate.weight"][0] @ row))
            for e in np.argsort(-scores)[:TOP]:
                y = y + scores[e] * self.expert(f"{p}experts.{e}.", row)
            out.append(y)
        return np.array(out)

    def expert(self, p: str, row: np.ndarray) -> np.ndarray:
        gate, up = (self.w[f"{p}{m}_proj.weight"] @ row for m in ("gate", "up"))
        return self.w[p + "down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[str, dict]:
    folder = tmp_path_factory.mktemp("qwen2-moe")
    config = json.loads((GOLDEN / "config.json").read_text())
    config |= {
        "architectures": ["Qwen2MoeForCausalLM"],
        "mlp_only_layers": [0],
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights, rng = load_file(GOLDEN / "model.safetensors"), np.random.default_rng(2)
    width = config["hidden_size"]

    def draw(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) * 0.2).astype(np.float32)

    for i in (1, 2):
        p = f"model.layers.{i}.mlp."
        for name in ("gate_proj", "up_proj", "down_proj"):
            del weights[f"{p}{name}.weight"]
        weights[p + "gate.weight"] = draw(EXPERTS, width)
        weights[p + "shared_expert_gate.weight"] = draw(1, width)
        parts = {f"experts.{e}.": 24 for e in range(EXPERTS)} | {"shared_expert.": 40}
        for part, ffn in parts.items():
            weights |= {f"{p}{part}{m}_proj.weight": draw(ffn, width) for m in ("gate", "up")}
            weights[f"{p}{part}down_proj.weight"] = draw(width, ffn)
    save_file(weights, folder / "model.safetensors")
    return str(folder), config


@pytest.mark.slow  # the layer itself is tested in unit/layers
def test_equals_the_dense_oracle(model) -> None:
    folder, config = model
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 300, n).tolist() for n in (19, 3, 11)]
    oracle = Qwen2Moe(folder, config, [0, 0, 0])
    expected = [oracle.greedy(prompt, NEW) for prompt in prompts]
    core = EngineCore(
        EngineConfig.of(
            model=folder,
            block_size=4,
            max_num_batched_tokens=8,
            max_num_seqs=2,
            max_model_len=64,
            warmup="lazy",
        )
    )
    got: list[list[int]] = [[] for _ in prompts]
    try:
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
                assert output.error is None, output.error
                got[int(output.request_id)] += output.new_token_ids
    finally:
        core.shutdown()
    assert got == expected
