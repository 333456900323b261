"""The draft head: its arithmetic, what it learns from, training, resume, and its folder."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testdata import GOLDENS

from jaxengine.lab.train import draft_train
from jaxengine.lab.train.draft_data import (
    Corpus,
    Text,
    choose_vocabulary,
    collect,
    load_corpus,
    save_corpus,
)
from jaxengine.models.spec import DecoderSpec, Params
from jaxengine.runner.draft import draft_head, draft_store
from jaxengine.runner.draft.draft_head import DraftConfig
from jaxengine.weights.load import load_params, load_spec
from jaxengine.weights.resolve import resolve_model

SMALL = DraftConfig(
    vocab_size=50, hidden_size=8, ffn_size=12, num_layers=2, draft_vocab_size=20, trained_drafts=3
)


def golden(family: str) -> tuple[DecoderSpec, Params, list[Text]]:
    files = resolve_model(str(GOLDENS / family))
    spec = load_spec(files)
    params = load_params(files, spec, "float32", jnp.asarray, progress=False)
    cases = json.loads((GOLDENS / family / "golden.json").read_text())["cases"]
    texts = [Text(case["prompt"] + case["greedy"], len(case["prompt"])) for case in cases]
    return spec, params, texts


@pytest.fixture(scope="module")
def llama() -> tuple[DecoderSpec, Params, Corpus]:
    spec, params, texts = golden("llama")
    return spec, params, collect(spec, params, texts, progress=False)


@pytest.mark.parametrize("family", ["gemma3", "deepseek-v2"])
def test_collected_choices_are_the_targets(family: str) -> None:
    """Windows and latent attention; texts of different lengths in one padded batch."""
    spec, params, texts = golden(family)
    check_choices(collect(spec, params, texts, progress=False), texts)


def test_collected_choices_of_llama(llama: tuple[DecoderSpec, Params, Corpus]) -> None:
    spec, params, texts = golden("llama")
    _, _, corpus = llama
    check_choices(corpus, texts)
    table = np.asarray(params["head"], np.float64)
    logits = corpus.hidden.astype(np.float64) @ table.T
    assert np.log(np.exp(logits).sum(-1)) == pytest.approx(corpus.log_sum, abs=0.02)


def check_choices(corpus: Corpus, texts: list[Text]) -> None:
    assert corpus.num_texts == len(texts)
    for i, text in enumerate(texts):
        begin, end = corpus.start[i], corpus.start[i + 1]
        assert corpus.tokens[begin:end].tolist() == text.token_ids
        best = corpus.best[begin + text.num_prompt - 1 : end - 1]
        assert best.tolist() == text.token_ids[text.num_prompt :]


def hand_made(seed: int = 0) -> tuple[dict, np.ndarray, dict]:
    """Trained leaves (not the identity), draft vocabulary and target of SMALL."""
    rng = np.random.default_rng(seed)
    leaves = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in draft_head.head_shapes(SMALL).items()
    }
    ids = np.sort(rng.choice(50, 20, replace=False)).astype(np.int32)
    target = {"embed": rng.standard_normal((50, 8)), "head": rng.standard_normal((50, 8))}
    return leaves, ids, {k: jnp.asarray(v, jnp.float32) for k, v in target.items()}


@pytest.mark.parametrize("rows", [1, 3])
def test_draft_step_by_hand(rows: int) -> None:
    config = dataclasses.replace(SMALL, logit_scale=0.5, logit_soft_cap=3.0)
    leaves, ids, target = hand_made()
    params = draft_head.attach(leaves, ids, target)
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((rows, 8)).astype(np.float32)
    tokens = rng.integers(0, 50, rows).astype(np.int32)
    step = jax.jit(draft_head.draft_step, static_argnums=0)
    logits, after = step(config, params, hidden, tokens)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weight

    w = {name: leaf.astype(np.float64) for name, leaf in leaves.items()}
    token = norm(np.asarray(target["embed"], np.float64)[tokens], w["token_norm"])
    state = norm(hidden.astype(np.float64), w["hidden_norm"])
    x = np.concatenate([token, state], -1) @ w["join"].T
    for i in range(2):
        gate, up = np.split(norm(x, w[f"norm_{i}"]) @ w[f"gate_up_{i}"].T, 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"down_{i}"].T
    x = norm(x, w["out_norm"])
    expected = 3 * np.tanh(x @ np.asarray(target["head"], np.float64)[ids].T * 0.5 / 3)
    assert np.asarray(after) == pytest.approx(x, abs=1e-4)
    assert np.asarray(logits) == pytest.approx(expected, abs=1e-4)


def test_greedy_drafts_feed_themselves() -> None:
    leaves, ids, target = hand_made()
    params = draft_head.attach(leaves, ids, target)
    hidden, tokens = jnp.ones((2, 8)), jnp.array([3, 7], jnp.int32)
    drafts = np.asarray(draft_head.draft_greedy(SMALL, params, hidden, tokens, 3))
    assert drafts.shape == (2, 3) and np.isin(drafts, ids).all()
    state = hidden
    for j in range(3):
        logits, state = draft_head.draft_step(SMALL, params, state, tokens)
        assert drafts[:, j].tolist() == ids[np.asarray(logits).argmax(-1)].tolist()
        tokens = jnp.asarray(drafts[:, j])


def test_tied_and_8_bit_heads() -> None:
    leaves, ids, target = hand_made()
    tied = draft_head.attach(leaves, ids, {"embed": target["embed"]})
    assert np.array_equal(tied["head"], np.asarray(target["embed"])[ids])
    scale = jnp.linspace(0.01, 0.02, 50)
    whole = jnp.round(target["head"] / scale[:, None]).astype(jnp.int8)
    packed = draft_head.attach(leaves, ids, {**target, "head": (whole, scale)})
    wide = draft_head.attach(leaves, ids, {**target, "head": whole * scale[:, None]})
    hidden, tokens = jnp.ones((2, 8)), jnp.array([3, 7], jnp.int32)
    few, _ = draft_head.draft_step(SMALL, packed, hidden, tokens)
    many, _ = draft_head.draft_step(SMALL, wide, hidden, tokens)
    assert np.asarray(few) == pytest.approx(np.asarray(many), abs=0.1)


def prepared(llama: tuple[DecoderSpec, Params, Corpus], drafts: int = 2) -> tuple:
    spec, target, corpus = llama
    ids, cover = choose_vocabulary(corpus, spec.vocab_size, 0)
    assert cover == 1.0
    config = DraftConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, ffn_size=64, num_layers=1,
        draft_vocab_size=len(ids), trained_drafts=drafts,
    )  # fmt: skip
    leaves = draft_head.init_params(config, 0)
    params = draft_head.attach(leaves, ids, target)
    frozen = {name: params[name] for name in ("embed", "head", "vocab_ids")}
    return config, frozen, leaves, corpus


SETTINGS = draft_train.TrainSettings(steps=200, seconds=1e9, batch_size=32, learning_rate=3e-3)


def test_it_learns(llama: tuple[DecoderSpec, Params, Corpus]) -> None:
    """The few golden texts by heart: drafts come true that fresh weights never guess."""
    config, frozen, leaves, corpus = prepared(llama)
    before = draft_train.evaluate(config, {**leaves, **frozen}, corpus, 2)
    trained, record = draft_train.train(config, frozen, leaves, corpus, SETTINGS, progress=False)
    after = draft_train.evaluate(config, {**trained, **frozen}, corpus, 2)
    assert record.step == 200 and len(record.losses) == 200
    assert np.mean(record.losses[-10:]) < 0.8 * np.mean(record.losses[:10])
    assert before.by_position[0] < 0.2
    assert after.by_position[0] > 0.8 and after.by_position[1] > 0.6
    assert after.tokens_per_step == pytest.approx(1 + sum(after.by_position))


@pytest.mark.slow
def test_acceptance_by_hand(llama: tuple[DecoderSpec, Params, Corpus]) -> None:
    config, frozen, leaves, corpus = prepared(llama)
    rng = np.random.default_rng(0)
    tokens = corpus.tokens.copy()
    tokens[rng.random(len(tokens)) < 0.2] = 5  # text that is not greedy ends the comparison
    corpus = dataclasses.replace(corpus, tokens=tokens)
    trained, _ = draft_train.train(
        config, frozen, leaves, corpus, dataclasses.replace(SETTINGS, steps=60), progress=False
    )
    params = {**trained, **frozen}
    result = draft_train.evaluate(config, params, corpus, 3)
    accepted, windows = np.zeros(3), corpus.windows(3)
    for t in windows.tolist():
        state, token = jnp.asarray(corpus.hidden[t : t + 1]), tokens[t + 1 : t + 2]
        for j in range(3):
            logits, state = draft_head.draft_step(config, params, state, token)
            draft = int(frozen["vocab_ids"][int(logits[0].argmax())])
            if draft != corpus.best[t + 1 + j]:
                break
            accepted[j] += 1
            if tokens[t + 2 + j] != draft:
                break
            token = tokens[t + 2 + j : t + 3 + j]
        else:
            continue
    assert result.count == len(windows)
    assert result.by_position == pytest.approx(accepted / len(windows), abs=0.01)
    assert 0 < result.by_position[2] < result.by_position[0] < 1


@pytest.mark.slow
def test_a_stopped_run_goes_on(
    llama: tuple[DecoderSpec, Params, Corpus], tmp_path: pathlib.Path, monkeypatch
) -> None:
    """Ten steps, a stop and ten more are twenty steps."""
    config, frozen, leaves, corpus = prepared(llama)
    settings = dataclasses.replace(SETTINGS, steps=20)
    whole, _ = draft_train.train(config, frozen, leaves, corpus, settings, progress=False)
    batches = draft_train._batches
    with monkeypatch.context() as patch:
        patch.setattr(draft_train, "_batches", lambda *a: itertools.islice(batches(*a), 10))
        _, record = draft_train.train(
            config, frozen, leaves, corpus, settings, tmp_path / "run", progress=False
        )
    assert record.step == 10
    parts, record = draft_train.train(
        config, frozen, leaves, corpus, settings, tmp_path / "run", progress=False
    )
    assert record.step == 20 and len(record.losses) == 20
    for name, leaf in whole.items():
        assert parts[name] == pytest.approx(leaf, abs=1e-5), name
    written = draft_train.write_losses(tmp_path, record.losses)
    assert len(written[0].read_text().splitlines()) == 21


def test_bad_training(llama: tuple[DecoderSpec, Params, Corpus]) -> None:
    config, frozen, leaves, corpus = prepared(llama, drafts=500)
    with pytest.raises(ValueError, match="500 drafts"):
        draft_train.train(config, frozen, leaves, corpus, SETTINGS, progress=False)
    with pytest.raises(ValueError, match="500 drafts"):
        draft_train.evaluate(config, {**leaves, **frozen}, corpus, 500)


def test_corpus_and_vocabulary(tmp_path: pathlib.Path) -> None:
    tokens = np.array([9, 9, 4, 4, 2, 9, 7, 4], np.int32)
    corpus = Corpus(
        tokens, np.zeros((8, 2), np.float16), np.array([1, 4, 4, 4, 2, 7, 4, 0], np.int32),
        np.zeros(8, np.float32), np.array([0, 5, 8]), np.array([2, 1]),
    )  # fmt: skip
    assert corpus.windows(1).tolist() == [1, 2, 5]  # last prompt token to two before the end
    assert corpus.windows(2).tolist() == [1]
    ids, cover = choose_vocabulary(corpus, 10, 3)
    assert ids.tolist() == [2, 4, 7] and cover == pytest.approx(11 / 13)
    save_corpus(tmp_path / "corpus.safetensors", corpus)
    again = load_corpus(tmp_path / "corpus.safetensors")
    for name, array in vars(corpus).items():
        assert np.array_equal(array, getattr(again, name)), name


# -- the folder -------------------------------------------------------------------------------


def saved(folder: pathlib.Path, spec: DecoderSpec) -> draft_store.Draft:
    config = dataclasses.replace(
        SMALL, vocab_size=spec.vocab_size, hidden_size=8, target="tiny", fingerprint="f00"
    )
    leaves, ids, _ = hand_made()
    draft = draft_store.Draft(config, leaves, ids)
    draft_store.save(folder, draft, {"steps": 3})
    return draft


def test_folder_round_trip_and_check(
    llama: tuple[DecoderSpec, Params, Corpus], tmp_path: pathlib.Path
) -> None:
    spec = dataclasses.replace(llama[0], hidden_size=8)
    draft = saved(tmp_path, spec)
    again = draft_store.load(tmp_path)
    assert again.config == draft.config
    assert np.array_equal(again.vocab_ids, draft.vocab_ids)
    assert all(np.array_equal(again.params[name], leaf) for name, leaf in draft.params.items())
    draft_store.check(again, spec, "f00")
    with pytest.raises(ValueError, match="other weights .tiny"):
        draft_store.check(again, spec, "f01")
    with pytest.raises(ValueError, match="vocabulary of 320 tokens, but the model has 5"):
        draft_store.check(again, dataclasses.replace(spec, vocab_size=5), "f00")
    with pytest.raises(ValueError, match="width 8, but the model's have 64"):
        draft_store.check(again, llama[0], "f00")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "other"}, "not the config of a drafter"),
        ({"num_layers": 3}, "no tensor norm_2"),
        ({"ffn_size": 13}, "gate_up_0 has shape"),
        ({"ffn_size": "12"}, "ffn_size must be int"),
        ({"ffn_size": None}, "ffn_size must be int"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"vocab_size": 3}, "not all in the vocabulary"),
    ],
)
def test_damaged_config(
    llama: tuple[DecoderSpec, Params, Corpus],
    tmp_path: pathlib.Path,
    change: dict,
    message: str,
) -> None:
    saved(tmp_path, llama[0])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        draft_store.load(tmp_path)


def test_damaged_files(llama: tuple[DecoderSpec, Params, Corpus], tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        draft_store.load(tmp_path)
    saved(tmp_path, llama[0])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["ffn_size"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has no ffn_size"):
        draft_store.load(tmp_path)
    saved(tmp_path, llama[0])
    weights = tmp_path / "draft.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        draft_store.load(tmp_path)
