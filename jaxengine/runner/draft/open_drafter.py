"""Opens the drafter that `--speculative-config` names: its files, the checks that it fits, its
sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxengine.config import EngineConfig
from jaxengine.models.cache import cache_bytes_per_token, cache_shapes
from jaxengine.models.decoder import KV
from jaxengine.models.errors import ModelLoadError
from jaxengine.models.params import param_shapes
from jaxengine.models.spec import DecoderSpec, Params, for_context
from jaxengine.parallel.layout import StepLayout
from jaxengine.runner.attention import choose_attention
from jaxengine.runner.draft.drafter import Drafter
from jaxengine.runner.forward import StepConfig
from jaxengine.speculate.config import SpeculativeConfig, parse_speculative_config
from jaxengine.weights.fingerprint import fingerprint
from jaxengine.weights.load import load_params, load_spec
from jaxengine.weights.resolve import ModelFiles, resolve_model


@dataclass(frozen=True)
class Target:
    """The model that drafts are for."""

    files: ModelFiles
    spec: DecoderSpec
    dtype: str
    layout: StepLayout
    block_size: int


@dataclass(frozen=True)
class Prospect:
    """A drafter before the engine's sizes are known. `token_bytes`: its KV of one token;
    `weight_bytes`: of what it holds in addition to the target.
    `open` takes the target's step and the shapes of its parameters, and raises ValueError. `taps`:
    see `models.decoder.decode`."""

    token_bytes: int
    weight_bytes: int
    open: Callable[[StepConfig, Params], Drafter]
    taps: tuple[int, ...] = ()


def find_drafter(config: EngineConfig, target: Target) -> Prospect | None:
    """None for a method that drafts without a model. Raises ValueError and the loader's errors for
    a drafter that cannot work here."""
    setting = config.scheduler.speculative_config
    if setting is None:
        return None
    chosen = parse_speculative_config(setting)
    if not chosen.has_model or not chosen.num_speculative_tokens:
        return None
    _refuse(config, chosen.method)
    match chosen.method:
        case "eagle":
            found = _eagle(config, chosen, target)
        case "draft_model":
            found = _second_model(config, chosen, target)
        case _:
            found = _mtp(target)
    if found.token_bytes:
        _refuse_tiers(config, chosen.method)
    return found


def _refuse(config: EngineConfig, method: str) -> None:
    parallel = config.parallel
    clashes = {
        "tensor_parallel_size": parallel.tensor_parallel_size > 1,
        "attention_data_parallel_size": parallel.attention_data_parallel_size > 1,
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
    }
    _raise_first(clashes, method)


def _refuse_tiers(config: EngineConfig, method: str) -> None:
    """A drafter's KV is on the device alone."""
    cache = config.cache
    clashes = {
        "kv_offloading_size": cache.kv_offloading_size is not None,
        "kv_transfer_config": cache.kv_transfer_config is not None,
    }
    _raise_first(clashes, method)


def _raise_first(clashes: dict[str, bool], method: str) -> None:
    for name, clash in clashes.items():
        if clash:
            raise ValueError(
                f"speculative_config.method {method} does not work with {name}; "
                "leave one of them out"
            )


def _eagle(config: EngineConfig, chosen: SpeculativeConfig, target: Target) -> Prospect:
    from jaxengine.runner.draft.eagle import eagle_drafter, is_recurrent, read_head

    if not is_recurrent(chosen.model):
        return _eagle_layer(config, chosen, target)
    draft = read_head(chosen.model, target.spec, fingerprint(target.files))
    size = sum(leaf.nbytes for leaf in draft.params.values())
    return Prospect(0, size, lambda step, params: eagle_drafter(draft, step, params))


def _eagle_layer(config: EngineConfig, chosen: SpeculativeConfig, target: Target) -> Prospect:
    """A published head of one decoder layer."""
    from jaxengine.runner.draft.eagle_files import read_eagle
    from jaxengine.runner.draft.eagle_layer import layer_drafter
    from jaxengine.runner.draft.second_model import check_windows

    files = _files(config, chosen)
    try:
        found = read_eagle(files, target.spec, fingerprint(target.files), target.dtype)
    except (ValueError, ModelLoadError) as error:
        raise ValueError(f"speculative_config.model {chosen.model}: {error}") from error
    check_windows(found.form.spec, target.spec, chosen.model)
    kv_dtype = jnp.dtype(target.dtype)
    layout = _layout(config, found.form.spec, target)
    spec, own = found.form.spec, found.params
    taken = [name for name in ("head", "embed") if name not in own]

    def open_(step: StepConfig, params: Params) -> Drafter:
        form = replace(found.form, spec=for_context(spec, step.spec.rope.context))
        of_layer = replace(step, spec=form.spec, layout=layout, taps=())

        def of_target(target: Params) -> Params:
            return {
                name: target.get(name, target["embed"]) if name == "head" else target[name]
                for name in taken
            }

        def load(of: Params) -> Params:
            return {name: _put(array, of, name) for name, array in own.items()} | of_target(of)

        shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in own.items()}
        shapes |= of_target(params)
        return layer_drafter(form, of_layer, shapes, _kv_shapes(of_layer, kv_dtype), load)

    token_bytes = cache_bytes_per_token(spec, kv_dtype.itemsize, layout)
    return Prospect(token_bytes, sum(x.nbytes for x in own.values()), open_, found.form.taps)


