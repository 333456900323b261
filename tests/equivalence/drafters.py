"""Tiny drafters for the tiny models, made on the spot, and a record of what they draft."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from engine_runs import GOLDENS, VOCAB, engine
from safetensors.numpy import load_file, save_file

from jaxengine.engine.core import EngineCore
from jaxengine.lab.tap import tapped
from jaxengine.runner.draft import draft_store
from jaxengine.runner.draft.draft_head import DraftConfig, init_params
from jaxengine.runner.draft.draft_store import Draft
from jaxengine.runner.draft.verify import Drafted
from jaxengine.sched.batch import view
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import StepResult
from jaxengine.sched.verify_batch import verify_layout
from jaxengine.weights.fingerprint import fingerprint
from jaxengine.weights.resolve import resolve_model

# Every K crosses another one when a request comes or goes; the pool holds one longest sequence.
RANGES = [[1, 1, 3], [2, 2, 1], [3, 3, 0]]
SMALL = {"max_num_seqs": 3, "max_num_batched_tokens": 24}
METHODS = ("eagle", "draft_model", "mtp")


def repeating_head(folder: Path) -> Path:
    """A head that passes the target's hidden state on: it drafts the target's likeliest token of
    the place before, so after a greedy token that token again."""
    files = resolve_model(str(GOLDENS / "llama"))
    width = 64
    config = DraftConfig(
        VOCAB, width, 8, 1, VOCAB, 3, target="llama", fingerprint=fingerprint(files)
    )
    params = init_params(config, 0)
    params["join"] = np.concatenate([np.zeros((width, width)), np.eye(width)], 1).astype("f4")
    draft_store.save(folder, Draft(config, params, np.arange(VOCAB, dtype=np.int32)))
    return folder


def perturbed(folder: Path, model: str, noise: float) -> Path:
    """A copy of a model with other weights."""
    folder.mkdir()
    shutil.copy(GOLDENS / model / "config.json", folder)
    tensors = load_file(GOLDENS / model / "model.safetensors")
    rng = np.random.default_rng(0)
    for name, x in tensors.items():
        tensors[name] = x + noise * x.std() * rng.standard_normal(x.shape).astype(x.dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_extra_layer(folder: Path) -> Path:
    """DeepSeek-V3 with a random layer that predicts a token further."""
    folder.mkdir()
    shutil.copy(GOLDENS / "deepseek-v3/config.json", folder)
    tensors = load_file(GOLDENS / "deepseek-v3/model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"]
    here = f"model.layers.{last}."
    for name, x in list(tensors.items()):
        before = f"model.layers.{last - 1}."
        if name.startswith(before):
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            wild = x.std() * rng.standard_normal(x.shape)
            tensors[here + name.removeprefix(before)] = (x if x.ndim == 1 else wild).astype("f4")
    rng = np.random.default_rng(1)
    norm = {n: rng.uniform(0.5, 1.5, 64) for n in ("enorm", "hnorm", "shared_head.norm")}
    more: dict[str, Any] = {f"{name}.weight": x for name, x in norm.items()}
    more["eh_proj.weight"] = rng.standard_normal((64, 128)) / 12
    more["embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    more["shared_head.head.weight"] = tensors["lm_head.weight"]
    tensors |= {here + name: np.asarray(x, np.float32) for name, x in more.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def setting_of(method: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """(target, speculative_config) with this drafter; `folder` is empty or has been used for it."""
    model, drafter = "llama", folder / method
    if method == "eagle" and not drafter.exists():
        repeating_head(drafter)
    if method == "mtp":
        model = str(drafter if drafter.exists() else with_extra_layer(drafter))
    setting: dict[str, Any] = {"num_speculative_tokens_per_batch_size": RANGES}
    setting["method"] = "draft_model" if method == "itself" else method
    if method == "draft_model":
        setting["model"] = str(drafter if drafter.exists() else perturbed(drafter, "llama", 0.3))
    elif method == "itself":
        setting["model"] = str(GOLDENS / "llama")
    elif method == "eagle":
        setting["model"] = str(drafter)
    return model, setting


def drafting(method: str, folder: Path, warmup: str = "lazy") -> EngineCore:
    """The session's engine with this drafter."""
    model, setting = setting_of(method, folder)
    return engine(**SMALL, model=model, warmup=warmup, speculative_config=json.dumps(setting))


@dataclass
class Record:
    """`drafts`: by the tokens before them. `results`: of steps with drafts."""

    drafts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)


@contextmanager
def recorded_drafts(core: EngineCore) -> Iterator[Record]:
    """What is drafted inside the block. Waits for every step."""
    record = Record()
    runner: Any = core.executor

    def submitted(submit: Callable[[Batch], Any], batch: Batch) -> Any:
        handle = submit(batch)
        if isinstance(handle.hidden, Drafted):
            layout = verify_layout(batch.bucket, core.facts.batch_shape)
            slots = view(batch.blob, layout, "slots")
            history = np.asarray(runner._state.slots.history)
            known, drafts = np.asarray(handle.hidden.known), np.asarray(handle.hidden.drafts)
            for row in range(batch.num_rows[0]):
                tokens = tuple(history[slots[row], : known[row]].tolist())
                found = [token for token in drafts[row].tolist() if token >= 0]
                if found:
                    record.drafts[tokens] = max(record.drafts.get(tokens, []), found, key=len)
        return handle

    def resulted(result: Callable[[Any], list[StepResult]], handle: Any) -> list[StepResult]:
        results = result(handle)
        record.results += [one for one in results if one.num_drafted is not None]
        return results

    with tapped(runner, submit=submitted, result=resulted):
        yield record
