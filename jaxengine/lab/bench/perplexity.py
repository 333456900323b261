"""`jaxengine bench perplexity`: what a type or quantisation costs in likelihood.

Reads texts (one per line, or JSON with "rows": [{"text", "ids"?, "loglikelihood"?}]), scores them
through the engine's prompt log-probabilities, and prints the perplexity for every setting.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from jaxengine import platform
from jaxengine.config import EngineConfig
from jaxengine.engine.core import EngineCore
from jaxengine.lab.bench import machine, results
from jaxengine.lab.bench.flags import add_output, new_parser
from jaxengine.sampling_params import SamplingParams
from jaxengine.text.tokenizer import load_tokenizer
from jaxengine.weights.resolve import resolve_model
from jaxengine.wire.messages import EngineRequest

SETTINGS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "fp8-kv": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "int8-fp8-kv": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "fp8"},
}


def main(argv: list[str]) -> int:
    """Run the bench; prints a line a setting."""
    args = parser().parse_args(argv)
    platform.setup()
    tokenizer = load_tokenizer(resolve_model(args.model))
    rows = read_rows(args.file)
    prompts = [row.get("ids") or tokenizer.encode(row["text"]) for row in rows]
    reference = None
    figures: list[dict[str, Any]] = []
    for name in args.settings:
        scores = log_likelihoods(args.model, prompts, SETTINGS[name])
        count = sum(len(ids) - 1 for ids in prompts)
        perplexity = math.exp(-sum(scores) / count)
        reference = reference or perplexity
        worst = max(
            (
                abs(score / row["loglikelihood"] - 1)
                for score, row in zip(scores, rows, strict=True)
                if row.get("loglikelihood")
            ),
            default=None,
        )
        compared = "" if worst is None else f", worst row {worst:.4%} off the file's"
        print(f"{name}: perplexity {perplexity:.3f} ({perplexity / reference - 1:+.2%}){compared}")
        figures.append({"setting": name, "perplexity": perplexity, "worst_row": worst})
        figures[-1]["ratio_to_first"] = perplexity / reference
    if args.output_json:
        content = results.result(
            "perplexity", args, machine.describe(), {"rows": figures}, ["setting"]
        )
        results.save(args.output_json, content)
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("perplexity", __doc__)
    add = made.add_argument
    add("file", type=Path, help="texts, one a line, or JSON with rows")
    add("--model", default="demo", help="model folder, .gguf file, hub id or demo")
    add("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), help="to compare")
    add_output(made)
    return made


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The texts of a file. Raises ValueError when there is none."""
    text = path.read_text(encoding="utf-8")
    rows = json.loads(text)["rows"] if path.suffix == ".json" else None
    if rows is None:
        rows = [{"text": line} for line in text.splitlines() if line.strip()]
    if not rows:
        raise ValueError(f"{path} holds no text")
    return list(rows)


def log_likelihoods(model: str, prompts: list[list[int]], settings: dict[str, Any]) -> list[float]:
    """Sum of log-probabilities of all tokens after the first, in nats, for each prompt."""
    longest = max(map(len, prompts)) + 1
    core = EngineCore(
        EngineConfig.of(
            model=model, max_num_seqs=8, max_model_len=longest, warmup="lazy", **settings
        )
    )
    totals = [0.0] * len(prompts)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    try:
        for i, prompt in enumerate(prompts):
            core.add_request(
                EngineRequest(
                    request_id=str(i), prompt_token_ids=prompt, params=params, arrival_time=0.0
                )
            )
        while core.has_work():
            for output in core.step():
                if output.error:
                    raise RuntimeError(output.error)
                for entry in output.prompt_logprobs or []:
                    totals[int(output.request_id)] += entry.logprobs[0] if entry else 0.0
    finally:
        core.shutdown()
    return totals