def _files(config: EngineConfig, chosen: SpeculativeConfig) -> ModelFiles:
    try:
        return resolve_model(chosen.model, chosen.revision, config.model.download_dir)
    except ModelLoadError as error:
        raise ValueError(f"speculative_config.model: {error}") from error


def _layout(config: EngineConfig, spec: DecoderSpec, target: Target) -> StepLayout:
    """Layout of the drafter's own KV."""
    backend, on_cpu = config.runner.attention_backend, jax.default_backend() == "cpu"
    kv_dtype = jnp.dtype(target.dtype)
    return choose_attention(backend, spec, kv_dtype, target.block_size, on_cpu)[0]


def _second_model(config: EngineConfig, chosen: SpeculativeConfig, target: Target) -> Prospect:
    from jaxengine.runner.draft.second_model import check_fits, model_drafter

    files = _files(config, chosen)
    plain = load_spec(files)
    vocab_size = _common_vocabulary(files, plain, target)
    kv_dtype = jnp.dtype(target.dtype)
    layout = _layout(config, plain, target)

    def open_(step: StepConfig, params: Params) -> Drafter:
        max_model_len = step.spec.rope.context
        longest = min(max_model_len, chosen.max_model_len)
        check_fits(plain, target.spec, longest, chosen.model)
        spec = for_context(plain, max_model_len)
        own = replace(step, spec=spec, layout=layout)

        def load() -> Params:
            return load_params(files, spec, target.dtype, jnp.asarray)

        shapes = param_shapes(spec, kv_dtype)
        return model_drafter(own, shapes, _kv_shapes(own, kv_dtype), load, vocab_size)

    token_bytes = cache_bytes_per_token(plain, kv_dtype.itemsize, layout)
    return Prospect(token_bytes, _bytes(param_shapes(plain, kv_dtype)), open_)


def _mtp(target: Target) -> Prospect:
    from jaxengine.runner.draft.mtp import extra_layer, mtp_drafter, mtp_shapes, one_layer
    from jaxengine.runner.draft.mtp_load import read_mtp

    extended = extra_layer(target.spec, target.files)
    kv_dtype = jnp.dtype(target.dtype)
    size = cache_bytes_per_token(one_layer(extended), kv_dtype.itemsize, target.layout)

    def open_(step: StepConfig, params: Params) -> Drafter:
        layer_spec = replace(one_layer(extended), rope=step.spec.rope)
        own = replace(step, spec=layer_spec)

        def load(of_target: Params) -> Params:
            layer, others = read_mtp(target.files, extended, target.dtype)
            loaded: Params = {name: _put(array, of_target, name) for name, array in others.items()}
            loaded["layers"] = [{name: jnp.asarray(array) for name, array in layer.items()}]
            return loaded

        shapes = mtp_shapes(extended, kv_dtype)
        return mtp_drafter(own, shapes, _kv_shapes(own, kv_dtype), load)

    return Prospect(size, _bytes(mtp_shapes(extended, kv_dtype)), open_)


def _bytes(shapes: Params) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _put(array: NDArray[Any], target: Params, name: str) -> jax.Array:
    """Put leaves on the device; what checkpoints store twice (embedding, output head) only once."""
    other = target.get(name)
    if isinstance(other, jax.Array) and other.shape == array.shape and other.dtype == array.dtype:
        if np.array_equal(np.asarray(other), array):
            return other
    return jnp.asarray(array)


def _kv_shapes(step: StepConfig, dtype: Any) -> KV:
    """The drafter's pool: as many blocks of the same size as the target's."""
    shape = step.shape
    arrays = cache_shapes(step.spec, step.layout, shape.num_blocks, shape.block_size)
    cache = tuple(jax.ShapeDtypeStruct(dims, dtype) for dims in arrays)
    return (cache,) * step.spec.num_layers  # type: ignore[return-value]


def _common_vocabulary(files: ModelFiles, spec: DecoderSpec, target: Target) -> int:
    """Number of ids that mean the same in both models: all that both have (embeddings may be padded
    differently). Raises ValueError when some id does not, or cannot be compared."""
    from jaxengine.text.tokenizer import load_tokenizer

    what = f"speculative_config.model {files.path}"
    vocabularies = []
    for each in (target.files, files):
        try:
            vocabularies.append(load_tokenizer(each).tk.get_vocab(with_added_tokens=True))
        except ModelLoadError:  # a model without tokenizer serves token ids
            vocabularies.append({})
    theirs, own = vocabularies
    if theirs != own:
        differ = sorted(
            name for name in theirs.keys() | own.keys() if theirs.get(name) != own.get(name)
        )
        raise ValueError(
            f"{what} has another vocabulary than the target: {len(differ)} tokens differ, "
            f"the first is {differ[0]!r}"
        )
    if not own and spec.vocab_size != target.spec.vocab_size:
        raise ValueError(
            f"{what} has a vocabulary of {spec.vocab_size} tokens, the target of "
            f"{target.spec.vocab_size}, and neither has a tokenizer to compare"
        )
    return min(spec.vocab_size, target.spec.vocab_size)
