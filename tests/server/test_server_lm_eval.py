"""lm-eval's `local-completions` against the real server: a local task, and its likelihoods against
those that the server itself gives for the same tokens."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
from serverlib import call, running

from jaxengine.wire.frames import DEFAULT_CORE

TASKS = pathlib.Path(__file__).resolve().parents[1] / "eval"


def test_tokenizer_info_is_opened_by_a_flag() -> None:
    with running("--enable-tokenizer-info-endpoint") as up:
        status, info, _ = call(up.url, "/tokenizer_info")
        assert status == 200 and isinstance(info["eos_token"], str), info
        assert "add_generation_prompt" in info["chat_template"]
    with running() as up:
        assert call(up.url, "/tokenizer_info")[0] == 404


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lm_eval_through_the_server(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("lm_eval", reason="pip install 'jaxengine[eval]'")
    flags = ("--max-model-len", "512", "--enable-tokenizer-info-endpoint")
    with running(*flags, core=DEFAULT_CORE) as up:
        args = f"model=demo,base_url={up.url}/v1/completions,tokenizer_backend=remote"
        command = [
            sys.executable, "-m", "lm_eval", "--model", "local-completions",
            "--model_args", f"{args},num_concurrent=4,max_length=512",
            "--tasks", "jaxengine_capitals", "--include_path", str(TASKS),
            "--output_path", str(tmp_path), "--log_samples",
        ]  # fmt: skip
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            command, cwd=TASKS, env={**os.environ, **offline}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (summary,) = tmp_path.rglob("results_*.json")
        results = json.loads(summary.read_text())["results"]["jaxengine_capitals"]
        (log,) = tmp_path.rglob("samples_*.jsonl")
        samples = [json.loads(line) for line in log.read_text().splitlines()]
        assert len(samples) == 8
        assert results["acc,none"] >= 0.75, results  # guessing is 0.33
        checked = 0
        for sample in samples[:2]:
            for request, answer in zip(
                sample["arguments"].values(), sample["filtered_resps"], strict=True
            ):
                context, end = request["arg_0"], request["arg_1"]
                wanted = likelihood(up.url, context, end)
                assert float(answer[0]) == pytest.approx(wanted, abs=0.02)
                checked += 1
        assert checked == 6


def likelihood(url: str, context: str, end: str) -> float:
    """Sum of the log-probabilities of the tokens of `end`, from one prompt with its
    prompt_logprobs, a route of its own through the engine."""
    _, whole, _ = call(url, "/tokenize", {"prompt": context + end, "add_special_tokens": False})
    _, first, _ = call(url, "/tokenize", {"prompt": context, "add_special_tokens": False})
    body = {"prompt": whole["tokens"], "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
    status, answer, _ = call(url, "/v1/completions", body)
    assert status == 200, answer
    scores = answer["choices"][0]["prompt_logprobs"][first["count"] :]
    pairs = zip(whole["tokens"][first["count"] :], scores, strict=True)
    return sum(entry[str(token)]["logprob"] for token, entry in pairs)
