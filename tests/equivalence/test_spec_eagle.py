"""EAGLE and EAGLE-3 checkpoints of others: they draft what a plain float64 model of them does, and
the target's tokens stay its own."""

from __future__ import annotations

import json
import pathlib
import random
import re
import shutil
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafters import RANGES, SMALL, Record, recorded_drafts
from eagle_heads import DRAFTED, LAYERS, WIDTH, expected_drafts, save_head, target_states
from engine_runs import (
    GOLDENS,
    ONE_ROW,
    VOCAB,
    alone,
    depth,
    engine,
    ids_of,
    oracle_engine,
    prompt_of,
    request,
)
from safetensors.numpy import load_file, save_file
from test_speculation import assert_equal, in_turns, spec_figures

from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.lab.train import eagle_train
from jaxengine.parallel.layout import StepLayout
from jaxengine.runner.draft.eagle_files import EagleHead, read_eagle, write_eagle
from jaxengine.runner.draft.open_drafter import Target, find_drafter
from jaxengine.weights.fingerprint import fingerprint
from jaxengine.weights.load import load_spec
from jaxengine.weights.resolve import resolve_model


def drafting(folder: pathlib.Path) -> EngineCore:
    setting = {
        "method": "eagle3",
        "model": str(folder),
        "num_speculative_tokens_per_batch_size": RANGES,
    }
    return engine(**SMALL, model="llama", warmup="full", speculative_config=json.dumps(setting))


def assert_reference(folder: pathlib.Path, record: Record, rng: random.Random) -> None:
    """A sample of what was drafted, in float64."""
    compared = 0
    for tokens in rng.sample(sorted(record.drafts), min(20, len(record.drafts))):
        want, lead = expected_drafts(folder, list(tokens), len(record.drafts[tokens]))
        if lead > 1e-3:  # else float32 may well choose the other one
            assert record.drafts[tokens] == want, tokens
            compared += len(want)
    assert compared > 15


@pytest.mark.slow
def test_drafts_of_one_request(tmp_path: pathlib.Path) -> None:
    """EAGLE-3, few programs: two chunks of a prompt, then drafts."""
    folder = save_head(tmp_path / "eagle3", "eagle3")
    setting = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 2}
    core = engine(**ONE_ROW, model="llama", speculative_config=json.dumps(setting))
    wire = request("a", prompt_of(random.Random(3), 25), max_tokens=30)
    with recorded_drafts(core) as record:
        assert_equal([wire], alone(core, [wire]))
    assert_reference(folder, record, random.Random(1))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["eagle3", "eagle", "eagle3-normed"])
def test_random_mixes(form: str, tmp_path: pathlib.Path) -> None:
    """Of several rows, which are chunked, preempted, found in the prefix cache, and sampled."""
    folder = save_head(tmp_path / form, form)
    core = drafting(folder)
    rng = random.Random(12)
    shared = prompt_of(rng, 30)
    requests = [
        request(f"{i}", [*shared[: 10 * i], *prompt_of(rng, 9 + 6 * i)], max_tokens=(25, 50)[i % 2],
                temperature=(0.0, 0.8)[i % 2], seed=i)
        for i in range(6)
    ]  # fmt: skip
    for steps in (2, 1):
        core.scheduler.reset_prefix_cache()
        before = spec_figures(core)["num_draft_tokens"]
        with depth(core, steps), recorded_drafts(core) as record:
            got = in_turns(core, requests, every=5)
        assert_equal(requests, got)
        assert spec_figures(core)["num_draft_tokens"] - before > 50
        # Behind a prefix hit one entry of the drafter's KV belongs to the request that wrote it,
        # whose next token was another (docs/speculation.md); the reference knows nothing of it.
        assert any(one.cached for one in got.values())
        fresh = [tuple(r.prompt_token_ids) for r in requests if not got[r.request_id].cached]
        kept = {
            tokens: drafts
            for tokens, drafts in record.drafts.items()
            if any(tokens[: len(prompt)] == prompt for prompt in fresh)
        }
        assert_reference(folder, replace(record, drafts=kept), rng)
    assert core.stats().num_preemptions > 0
    assert core.stats().compilations_after_warmup == 0


@pytest.mark.slow
def test_prompt_scores_beside_tapped_states(tmp_path: pathlib.Path) -> None:
    """The states that the head reads change nothing for who reads the final ones."""
    core = drafting(save_head(tmp_path / "eagle3", "eagle3"))
    wire = request("a", prompt_of(random.Random(1), 20), max_tokens=4, prompt_logprobs=2)
    want, got = (alone(one, [wire])["a"] for one in (oracle_engine(), core))
    assert want.prompt is not None and got.prompt is not None
    for x, y in zip(want.prompt[1:], got.prompt[1:], strict=True):
        assert x is not None and y is not None
        assert x.token_ids == y.token_ids
        assert x.logprobs == pytest.approx(y.logprobs, abs=1e-3)
    assert ids_of({"a": want}) == ids_of({"a": got})


