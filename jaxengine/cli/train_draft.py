"""The train-draft command: text by the target, its hidden states, a draft head, its acceptance."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxengine import platform

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from jaxengine.lab.train.draft_data import Corpus
    from jaxengine.lab.train.draft_train import Acceptance, Progress, TrainSettings
    from jaxengine.models.spec import DecoderSpec
    from jaxengine.runner.draft.draft_head import DraftParams
    from jaxengine.weights.resolve import ModelFiles

_HELD_OUT = 24  # prompts at most that only measure
_TEXT_SHARE = 0.45  # of the minutes that writing text may take
_REPORT_DRAFTS = 4


@dataclass(frozen=True)
class TrainDraft:
    """What `jaxengine train-draft` was asked for."""

    model: str
    output: Path
    prompts: Path | None = None
    steps: int = 1500
    minutes: float = 15.0
    tokens: int = 40_000
    max_tokens: int = 128
    max_prompt: int = 128
    drafts: int = 4
    draft_vocab_size: int = 8192
    features: int = 1
    ffn_size: int = 0
    layers: int = 2
    batch_size: int = 256
    learning_rate: float = 1e-3
    seed: int = 0
    progress: bool = True


def run_train_draft(options: TrainDraft) -> int:
    """Train and save a drafter; print how well it does. Raises ValueError for bad settings."""
    _check(options)
    began = time.monotonic()
    platform.setup()
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxengine.lab.train.draft_data import choose_vocabulary
    from jaxengine.models.spec import for_context
    from jaxengine.runner.draft import draft_head, draft_store
    from jaxengine.weights.fingerprint import fingerprint
    from jaxengine.weights.load import load_spec
    from jaxengine.weights.resolve import resolve_model

    try:
        from jaxengine.lab.train import draft_train
    except ImportError as error:
        raise ValueError(f"training needs {error.name}: install jaxengine[train]") from error

    files = resolve_model(options.model)
    spec = for_context(load_spec(files), options.max_prompt + options.max_tokens)
    mark = fingerprint(files)
    work = options.output / "work"
    _claim(work, options, mark)
    taps: tuple[int, ...] = ()
    if options.features == 3:
        from jaxengine.lab.train.eagle_train import form_for

        taps = form_for(spec, options.ffn_size, 1).taps
    train_set, held_out, target = _corpora(options, files, spec, work, began, taps)
    texted = time.monotonic()
    ids, cover = choose_vocabulary(train_set, spec.vocab_size, options.draft_vocab_size)
    _say(
        f"{len(train_set.tokens)} tokens in {train_set.num_texts} texts after "
        f"{texted - began:.0f} s; {len(ids)} draft tokens cover {cover:.1%} of what was written"
    )
    frozen = {k: target[k] for k in ("embed", "head") if k in target}
    settings = draft_train.TrainSettings(
        steps=options.steps,
        seconds=max(20.0, options.minutes * 60 * 0.95 - (texted - began)),
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    report = {
        "train_tokens": len(train_set.tokens),
        "seconds_before_training": round(texted - began, 1),
    }
    if taps:
        norm = np.asarray(target["final_norm"])
        run = _Run(options, work, train_set, held_out, settings, report, began)
        return _train_layer(run, spec, mark, files.name, frozen, norm, ids)
    config = draft_head.DraftConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        ffn_size=options.ffn_size or 2 * spec.hidden_size,
        num_layers=options.layers,
        draft_vocab_size=len(ids),
        trained_drafts=options.drafts,
        norm_eps=spec.norm_eps,
        logit_scale=spec.logit_scale,
        logit_soft_cap=spec.logit_soft_cap,
        target=files.name,
        fingerprint=mark,
    )
    leaves = draft_head.init_params(config, options.seed)
    params = draft_head.attach(leaves, ids, frozen)
    on_cpu = jax.default_backend() == "cpu"
    fixed: DraftParams = {
        "embed": params["embed"],
        "vocab_ids": params["vocab_ids"],
        # bfloat16 products are slow in the backward pass on CPU
        "head": params["head"].astype(jnp.float32) if on_cpu else params["head"],
    }
    trained, record = draft_train.train(
        config,
        fixed,
        leaves,
        train_set,
        settings,
        work / "checkpoints",
        progress=options.progress,
    )
    drafts = max(options.drafts, _REPORT_DRAFTS)
    served = draft_head.attach(trained, ids, frozen)  # as it will be served
    result = draft_train.evaluate(config, served, held_out, drafts)
    report |= _outcome(record, result)
    draft_store.save(options.output, draft_store.Draft(config, dict(trained), ids), report)
    written = draft_train.write_losses(options.output, record.losses)
    _show(options, result, record.step, record.seconds, time.monotonic() - began, written)
    return 0


@dataclass(frozen=True)
class _Run:
    """What a training needs beside the model."""

    options: TrainDraft
    work: Path
    train_set: Corpus
    held_out: Corpus
    settings: TrainSettings
    report: dict[str, Any]
    began: float


def _train_layer(
    run: _Run,
    spec: DecoderSpec,
    mark: str,
    name: str,
    frozen: dict[str, Any],
    final_norm: NDArray[Any],
    ids: NDArray[np.int32],
) -> int:
    """An EAGLE-3 head, saved as it is published."""
    import jax.numpy as jnp
    import numpy as np

    from jaxengine.lab.train import draft_train, eagle_train
    from jaxengine.runner.draft.eagle_files import EagleHead, write_eagle

    options, drafts = run.options, max(run.options.drafts, _REPORT_DRAFTS)
    form = eagle_train.form_for(spec, options.ffn_size, len(ids))
    leaves = eagle_train.init_leaves(form, spec, final_norm, options.seed)
    rows = jnp.asarray(frozen.get("head", frozen["embed"]), jnp.float32)[jnp.asarray(ids)]
    fixed = {"embed": frozen["embed"], "head": rows, "vocab_ids": jnp.asarray(ids)}
    texts = max(1, options.batch_size // eagle_train.CHAINS)
    settings = replace(run.settings, batch_size=texts)
    trained, record = eagle_train.train_eagle(
        form, spec, fixed, leaves, run.train_set, options.drafts, settings,
        run.work / "checkpoints", progress=options.progress,
    )  # fmt: skip
    result = eagle_train.evaluate_eagle(form, {**trained, **fixed}, run.held_out, drafts)
    own = {"head": np.asarray(rows), "vocab_ids": ids}
    report = run.report | _outcome(record, result)
    write_eagle(options.output, EagleHead(form, {**trained, **own}), name, mark, report)
    written = draft_train.write_losses(options.output, record.losses)
    total = time.monotonic() - run.began
    _show(options, result, record.step, record.seconds, total, written)
    return 0


def _outcome(record: Progress, result: Acceptance) -> dict[str, Any]:
    """For the drafter's config.json."""
    last = record.losses[-50:]
    return {
        "steps": record.step,
        "seconds_of_training": round(record.seconds, 1),
        "last_loss": round(sum(last) / len(last), 4) if last else None,
        "acceptance_by_position": [round(x, 4) for x in result.by_position],
        "held_out_positions": result.count,
    }


