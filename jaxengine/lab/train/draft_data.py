"""What a drafter learns from: text that the target wrote, and its hidden states over that text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from jaxengine.lab.train.draft_prompts import Prompt
from jaxengine.models.cache import cache_shapes
from jaxengine.models.decoder import decode, head
from jaxengine.models.layers.attention import AttentionPlan
from jaxengine.models.spec import DecoderSpec, Params
from jaxengine.parallel.layout import StepLayout
from jaxengine.sampling_params import SamplingParams
from jaxengine.sched.batch import QUERY_BLOCK

if TYPE_CHECKING:
    from jaxengine.front.llm import LLM

_BLOCK = 64  # tokens of a KV block of the collecting pass
_BATCH_TOKENS = 1024
_WAVE = 64  # prompts at most between two looks at the clock
TEMPERATURE = 0.8  # of every second training text; the others are greedy


@dataclass(frozen=True)
class Text:
    """A prompt (its first `num_prompt` tokens) and what the target wrote after it."""

    token_ids: list[int]
    num_prompt: int


@dataclass(frozen=True)
class Corpus:
    """Texts end to end, N tokens. `start` [texts + 1] are their borders.

    `hidden` are the target's final-normed states, `best` its greedy choice after each token, and
    `log_sum` the log of the sum of exponentials of its logits. `tapped`: its states inside, side
    by side, for heads that read them.
    """

    tokens: NDArray[np.int32]  # [N]
    hidden: NDArray[np.float16]  # [N, D]
    best: NDArray[np.int32]  # [N]
    log_sum: NDArray[np.float32]  # [N]
    start: NDArray[np.int64]
    num_prompt: NDArray[np.int64]  # [texts]
    tapped: NDArray[np.float16] | None = None  # [N, F]

    @property
    def num_texts(self) -> int:
        return len(self.num_prompt)

    def windows(self, drafts: int) -> NDArray[np.int64]:
        """Positions t after which `drafts` drafts can be compared: t is the last prompt token or
        one of the output's, and t + 1 + drafts is still in the text."""
        parts = [
            np.arange(begin + prompt - 1, end - 1 - drafts)
            for begin, end, prompt in zip(
                self.start[:-1], self.start[1:], self.num_prompt, strict=True
            )
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def save_corpus(path: Path, corpus: Corpus) -> None:
    save_file({name: array for name, array in vars(corpus).items() if array is not None}, path)


def load_corpus(path: Path) -> Corpus:
    return Corpus(**load_file(path))


def generate(
    llm: LLM,
    prompts: list[Prompt],
    *,
    num_tokens: int,
    max_tokens: int,
    max_prompt: int,
    greedy_only: bool,
    deadline: float,
    seed: int = 0,
    progress: bool = True,
) -> list[Text]:
    """Let the target continue the prompts, over and over with new seeds, until `num_tokens` new
    tokens are there or `deadline` (monotonic seconds) has passed.

    Prompts longer than `max_prompt` tokens lose their beginnings. Greedy texts are written once.
    Raises ValueError when nothing usable came, or a prompt needs a tokenizer that is missing.
    """
    texts: list[Text] = []
    ids = [encode(llm, prompt)[-max_prompt:] for prompt in prompts]
    done = first = 0
    total = min(num_tokens, len(ids) * max_tokens) if greedy_only else num_tokens
    what = "Writing text to test on" if greedy_only else "Writing text to learn from"
    with tqdm(total=total, desc=what, unit="tok", disable=not progress) as bar:
        while done < num_tokens and (not texts or time.monotonic() < deadline):
            if greedy_only and first >= len(ids):
                break
            wanted = first + min(_WAVE, -(-(num_tokens - done) // max_tokens))
            chosen = range(first, min(wanted, len(ids)) if greedy_only else wanted)
            first = wanted
            params = [
                SamplingParams(
                    temperature=0.0 if greedy_only or (i < len(ids) and i % 2) else TEMPERATURE,
                    seed=seed + i,
                    max_tokens=max_tokens,
                )
                for i in chosen
            ]
            batch = [ids[i % len(ids)] for i in chosen]
            outputs = llm.generate(list(batch), params, use_tqdm=False)
            for prompt, output in zip(batch, outputs, strict=True):
                new = list(output.outputs[0].token_ids)
                if output.error is not None or not new:
                    continue
                texts.append(Text(prompt + new, len(prompt)))
                done += len(new)
                bar.update(len(new))
    if not texts:
        raise ValueError("the model wrote nothing after the prompts: give others with --prompts")
    return texts


def encode(llm: LLM, prompt: Prompt) -> list[int]:
    """A prompt's token ids; conversations go through the chat template."""
    if not isinstance(prompt, str) and isinstance(prompt[0], int):
        return [int(token) for token in prompt]
    try:
        tokenizer = llm.get_tokenizer()
    except RuntimeError as error:
        raise ValueError(
            "the model has no tokenizer: give --prompts with prompt_token_ids"
        ) from error
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    from jaxengine.text.chat_template import ChatTemplateError, render_messages

    messages: list[Any] = list(prompt)
    try:
        text = render_messages(
            tokenizer.chat_template,
            messages,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            add_generation_prompt=True,
        )
    except ChatTemplateError:  # a base model has no template: its text alone
        return tokenizer.encode("\n".join(str(m.get("content", "")) for m in messages))
    return tokenizer.encode(text, add_special_tokens=False)


def collect(
    spec: DecoderSpec,
    params: Params,
    texts: list[Text],
    *,
    taps: tuple[int, ...] = (),
    progress: bool = True,
) -> Corpus:
    """Run the target over the texts (`taps`: see `models.decoder.decode`). Every text is a row of
    one batch of fixed shape, padded at its end, where causal attention does not see it."""
    longest = max(len(text.token_ids) for text in texts)
    length = -(-longest // _BLOCK) * _BLOCK
    rows = max(1, _BATCH_TOKENS // length)
    run = _program(spec, rows, length, taps)
    ids, hidden, best, log_sum = [], [], [], []
    for first in tqdm(
        range(0, len(texts), rows), desc="Reading states", unit="batch", disable=not progress
    ):
        part = texts[first : first + rows]
        batch = np.zeros((rows, length), np.int32)
        for row, text in enumerate(part):
            batch[row, : len(text.token_ids)] = text.token_ids
        states, choices, sums = (np.asarray(x) for x in run(params, batch.reshape(-1)))
        for row, text in enumerate(part):
            here = slice(row * length, row * length + len(text.token_ids))
            ids.append(np.asarray(text.token_ids, np.int32))
            hidden.append(states[here])
            best.append(choices[here])
            log_sum.append(sums[here])
    sizes = [len(text.token_ids) for text in texts]
    states, width = np.concatenate(hidden), spec.hidden_size
    return Corpus(
        np.concatenate(ids),
        np.ascontiguousarray(states[:, :width]),
        np.concatenate(best),
        np.concatenate(log_sum),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.array([text.num_prompt for text in texts], np.int64),
        np.ascontiguousarray(states[:, width:]) if taps else None,
    )


Collected = tuple[Float[Array, "T W"], Int[Array, "T"], Float[Array, "T"]]


def _program(
    spec: DecoderSpec, rows: int, length: int, taps: tuple[int, ...]
) -> Callable[[Params, NDArray[np.int32]], Collected]:
    """(params, ids [rows * length]) -> hidden states (float16), greedy choices, log-sums."""
    layout = StepLayout()
    blocks = length // _BLOCK
    tokens, groups = rows * length, len(spec.groups)
    steps = range(0, length, QUERY_BLOCK)
    items = np.array(
        [(r, r * length + a, a, min(QUERY_BLOCK, length - a)) for r in range(rows) for a in steps],
        np.int32,
    )
    table = np.arange(rows * blocks, dtype=np.int32).reshape(1, rows, blocks)
    plan = AttentionPlan(
        positions=jnp.asarray(np.tile(np.arange(length, dtype=np.int32), rows)),
        kv_slot=jnp.asarray(np.tile(np.arange(tokens, dtype=np.int32), (groups, 1))),
        block_table=jnp.asarray(np.tile(table, (groups, 1, 1))),
        seq_len=jnp.full(rows, length, jnp.int32),
        q_start=jnp.arange(rows + 1, dtype=jnp.int32) * length,
        num_tokens=jnp.int32(tokens),
        num_decode=jnp.int32(0),
        items=jnp.asarray(items),
        num_items=jnp.int32(len(items)),
    )
    shapes = cache_shapes(spec, layout, rows * blocks, _BLOCK)

    @jax.jit
    def run(params: Params, token_ids: Int[Array, "T"]) -> Collected:
        dtype = params["embed"].dtype
        kv = tuple(
            tuple(jnp.zeros(shape, dtype) for shape in shapes) for _ in range(spec.num_layers)
        )
        hidden, _ = decode(spec, params, kv, token_ids, plan, layout, taps=taps)

        def choose(part: Float[Array, "P D"]) -> tuple[Int[Array, "P"], Float[Array, "P"]]:
            logits = head(spec, params, part)
            return jnp.argmax(logits, -1), jax.nn.logsumexp(logits, -1)

        # in parts: logits of all tokens at once would be the largest array by far
        final = hidden[:, : spec.hidden_size].reshape(-1, _BLOCK, spec.hidden_size)
        best, log_sum = jax.lax.map(choose, final)
        limit = 65504.0  # of float16
        states = jnp.clip(hidden, -limit, limit).astype(jnp.float16)
        return states, best.reshape(-1), log_sum.reshape(-1)

    return run


def choose_vocabulary(
    corpus: Corpus, vocab_size: int, size: int
) -> tuple[NDArray[np.int32], float]:
    """The `size` tokens (0 = all) that the target wrote most often, ascending, and the share of
    its text that they cover. Equal counts go to the lower id: byte-pair merges are numbered by
    frequency."""
    counts = np.bincount(corpus.best, minlength=vocab_size)[:vocab_size]
    for begin, end, prompt in zip(
        corpus.start[:-1], corpus.start[1:], corpus.num_prompt, strict=True
    ):
        counts += np.bincount(corpus.tokens[begin + prompt : end], minlength=vocab_size)
    size = min(size, vocab_size) if size > 0 else vocab_size
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)
    return chosen, float(counts[chosen].sum()) / max(1.0, float(counts.sum()))
