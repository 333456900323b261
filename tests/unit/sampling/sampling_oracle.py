"""The sampler once more, plainly: float64 NumPy, sorts, one row at a time."""

from __future__ import annotations

import numpy as np

from jaxengine.sampling import EDIT_ADD, EDIT_ALLOW, EDIT_BAN, EDIT_MIN_TOKENS

CANDIDATES, BLOCK = 64, 64
SLACK = 3e-6  # relative error of float32 sums: choices this near a boundary may go either way


def grammar_mask(bitmask, vocab):
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
    return bits[:vocab].astype(bool)


def processed(logits, inputs, row):
    """Float64 logits of one row after every constraint."""
    x = logits[row].astype(np.float64)
    vocab = len(x)
    if inputs.grammar is not None:
        x[~grammar_mask(inputs.grammar[row], vocab)] = -np.inf
    edits = [
        (t, k, v)
        for r, t, k, v in zip(
            inputs.edit_row, inputs.edit_token, inputs.edit_kind, inputs.edit_value, strict=True
        )
        if r == row and 0 <= t < vocab
    ]
    if inputs.allow_row[row]:
        allowed = [t for t, k, _ in edits if k == EDIT_ALLOW]
        x[[t for t in range(vocab) if t not in allowed]] = -np.inf
    history = inputs.history[inputs.slot[row], : inputs.num_tokens[row]].tolist()
    said = history[inputs.num_prompt[row] :]  # bad words are words of the output
    for r, prefix, last in zip(inputs.bad_row, inputs.bad_prefix, inputs.bad_last, strict=True):
        word = [t for t in prefix.tolist() if t >= 0]
        if r == row and len(word) <= len(said) and said[len(said) - len(word) :] == word:
            x[last] = -np.inf
    for token, kind, value in edits:
        if kind == EDIT_BAN:
            x[token] = -np.inf
        if kind == EDIT_ADD:
            x[token] += value
    stops = [t for t, k, _ in edits if k == EDIT_MIN_TOKENS]
    if inputs.min_tokens_active[row]:
        fewer = x.copy()
        fewer[stops] = -np.inf
        x = x if fewer.max() == -np.inf else fewer
    output = np.zeros(vocab)
    for token in history[inputs.num_prompt[row] :]:
        output[token] += 1
    repeat = float(inputs.repetition_penalty[row])
    for token in set(history):
        x[token] = x[token] / repeat if x[token] > 0 else x[token] * repeat
    x -= inputs.frequency_penalty[row] * output + inputs.presence_penalty[row] * (output > 0)
    return x


def scaled(x, temperature):
    """What the filters compare: float32 (x - max) / temperature."""
    x = x.astype(np.float32)
    return (x - x.max()) * (np.float32(1) / np.float32(temperature))


def kept(x, temperature, top_k, top_p, min_p):
    """[V] bool: the tokens left by min-p, top-k and top-p; equal values go together."""
    z = scaled(x, temperature).astype(np.float64)
    keep = z > -np.inf
    if min_p > 0:
        keep &= z >= np.log(np.float32(min_p))
    if 0 < top_k < len(x):
        keep &= z >= np.sort(np.where(keep, z, -np.inf))[::-1][min(top_k, keep.sum()) - 1]
    if top_p < 1:
        mass = np.where(keep, np.exp(z), 0.0)
        above = np.array([mass[z > v].sum() for v in z])
        keep &= (above < top_p * mass.sum()) | (z == z.max())
    return keep


def _may_pick(weights, uniform):
    """Indices whose slice of the cumulative sum holds `uniform`, within the slack."""
    cumulative = np.cumsum(weights)
    target = uniform * cumulative[-1]
    slack = SLACK * cumulative[-1]
    below = cumulative - weights
    return np.flatnonzero(
        (weights > 0) & (cumulative >= target - slack) & (below <= target + slack)
    )


def may_draw(x, temperature, top_k, top_p, min_p, uniforms):
    """The tokens that the two uniforms may choose (nearly always exactly one)."""
    width = -(-len(x) // BLOCK) * BLOCK
    choices = set()
    for p in {top_p} if top_p >= 1 else {top_p * (1 - SLACK), top_p * (1 + SLACK)}:
        keep = kept(x, temperature, top_k, p, min_p)
        z = np.full(width, -np.inf)
        z[: len(x)] = scaled(x, temperature)
        mass = np.zeros(width)
        mass[: len(x)] = np.where(keep, np.exp(z[: len(x)]), 0.0)
        order = np.argsort(-z, kind="stable")[:CANDIDATES]
        filtered = 0 < top_k < len(x) or top_p < 1 or min_p > 0
        edge = z[order[-1]]

        def holds(kept_set, z=z, edge=edge):
            return edge == -np.inf or width <= CANDIDATES or edge < z[: len(x)][kept_set].min()

        # behind a top-k, top-p is only settled among the candidates when the top-k was
        counted = holds(kept(x, temperature, top_k, 1.0, min_p)) or not 0 < top_k < len(x)
        if filtered and counted and holds(keep):
            choices |= {int(order[i]) for i in _may_pick(mass[order], uniforms[1])}
        else:
            stride = next(s for s in (256, 128, 64) if width % s == 0)
            blocks = mass.reshape(stride, -1)
            for b in _may_pick(blocks.sum(0), uniforms[0]):
                inside = _may_pick(blocks[:, b], uniforms[1])
                choices |= {int(i * blocks.shape[1] + b) for i in inside}
    return choices


def logprobs(x):
    x = x.astype(np.float64)
    return x - (np.log(np.exp(x - x.max()).sum()) + x.max())