def _corpora(
    options: TrainDraft,
    files: ModelFiles,
    spec: DecoderSpec,
    work: Path,
    began: float,
    taps: tuple[int, ...],
) -> tuple[Corpus, Corpus, Any]:
    """Training and held-out texts with the target's states, from the last run if it has them; and
    the target's parameters."""
    import jax.numpy as jnp

    from jaxengine.lab.train import draft_data
    from jaxengine.weights.load import checkpoint_dtype, load_params

    kept = work / "train.safetensors", work / "held_out.safetensors"
    dtype = "float32" if checkpoint_dtype(files) == "float32" else "bfloat16"
    if all(path.is_file() for path in kept):
        _say(f"texts and states of the last run are taken from {work}")
        target = load_params(files, spec, dtype, jnp.asarray, options.progress)
        return draft_data.load_corpus(kept[0]), draft_data.load_corpus(kept[1]), target
    texts, held_out = _write_texts(options, dtype, began)
    target = load_params(files, spec, dtype, jnp.asarray, options.progress)
    corpora = []
    for path, part in zip(kept, (texts, held_out), strict=True):
        corpora.append(draft_data.collect(spec, target, part, taps=taps, progress=options.progress))
        draft_data.save_corpus(path, corpora[-1])
    return corpora[0], corpora[1], target


