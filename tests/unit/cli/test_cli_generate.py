"""`jaxengine generate`: what it asks of the engine for one prompt, and what it prints."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.cli import generate
from jaxengine.config import EngineConfig
from jaxengine.front.llm import LLM
from jaxengine.text.outputs import CompletionOutput, RequestOutput


class FakeLLM:
    """Streams three pieces; the second may be the last, with an error."""

    def __init__(self, error: str | None) -> None:
        self.error = error
        self.configs: list[EngineConfig] = []

    def __call__(self, config: EngineConfig) -> FakeLLM:
        self.configs.append(config)
        return self

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stream(self, prompt: str, params: Any) -> Any:
        for i, text in enumerate((" one", " two", " three")):
            last = self.error if i == 1 else None
            completion = CompletionOutput(index=0, text=text, token_ids=[i], error=last)
            yield RequestOutput(
                request_id="0",
                prompt=prompt,
                prompt_token_ids=[1],
                prompt_logprobs=None,
                outputs=[completion],
                finished=False,
            )


def run(monkeypatch: pytest.MonkeyPatch, prompt: str, error: str | None = None, **settings: Any):
    fake = FakeLLM(error)
    monkeypatch.setattr(LLM, "from_config", fake)
    monkeypatch.setattr(generate, "preflight", lambda config: None)
    for name in ("pause", "settle"):  # this process has other tests to run
        monkeypatch.setattr(generate.garbage, name, lambda **_: None)
    monkeypatch.setattr("jaxengine.cli.serve.setup_logging", lambda level: None)
    temperature = settings.pop("temperature", 0.0)
    generate.run_generate(EngineConfig.of(model="demo", **settings), prompt, 8, temperature)
    return fake.configs[0]


def test_a_short_prompt_goes_token_by_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run(monkeypatch, "The sky is")
    assert capsys.readouterr().out == " one two three\n"
    assert (config.runner.warmup, config.scheduler.max_num_batched_tokens) == ("greedy", 1)
    assert run(monkeypatch, "The sky is", temperature=0.5).runner.warmup == "first"


@pytest.mark.parametrize(
    ("prompt", "settings"),
    [
        ("long " * 40, {}),
        ("hi", {"max_num_seqs": 4}),
        ("hi", {"max_num_batched_tokens": 64}),
        ("hi", {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}),
    ],
)
def test_other_prompts_go_as_on_a_server(
    monkeypatch: pytest.MonkeyPatch, prompt: str, settings: dict[str, Any]
) -> None:
    config = run(monkeypatch, prompt, **settings)
    assert config.runner.warmup == "greedy"
    asked = settings.get("max_num_seqs"), settings.get("max_num_batched_tokens")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == asked


def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run(monkeypatch, "hi", warmup="full")
    assert config.runner.warmup == "full" and config.scheduler.max_num_seqs is None


def test_an_error_of_the_engine_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the logits are not finite"):
        run(monkeypatch, "hi", error="the logits are not finite")
    with pytest.raises(ValueError, match="the prompt is empty"):
        run(monkeypatch, "")
