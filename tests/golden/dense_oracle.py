"""A decoder in float64 NumPy with dense masks: slow, plain, and shares no code with the engine."""

from __future__ import annotations

import math

import numpy as np
from safetensors.numpy import load_file


class DenseQwen2:
    """Qwen2 with a window per layer (0 = full attention)."""

    def __init__(self, folder: str, config: dict, windows: list[int]) -> None:
        weights = load_file(f"{folder}/model.safetensors")
        self.w = {name: value.astype(np.float64) for name, value in weights.items()}
        self.c = config
        self.windows = windows

    def logits(self, ids: list[int]) -> np.ndarray:
        """[V] after the last token."""
        c, w = self.c, self.w
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        dim = c["hidden_size"] // heads
        n = len(ids)
        x = w["model.embed_tokens.weight"][ids]
        at = np.arange(n)
        angle = at[:, None] / c["rope_theta"] ** (np.arange(0, dim, 2) / dim)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        for i, window in enumerate(self.windows):
            p = f"model.layers.{i}."
            h = self.norm(x, p + "input_layernorm.weight")
            q, k, v = (
                (h @ w[f"{p}self_attn.{m}_proj.weight"].T + w[f"{p}self_attn.{m}_proj.bias"])
                for m in "qkv"
            )
            q = rotate(q.reshape(n, heads, dim), cos, sin)
            k = np.repeat(rotate(k.reshape(n, kv_heads, dim), cos, sin), heads // kv_heads, 1)
            v = np.repeat(v.reshape(n, kv_heads, dim), heads // kv_heads, 1)
            scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
            seen = at[None, :] <= at[:, None]
            if window:
                seen &= at[None, :] > at[:, None] - window
            scores = np.where(seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            o = np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)
            x = x + o @ w[p + "self_attn.o_proj.weight"].T
            h = self.norm(x, p + "post_attention_layernorm.weight")
            x = x + self.mlp(i, h)
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return self.norm(x[-1:], "model.norm.weight")[0] @ head.T

    def mlp(self, layer: int, h: np.ndarray) -> np.ndarray:
        p = f"model.layers.{layer}.mlp."
        gate, up = (h @ self.w[f"{p}{m}_proj.weight"].T for m in ("gate", "up"))
        return (gate / (1 + np.exp(-gate)) * up) @ self.w[p + "down_proj.weight"].T

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids).argmax()))
        return ids[len(prompt) :]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"])
        return x / scale * self.w[name]


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
