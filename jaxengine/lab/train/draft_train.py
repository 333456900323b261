"""Training of the draft head: distillation of the target over text that it wrote itself."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray
from tqdm import tqdm

from jaxengine.lab.train.draft_data import Corpus
from jaxengine.models.layers.linear import linear
from jaxengine.runner.draft.draft_head import DraftConfig, DraftParams, draft_greedy, draft_step

log = logging.getLogger(__name__)

STEP_DECAY = 0.8  # weight of a later draft: it only counts when those before it are accepted
_WARMUP = 0.05  # share of the run in which the learning rate rises
_CHECKPOINT_SECONDS = 60.0
_EVAL_ROWS = 256


@dataclass(frozen=True)
class TrainSettings:
    steps: int
    seconds: float  # of this run; the learning rate falls with whichever ends first
    batch_size: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    feature_weight: float = 0.3  # of the distance to the target's hidden states
    noise: float = 0.0  # relative noise on the first hidden state
    seed: int = 0


@dataclass
class Progress:
    """What a run has done so far; goes into checkpoints."""

    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)  # by step


@dataclass(frozen=True)
class Acceptance:
    """Of greedy drafts against the target's greedy choice, over `count` positions.

    `by_position[j]` is the share of positions where drafts 1 .. j + 1 were all right: what the
    engine counts as accepted at that position.
    """

    by_position: tuple[float, ...]
    count: int

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens a verification brings with so many drafts, the target's own included."""
        return 1.0 + sum(self.by_position)


class DraftModule(nnx.Module):
    """The trained leaves as flax parameters."""

    def __init__(self, leaves: dict[str, Any]) -> None:
        self.leaves = nnx.Dict({name: nnx.Param(jnp.asarray(x)) for name, x in leaves.items()})

    def arrays(self) -> DraftParams:
        return {name: leaf[...] for name, leaf in self.leaves.items()}


class Batch(NamedTuple):
    """B windows of K drafts."""

    hidden: Float[Array, "B K1 D"]  # the target's states at t .. t + K
    tokens: Int[Array, "B K"]  # the text at t + 1 .. t + K
    log_sum: Float[Array, "B K"]  # of the target's logits there


Opt = Any
# (parameters: trained leaves and frozen parts, batch, number of the step) -> loss
LossFn = Callable[[DraftParams, Any, Array], Array]


def train(
    config: DraftConfig,
    frozen: DraftParams,
    leaves: dict[str, NDArray[Any]],
    corpus: Corpus,
    settings: TrainSettings,
    checkpoints: Path | None = None,
    *,
    progress: bool = True,
) -> tuple[dict[str, NDArray[np.float32]], Progress]:
    """Train the leaves; returns them and the run's record.

    `frozen` are the target's parts (`embed`, `head`, `vocab_ids`). With `checkpoints`, the run
    goes on from the last one there and writes its own. Raises ValueError when the texts are too
    short for one window, FloatingPointError when the loss is no longer a number.
    """
    drafts = config.trained_drafts
    windows = corpus.windows(drafts)
    if not len(windows):
        raise ValueError(f"no text is long enough for {drafts} drafts: generate longer texts")
    scale = float(np.sqrt(np.mean(np.square(corpus.hidden[:4096].astype(np.float32))))) or 1.0

    def gather(t: NDArray[np.int64], _: int) -> Batch:
        return _gather(corpus, t, drafts)

    loss = _recurrent_loss(config, settings, scale)
    return fit(loss, frozen, leaves, windows, gather, settings, checkpoints, progress=progress)


