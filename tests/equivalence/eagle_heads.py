"""Random EAGLE and EAGLE-3 checkpoints for the tiny Llama, and what they draft, worked out in
float64 with NumPy alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from engine_runs import GOLDENS, VOCAB
from safetensors.numpy import load_file, save_file

CONFIG = json.loads((GOLDENS / "llama/config.json").read_text())
WIDTH, LAYERS = CONFIG["hidden_size"], CONFIG["num_hidden_layers"]
HEADS, KV_HEADS, DIM, FFN = 6, 2, 16, 96  # the head's own
DRAFTED = 200  # tokens of EAGLE-3's vocabulary
TAPS = (1, 2, LAYERS)
Tensors = dict[str, np.ndarray]


def save_head(folder: Path, form: str, **changes: Any) -> Path:
    """`form`: eagle, eagle3, or eagle3-normed (another order of norm and residual sum, the names
    of other tools, an embedding of its own). `changes` replace tensors (None: left out), or the
    config's fields with `config_` before them."""
    rng = np.random.default_rng(len(form))
    three = form != "eagle"
    inner = 2 * WIDTH if three else WIDTH
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, inner),
        "self_attn.k_proj": (KV_HEADS * DIM, inner),
        "self_attn.v_proj": (KV_HEADS * DIM, inner),
        "self_attn.o_proj": (WIDTH, HEADS * DIM),
        "mlp.gate_proj": (FFN, WIDTH),
        "mlp.up_proj": (FFN, WIDTH),
        "mlp.down_proj": (WIDTH, FFN),
    }
    layer = {"eagle": "layers.0.", "eagle3": "midlayer.", "eagle3-normed": "layers.0."}[form]
    tensors = {
        f"{layer}{name}.weight": rng.standard_normal(shape) * (1.5 / shape[1] ** 0.5)
        for name, shape in shapes.items()
    }
    norms = [f"{layer}post_attention_layernorm"]
    if three:
        norms += [f"{layer}input_layernorm", f"{layer}hidden_norm", "norm"]
    tensors |= {f"{name}.weight": rng.uniform(0.5, 1.5, WIDTH) for name in norms}
    joins = 3 if three else 2
    tensors["fc.weight"] = rng.standard_normal((WIDTH, joins * WIDTH)) / (joins * WIDTH) ** 0.5
    tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
    if three:
        chosen = np.sort(rng.choice(VOCAB, DRAFTED, replace=False))
        tensors["d2t"] = chosen - np.arange(DRAFTED)
        tensors["t2d"] = np.isin(np.arange(VOCAB), chosen)
        head = rng.standard_normal((DRAFTED, WIDTH)) / WIDTH**0.5
        tensors["lm_head.weight"] = head.astype(np.float32)
    else:
        tensors["fc.bias"] = rng.standard_normal(WIDTH).astype(np.float32)
        for x in "qkv":
            rows = tensors[f"{layer}self_attn.{x}_proj.weight"].shape[0]
            bias = rng.standard_normal(rows).astype(np.float32)
            tensors[f"{layer}self_attn.{x}_proj.bias"] = bias
    config = {
        **{name: CONFIG[name] for name in ("hidden_size", "rms_norm_eps", "hidden_act")},
        **{"max_position_embeddings": 512, "vocab_size": VOCAB, "rope_theta": 5000.0},
        **{"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM},
        **{"intermediate_size": FFN, "num_hidden_layers": 1, "model_type": "llama"},
        "architectures": ["LlamaForCausalLMEagle3" if three else "LlamaForCausalLM"],
    }
    if three:
        config["draft_vocab_size"] = DRAFTED
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(TAPS)}
    if form == "eagle3-normed":
        config["norm_before_residual"] = True
        embed = rng.standard_normal((VOCAB, WIDTH)) * 0.5
        tensors["embed_tokens.weight"] = embed.astype(np.float32)
    for name, value in changes.items():
        if name.startswith("config_"):
            config[name.removeprefix("config_")] = value
        else:
            tensors[name] = value
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: x for n, x in tensors.items() if x is not None}, folder / "model.safetensors")
    return folder