def test_trained_heads_are_what_is_served(tmp_path: pathlib.Path) -> None:
    """The chains of training are the drafts of the file that is written, by the same reference."""
    files = resolve_model(str(GOLDENS / "llama"))
    spec, rng = load_spec(files), np.random.default_rng(5)
    ids = np.sort(rng.choice(VOCAB, 150, replace=False)).astype(np.int32)
    form = eagle_train.form_for(spec, 80, len(ids))
    tokens = prompt_of(random.Random(9), 24)
    _, tapped, weights = target_states(tokens)
    leaves = eagle_train.init_leaves(form, spec, weights["model.norm.weight"], 0)
    for name in ("o", "down"):  # they start at zero
        leaves[name] = (rng.standard_normal(leaves[name].shape) / 8).astype(np.float32)
    rows = weights["lm_head.weight"][ids].astype(np.float32)
    head = EagleHead(form, {**leaves, "head": rows, "vocab_ids": ids})
    write_eagle(tmp_path / "head", head, "llama", fingerprint(files), {"steps": 1})
    back = read_eagle(resolve_model(str(tmp_path / "head")), spec, fingerprint(files), "float32")
    assert back.form == form and back.params.keys() == head.params.keys()
    for name, array in head.params.items():
        np.testing.assert_array_equal(back.params[name], array)

    embed = weights["model.embed_tokens.weight"].astype(np.float32)
    params = {name: jnp.asarray(x) for name, x in {**head.params, "embed": embed}.items()}
    chains, drafts = np.array([3, 11, 20], np.int32), 3

    @jax.jit
    def run(features: Any, ids: Any) -> Any:
        chain = eagle_train.chain_logits(form, params, features, ids, chains, drafts, False)
        return params["vocab_ids"][jnp.stack(chain, 1).argmax(-1)]

    got = np.asarray(run(tapped.astype(np.float32), np.asarray(tokens, np.int32)))
    for chain, found in zip(chains.tolist(), got.tolist(), strict=True):
        want, lead = expected_drafts(tmp_path / "head", tokens[: chain + 2], drafts)
        assert found == want or lead < 1e-3


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def test_a_head_without_an_output_head_is_no_tied_model(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the names of a whole model it looks like one whose head was left out."""
    less = dict.fromkeys(("lm_head.weight", "d2t", "t2d", "config_draft_vocab_size"))
    folder = save_head(tmp_path / "eagle3", "eagle3-normed", **less)
    file = folder / "model.safetensors"
    save_file({f"model.{name}": x for name, x in load_file(file).items()}, file)
    files = resolve_model(str(GOLDENS / "llama"))
    head = read_eagle(resolve_model(str(folder)), load_spec(files), fingerprint(files), "float32")
    assert "head" not in head.params and not caplog.records


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "layers": ("eagle3", {"config_num_hidden_layers": 2}, "num_hidden_layers must be 1, got 2"),
    "family": ("eagle3", {"config_architectures": ["MedusaModel"]}, "MedusaModel is no EAGLE"),
    "width": ("eagle", {"config_hidden_size": 32}, f"size is 32, but the model's is {WIDTH}"),
    "vocabulary": ("eagle", {"config_vocab_size": 99}, f"vocab_size is 99, .* is {VOCAB}"),
    "shape": ("eagle3", {"fc.weight": zeros(WIDTH, WIDTH)}, "fc.weight has shape .* fc of shape"),
    "missing": ("eagle3", {"norm.weight": None}, "lacks tensor norm.weight"),
    "no head": ("eagle3", {"lm_head.weight": None}, "lacks lm_head.weight of its 200 draft"),
    "no map": ("eagle3", {"d2t": None}, "lacks d2t: which 200 tokens"),
    "map": ("eagle3", {"d2t": np.full(DRAFTED, VOCAB)}, "d2t does not give 200 different ids"),
    "two maps": ("eagle3", {"t2d": np.arange(VOCAB) < DRAFTED}, "t2d and d2t name different"),
    "floats": ("eagle3", {"d2t": zeros(DRAFTED)}, "d2t has type float32, not of integers"),
    "taps": ("eagle3", {"config_eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 99]}},
             f"from 1 to the model's {LAYERS} layers"),
    "unknown": ("eagle", {"layers.0.extra.weight": zeros(1)}, "extra.weight, which no EAGLE head"),
    "other weights": ("eagle3", {"config_jaxengine_target": "0"}, "trained for other weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case: str, tmp_path: pathlib.Path) -> None:
    form, changes, message = BAD[case]
    folder = save_head(tmp_path / "head", form, **changes)
    text = refusal(folder)
    assert text.startswith(f"speculative_config.model {folder}") and "\n" not in text
    assert re.search(message, text), text


def test_heads_that_keep_kv_go_with_no_tier(tmp_path: pathlib.Path) -> None:
    folder = save_head(tmp_path / "head", "eagle3")
    assert "does not work with kv_offloading_size" in refusal(folder, kv_offloading_size=1)
    shutil.move(folder / "model.safetensors", folder / "model.bin")
    assert "only pickled weights" in refusal(folder)


def refusal(folder: pathlib.Path, **settings: Any) -> str:
    model = GOLDENS / "llama"
    setting = {"method": "eagle", "model": str(folder), "num_speculative_tokens": 2}
    config = EngineConfig.of(model=str(model), speculative_config=setting, **settings)
    files = resolve_model(str(model))
    with pytest.raises(ValueError) as error:
        find_drafter(config, Target(files, load_spec(files), "float32", StepLayout(), 16))
    return str(error.value)