def fit(
    loss: LossFn,
    frozen: DraftParams,
    leaves: dict[str, NDArray[Any]],
    examples: NDArray[np.int64],
    gather: Callable[[NDArray[np.int64], int], Any],
    settings: TrainSettings,
    checkpoints: Path | None = None,
    *,
    progress: bool = True,
) -> tuple[dict[str, NDArray[np.float32]], Progress]:
    """Minimise `loss`; returns the leaves and the run's record. `gather(examples, step)` makes a
    batch of `settings.batch_size` of them. Raises FloatingPointError when the loss is no longer a
    number."""
    graph, params = nnx.split(DraftModule(leaves), nnx.Param)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.98),
        optax.add_decayed_weights(settings.weight_decay),
    )
    opt_state = optimizer.init(params)
    update = _update_program(loss, graph, optimizer)
    record = Progress()
    with _manager(checkpoints) as manager:
        if manager is not None:
            params, opt_state, record = _restore(manager, params, opt_state)
        began = saved = time.monotonic()
        spent = record.seconds
        with tqdm(
            total=settings.steps,
            initial=record.step,
            desc="Training",
            unit="step",
            disable=not progress,
        ) as bar:
            for indices in _batches(examples, settings, record.step):
                here = time.monotonic() - began
                if record.step >= settings.steps or here >= settings.seconds:
                    break
                done = max(record.step / settings.steps, here / settings.seconds)
                rate = np.float32(settings.learning_rate * _schedule(done))
                batch = gather(indices, record.step)
                key = np.uint32(record.step)
                params, opt_state, got = update(params, opt_state, frozen, batch, rate, key)
                value = float(got)
                if not np.isfinite(value):
                    raise FloatingPointError(
                        f"the loss is {value} at step {record.step}: lower --learning-rate"
                    )
                record.step += 1
                record.seconds = spent + time.monotonic() - began
                record.losses.append(value)
                bar.update()
                bar.set_postfix(loss=f"{np.mean(record.losses[-50:]):.3f}", refresh=False)
                if manager is not None and time.monotonic() - saved > _CHECKPOINT_SECONDS:
                    _save(manager, params, opt_state, record)
                    saved = time.monotonic()
        if manager is not None and manager.latest_step() != record.step:
            _save(manager, params, opt_state, record)
    module = nnx.merge(graph, params)
    return {name: np.asarray(leaf[...]) for name, leaf in module.leaves.items()}, record


def evaluate(config: DraftConfig, params: DraftParams, corpus: Corpus, drafts: int) -> Acceptance:
    """Acceptance of greedy drafts at every position of greedy text that the drafter has not seen.

    Raises ValueError when no text is long enough.
    """
    windows = corpus.windows(drafts)
    if not len(windows):
        raise ValueError(f"no held-out text is long enough for {drafts} drafts")
    run = jax.jit(functools.partial(draft_greedy, config, count=drafts))
    right: list[NDArray[np.bool_]] = []
    for first in range(0, len(windows), _EVAL_ROWS):
        t = windows[first : first + _EVAL_ROWS]
        padded = np.pad(t, (0, _EVAL_ROWS - len(t)), mode="edge")
        got = np.asarray(run(params, corpus.hidden[padded], corpus.tokens[padded + 1]))[: len(t)]
        # The choice after the text so far; where the text took another way the chain ends too.
        ahead = t[:, None] + 1 + np.arange(drafts)
        right.append((got == corpus.best[ahead]) & followed(corpus, ahead))
    accepted = np.cumprod(np.concatenate(right), axis=1).mean(axis=0)
    return Acceptance(tuple(float(x) for x in accepted), len(windows))