# -- the reference ------------------------------------------------------------------------------


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def rotated(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """[T, H, C], rotate-half form."""
    half = x.shape[-1] // 2
    angle = positions[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attended(x: np.ndarray, w: Tensors, at: str, heads: int, kv: int, theta: float) -> np.ndarray:
    """Causal attention of all rows of x, before the output matrix."""
    count = len(x)

    def project(name: str, number: int) -> np.ndarray:
        y = x @ w[f"{at}{name}_proj.weight"].T + w.get(f"{at}{name}_proj.bias", 0.0)
        return y.reshape(count, number, -1)

    positions = np.arange(count)
    q = rotated(project("q", heads), positions, theta)
    k = rotated(project("k", kv), positions, theta).repeat(heads // kv, 1)
    v = project("v", kv).repeat(heads // kv, 1)
    scores = np.einsum("qhc,khc->hqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khc->qhc", weights, v).reshape(count, -1)


def mlp(x: np.ndarray, w: Tensors, at: str) -> np.ndarray:
    gate = x @ w[f"{at}mlp.gate_proj.weight"].T
    up = x @ w[f"{at}mlp.up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}mlp.down_proj.weight"].T


def target_states(tokens: list[int]) -> tuple[np.ndarray, np.ndarray, Tensors]:
    """(final-normed states [T, D], those of TAPS side by side, the target's tensors)."""
    w = {n: x.astype(np.float64) for n, x in load_file(GOLDENS / "llama/model.safetensors").items()}
    x = w["model.embed_tokens.weight"][tokens]
    tapped = []
    heads, kv = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    theta = CONFIG.get("rope_theta", 10000.0)
    for i in range(LAYERS):
        if i in TAPS:
            tapped.append(x)
        at = f"model.layers.{i}."
        normed = norm(x, w[at + "input_layernorm.weight"])
        y = attended(normed, w, at + "self_attn.", heads, kv, theta)
        x = x + y @ w[at + "self_attn.o_proj.weight"].T
        x = x + mlp(norm(x, w[at + "post_attention_layernorm.weight"]), w, at)
    if LAYERS in TAPS:
        tapped.append(x)
    return norm(x, w["model.norm.weight"]), np.concatenate(tapped, -1), w


def expected_drafts(folder: Path, tokens: list[int], count: int) -> tuple[list[int], float]:
    """(the drafts after `tokens`, the smallest lead of one over the next best logit)."""
    h = {n: x.astype(np.float64) for n, x in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    final, tapped, w = target_states(tokens)
    three = "fc.bias" not in h
    at = "midlayer." if any(name.startswith("midlayer") for name in h) else "layers.0."
    states = tapped @ h["fc.weight"].T if three else final
    states, ids = states[:-1], list(tokens[1:])
    table = h.get("embed_tokens.weight", w["model.embed_tokens.weight"])
    drafts, lead = [], np.inf
    for _ in range(count):
        embedded = table[ids]
        if three:
            normed = norm(states, h[at + "hidden_norm.weight"])
            token = norm(embedded, h[at + "input_layernorm.weight"])
            x = np.concatenate([token, normed], -1)
            residual = normed if config.get("norm_before_residual") else states
        else:
            both = np.concatenate([embedded, states], -1)
            x = residual = both @ h["fc.weight"].T + h["fc.bias"]
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        y = attended(x, h, at + "self_attn.", heads, groups, config["rope_theta"])
        y = residual + y @ h[at + "self_attn.o_proj.weight"].T
        y = y + mlp(norm(y, h[at + "post_attention_layernorm.weight"]), h, at)
        last = y[-1:]
        if three:
            logits = (norm(last, h["norm.weight"]) @ h["lm_head.weight"].T)[0]
        else:
            logits = (last @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T)[0]
        order = np.argsort(-logits)
        lead = min(lead, float(logits[order[0]] - logits[order[1]]))
        best = int(order[0])
        drafts.append(best + int(h["d2t"][best]) if three else best)
        # The next draft reads the layer's own output in the place of the target's state.
        states = np.concatenate([states, last])
        ids.append(drafts[-1])
    return drafts, lead