def _write_texts(options: TrainDraft, dtype: str, began: float) -> tuple[Any, Any]:
    from jaxengine.front.llm import LLM
    from jaxengine.lab.train import draft_data, draft_prompts

    prompts = (
        draft_prompts.built_in(options.seed)
        if options.prompts is None
        else draft_prompts.read_prompts(options.prompts)
    )
    only_ids = all(isinstance(p, list) and isinstance(p[0], int) for p in prompts)
    count = min(_HELD_OUT, max(1, len(prompts) // 10))
    with LLM(
        options.model,
        skip_tokenizer_init=only_ids,
        max_model_len=options.max_prompt + options.max_tokens,
        dtype=dtype,
        generation_config="engine",
        warmup="lazy",  # few shapes are used
    ) as llm:
        how: dict[str, Any] = {
            "max_tokens": options.max_tokens,
            "max_prompt": options.max_prompt,
            "seed": options.seed,
            "progress": options.progress,
            "deadline": began + options.minutes * 60 * _TEXT_SHARE,
        }
        held_out = draft_data.generate(
            llm, prompts[-count:], num_tokens=10**9, greedy_only=True, **how
        )
        texts = draft_data.generate(
            llm, prompts[:-count], num_tokens=options.tokens, greedy_only=False, **how
        )
    return texts, held_out


def _claim(work: Path, options: TrainDraft, mark: str) -> None:
    """The folder is this run's, or was left by one with the same settings."""
    varying = ("output", "minutes", "steps", "progress", "learning_rate")
    ours = {
        name: str(value)
        for name, value in dataclasses.asdict(options).items()
        if name not in varying
    } | {"fingerprint": mark}
    path = work / "settings.json"
    if path.is_file():
        theirs = json.loads(path.read_text(encoding="utf-8"))
        different = sorted(k for k in ours if theirs.get(k) != ours[k])
        if different:
            raise ValueError(
                f"--output {options.output} holds a run with another {different[0]}: "
                "take another folder, or delete it"
            )
        return
    work.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(ours, indent=2) + "\n", encoding="utf-8")


def _check(options: TrainDraft) -> None:
    least = {"steps": 1, "tokens": 1, "max_tokens": options.drafts + 3, "max_prompt": 1}
    least |= {"drafts": 1, "draft_vocab_size": 0, "ffn_size": 0, "layers": 1, "batch_size": 1}
    for name, bound in least.items():
        if getattr(options, name) < bound:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be at least {bound}, got {getattr(options, name)}")
    if not options.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {options.minutes}")
    if not options.learning_rate > 0:
        raise ValueError(f"--learning-rate must be above 0, got {options.learning_rate}")
    if options.features not in (1, 3):
        raise ValueError(f"--features must be 1 or 3, got {options.features}")
    if options.drafts > 16:
        raise ValueError(f"--drafts must be at most 16, got {options.drafts}")


def _show(
    options: TrainDraft,
    result: Acceptance,
    steps: int,
    training: float,
    total: float,
    written: list[Path],
) -> None:
    _say(f"{steps} steps in {training:.0f} s; {total:.0f} s in all")
    _say(f"acceptance on held-out text, {result.count} positions:")
    before = 1.0
    for position, share in enumerate(result.by_position[:_REPORT_DRAFTS], 1):
        given = share / before if before else 0.0
        _say(f"  position {position}: {share:6.1%}   ({given:.1%} of those that got there)")
        before = share
    _say(
        f"  mean tokens a step with {len(result.by_position)} drafts: {result.tokens_per_step:.2f}"
    )
    _say(f"saved in {options.output} (with {', '.join(path.name for path in written)})")


def _say(text: str) -> None:
    print(text, flush=True)