def followed(corpus: Corpus, ahead: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[n, K] the text up to each position is what the target would have written greedily."""
    text, best = corpus.tokens[ahead[:, 1:]], corpus.best[ahead[:, :-1]]
    first = np.ones((len(ahead), 1), bool)
    return np.concatenate([first, text == best], axis=1)


def _recurrent_loss(config: DraftConfig, settings: TrainSettings, scale: float) -> LossFn:
    def loss_of(params: DraftParams, batch: Batch, key: Array) -> Array:
        hidden = batch.hidden[:, 0].astype(jnp.float32)
        if settings.noise:
            rng = jax.random.key(key)
            hidden = hidden + scale * settings.noise * jax.random.normal(rng, hidden.shape)
        total = jnp.float32(0)
        weight = 0.0
        for j in range(batch.tokens.shape[1]):
            wanted = batch.hidden[:, j + 1].astype(jnp.float32)
            logits, hidden = draft_step(config, params, hidden, batch.tokens[:, j])
            target = jnp.exp(_target_logits(config, params, wanted) - batch.log_sum[:, j, None])
            entropy = -jnp.sum(target * jax.nn.log_softmax(logits), -1).mean()
            apart = optax.losses.huber_loss((hidden - wanted) / scale).mean()
            share = STEP_DECAY**j
            total = total + share * (entropy + settings.feature_weight * apart)
            weight += share
        return total / weight

    return loss_of


def _update_program(loss: LossFn, graph: Any, optimizer: Any) -> Any:
    def loss_of(params: Any, frozen: DraftParams, batch: Any, key: Array) -> Array:
        return loss({**nnx.merge(graph, params).arrays(), **frozen}, batch, key)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(
        params: Any, opt: Opt, frozen: DraftParams, batch: Any, rate: Array, key: Array
    ) -> tuple[Any, Opt, Array]:
        got, grads = jax.value_and_grad(loss_of)(params, frozen, batch, key)
        steps, opt = optimizer.update(grads, opt, params)
        steps = jax.tree.map(lambda s: -rate * s, steps)
        return optax.apply_updates(params, steps), opt, got

    return update


def _target_logits(
    config: DraftConfig, frozen: DraftParams, hidden: Float[Array, "B D"]
) -> Float[Array, "B v"]:
    """The target's own logits of the tokens that can be drafted."""
    logits = linear(hidden, frozen["head"]) * config.logit_scale
    if config.logit_soft_cap:
        logits = jnp.tanh(logits / config.logit_soft_cap) * config.logit_soft_cap
    return logits


def _gather(corpus: Corpus, t: NDArray[np.int64], drafts: int) -> Batch:
    states = t[:, None] + np.arange(drafts + 1)
    ahead = states[:, 1:]
    return Batch(corpus.hidden[states], corpus.tokens[ahead], corpus.log_sum[ahead])


def _batches(
    windows: NDArray[np.int64], settings: TrainSettings, skip: int
) -> Iterator[NDArray[np.int64]]:
    """Endless batches, shuffled anew every epoch; a resumed run goes on where it stopped."""
    size = settings.batch_size
    per_epoch = max(1, len(windows) // size)
    epoch, first = divmod(skip, per_epoch)
    while True:
        rng = np.random.default_rng((settings.seed, epoch))
        order = rng.permutation(len(windows))
        if len(order) < size:
            order = np.resize(order, size)
        for i in range(first, per_epoch):
            yield windows[order[i * size : (i + 1) * size]]
        epoch, first = epoch + 1, 0


def _schedule(done: float) -> float:
    """Share of the learning rate: a short rise, then half a cosine to a twentieth."""
    if done < _WARMUP:
        return (done + 0.002) / (_WARMUP + 0.002)
    return 0.05 + 0.95 * 0.5 * (1 + float(np.cos(np.pi * (done - _WARMUP) / (1 - _WARMUP))))


@contextmanager
def _manager(folder: Path | None) -> Iterator[ocp.CheckpointManager | None]:
    if folder is None:
        yield None
        return
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    manager = ocp.CheckpointManager(folder.resolve(), options=options)
    try:
        yield manager
    finally:
        manager.close()


def _save(manager: ocp.CheckpointManager, params: Any, opt_state: Opt, record: Progress) -> None:
    arrays = {"params": nnx.to_pure_dict(params), "opt": jax.tree.leaves(opt_state)}
    manager.save(
        record.step,
        args=ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(vars(record))
        ),
    )


def _restore(
    manager: ocp.CheckpointManager, params: Any, opt_state: Opt
) -> tuple[Any, Opt, Progress]:
    """The last checkpoint, or what is given when there is none."""
    step = manager.latest_step()
    if step is None:
        return params, opt_state, Progress()
    like = {"params": nnx.to_pure_dict(params), "opt": jax.tree.leaves(opt_state)}
    restored = manager.restore(
        step,
        args=ocp.args.Composite(
            arrays=ocp.args.StandardRestore(like), record=ocp.args.JsonRestore()
        ),
    )
    nnx.replace_by_pure_dict(params, restored.arrays["params"])
    opt_state = jax.tree.unflatten(jax.tree.structure(opt_state), restored.arrays["opt"])
    log.info("going on from the checkpoint of step %d", step)
    return params, opt_state, Progress(**restored.record)


def write_losses(folder: Path, losses: list[float]) -> list[Path]:
    """losses.csv, and losses.png where matplotlib is installed. Returns what was written."""
    table = folder / "losses.csv"
    rows = "\n".join(f"{step},{loss:.6f}" for step, loss in enumerate(losses, 1))
    table.write_text(f"step,loss\n{rows}\n", encoding="utf-8")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return [table]
    window = max(1, len(losses) // 50)
    smooth = np.convolve(losses, np.ones(window) / window, "valid")
    figure = Figure()  # not pyplot's: a notebook has a backend of its own
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, alpha=0.3)
    axes.plot(range(window, len(losses) + 1), smooth)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    picture = folder / "losses.png"
    figure.savefig(picture, dpi=120)
    return [table, picture]
