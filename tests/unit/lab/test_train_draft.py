"""The train-draft command, its prompts and its settings."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from testdata import GOLDENS

from jaxengine.cli.train_draft import TrainDraft, run_train_draft
from jaxengine.lab.train.draft_prompts import built_in, read_prompts
from jaxengine.models.families import spec_from_config
from jaxengine.runner.draft import draft_store
from jaxengine.runner.draft.eagle_files import read_eagle
from jaxengine.weights.fingerprint import fingerprint
from jaxengine.weights.resolve import resolve_model

LLAMA = GOLDENS / "llama"


def test_built_in_prompts_are_many_and_differ() -> None:
    prompts = [json.dumps(p) for p in built_in(0)]
    assert len(set(prompts)) == len(prompts) == 560
    assert prompts != [json.dumps(p) for p in built_in(1)]


def test_prompt_files(tmp_path: pathlib.Path) -> None:
    text = tmp_path / "p.txt"
    text.write_text("one\n\n two \n")
    assert read_prompts(text) == ["one", "two"]
    lines = tmp_path / "p.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"prompt": "a"}, {"prompt_token_ids": [1, 2]}, {"messages": messages}]
    lines.write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts(lines) == ["a", [1, 2], messages]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "one\n", "1 prompts"),
        ("p.csv", "a\nb\n", "must be a .txt or .jsonl"),
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', "line 2 has no prompt"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt_token_ids": [1, "2"]}\n', "line 2 has no prompt"),
        ("p.jsonl", '{"prompt": "a"}\nnonsense\n', "line 2 is not JSON"),
        ("p.jsonl", None, "cannot be read"),
    ],
)
def test_bad_prompt_files(
    tmp_path: pathlib.Path, name: str, content: str | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1"),
        ({"max_tokens": 5}, "--max-tokens must be at least 7"),
        ({"minutes": 0}, "--minutes"),
        ({"learning_rate": float("nan")}, "--learning-rate"),
        ({"drafts": 17}, "--drafts must be at most 16"),
        ({"features": 2}, "--features must be 1 or 3"),
    ],
)
def test_bad_settings(tmp_path: pathlib.Path, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_train_draft(TrainDraft("demo", tmp_path, **settings))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # compiles an engine
@pytest.mark.timeout(900)
def test_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it on a tiny model without tokenizer; a second call trains on."""
    rng = np.random.default_rng(0)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt_token_ids": rng.integers(3, 320, 5).tolist()} for _ in range(20)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "draft"
    how = {"prompts": prompts, "minutes": 9.0, "tokens": 300, "max_tokens": 20, "max_prompt": 8}
    how |= {"batch_size": 32, "draft_vocab_size": 100, "drafts": 2, "progress": False}
    assert run_train_draft(TrainDraft(str(LLAMA), out, steps=8, **how)) == 0
    printed = capsys.readouterr().out
    assert all(f"position {j}:" in printed for j in (1, 2, 3, 4))
    draft = draft_store.load(out)
    files = resolve_model(str(LLAMA))
    draft_store.check(draft, spec_from_config(files.config or {}), fingerprint(files))
    assert draft.config.draft_vocab_size == 100 and draft.config.trained_drafts == 2

    assert run_train_draft(TrainDraft(str(LLAMA), out, steps=12, **how)) == 0
    assert "of the last run" in capsys.readouterr().out
    report = json.loads((out / "config.json").read_text())["training"]
    assert report["steps"] == 12 and len(report["acceptance_by_position"]) == 4

    with pytest.raises(ValueError, match="another seed"):
        run_train_draft(TrainDraft(str(LLAMA), out, steps=12, seed=1, **how))


@pytest.mark.slow  # compiles an engine
@pytest.mark.timeout(900)
def test_command_with_three_features(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An EAGLE-3 head on a tiny model; a second call trains on, and the loss falls."""
    rng = np.random.default_rng(0)
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt_token_ids": rng.integers(3, 320, 5).tolist()} for _ in range(20)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "draft"
    how = {"prompts": prompts, "minutes": 9.0, "tokens": 300, "max_tokens": 20, "max_prompt": 8}
    how |= {"batch_size": 112, "draft_vocab_size": 100, "drafts": 2, "progress": False}
    how |= {"features": 3, "learning_rate": 3e-3}
    assert run_train_draft(TrainDraft(str(LLAMA), out, steps=8, **how)) == 0
    assert run_train_draft(TrainDraft(str(LLAMA), out, steps=60, **how)) == 0
    printed = capsys.readouterr().out
    assert "of the last run" in printed
    assert all(f"position {j}:" in printed for j in (1, 2, 3, 4))
    files = resolve_model(str(LLAMA))
    spec = spec_from_config(files.config or {})
    head = read_eagle(resolve_model(str(out)), spec, fingerprint(files), "float32")
    assert head.form.draft_vocab_size == 100 and head.form.taps == (1, 2, 3)
    report = json.loads((out / "config.json").read_text())["training"]
    assert report["steps"] == 60 and len(report["acceptance_by_position"]) == 4
    losses = [float(row.split(",")[1]) for row in (out / "losses.csv").read_text().split()[1:]]
    assert np.mean(losses[-10:]) < 0.95 * np.mean(losses[:10])
    with pytest.raises(ValueError, match="another features"):
        run_train_draft(TrainDraft(str(LLAMA), out, steps=60, **{**how, "features": 1}))
