"""What the front reads of a model, whichever door it is read by."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

import pytest

from jaxengine.config import EngineConfig
from jaxengine.front.model_files import load_front
from jaxengine.vllm_names import note_vllm_environment


def test_where_sampling_defaults_come_from(tmp_path: Path) -> None:
    """The model's file, another folder's, or none."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7}))

    def defaults(setting: str, **more: object) -> dict[str, object]:
        config = EngineConfig.of(model="demo", generation_config=setting, **more)
        return dict(load_front(config, skip_tokenizer=True).sampling_defaults)

    assert defaults(str(tmp_path)) == {"temperature": 0.25, "top_k": 7}
    assert defaults("vllm") == defaults("engine") == {}
    own = {"temperature": 0.5}
    assert defaults(str(tmp_path), override_generation_config=own)["temperature"] == 0.5
    with pytest.raises(ValueError, match="generation_config must be auto, engine or a folder"):
        defaults(str(tmp_path / "none"))


def test_vllm_s_variables_are_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("VLLM_API_KEY", "VLLM_USE_V1", "VLLM_ATTENTION_BACKEND"):
        monkeypatch.setenv(name, "x")
    note_vllm_environment.cache_clear()  # said once a process, maybe before this test
    with caplog.at_level(logging.WARNING, "jaxengine.vllm_names"):
        note_vllm_environment()
        note_vllm_environment()
    [line] = caplog.messages  # once
    assert "VLLM_USE_V1" in line and "VLLM_ATTENTION_BACKEND" in line
    assert "VLLM_API_KEY" not in line  # it is obeyed
    caplog.clear()
    for name in ("VLLM_USE_V1", "VLLM_ATTENTION_BACKEND"):
        monkeypatch.delenv(name)
    note_vllm_environment.cache_clear()
    note_vllm_environment()
    assert caplog.messages == []


def test_others_work_while_a_text_is_encoded() -> None:
    """H2: of the library's calls some keep the GIL from beginning to end."""
    made = load_front(EngineConfig.of(model="demo")).tokenizer
    assert made is not None
    text, ids = "some words of a text " * 40_000, [3, 4, 5] * 200_000
    for work in (lambda: made.encode(text), lambda: made.decode(ids)):
        spent: list[float] = []

        def run(work: object = work, spent: list[float] = spent) -> None:
            began = time.perf_counter()
            work()  # type: ignore[operator]
            spent.append(time.perf_counter() - began)

        thread = threading.Thread(target=run)
        longest, last = 0.0, time.perf_counter()
        thread.start()
        while thread.is_alive():
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        thread.join()
        assert longest < spent[0] / 2
