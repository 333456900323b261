"""`jaxengine bench spec`: tokens/s and acceptance of every method and K on a set of prompts.

One engine; speculation is swapped between runs. The built-in prompts ask for a given text again,
so that the output copies; --prompts takes a file with one prompt a line, --random random tokens.
An engine has one drafter with a model (eagle, draft_model, mtp): --draft-model names its folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine import platform
from jaxengine.engine.core import EngineCore
from jaxengine.lab.bench import machine, results
from jaxengine.lab.bench.batch import run_batch
from jaxengine.lab.bench.flags import (
    add_output,
    engine_config,
    new_parser,
    not_negative,
    parse_with_engine,
    positive,
)
from jaxengine.sched.executor import Verifier
from jaxengine.speculate.config import WITH_FOLDER, WITH_MODEL

ROW_KEYS = ("requests", "method", "k")
_PASSAGE = (
    "The harbour office opens at seven. Ships that arrive before that hour wait outside the "
    "breakwater, where the pilot boat can reach them. Every captain hands in three papers: the "
    "cargo list, the crew list and the health report. The office keeps one copy of each for ten "
    "years. A ship that leaves without its stamped papers pays a fine at the next harbour. "
)
_TASKS = (
    "Write the following text again, without any change:\n\n",
    "Copy this text word for word:\n\n",
    "Repeat the text below, and replace seven by eight:\n\n",
    "Print the next text twice:\n\n",
)


def main(argv: list[str]) -> int:
    """Run the bench; prints a table and, with --output-json, writes the figures."""
    args, given = parse_with_engine(parser(), argv)
    platform.setup()
    with_model = [method for method in args.methods if method in WITH_MODEL]
    if len(with_model) > 1:
        raise ValueError(f"--methods {', '.join(with_model)}: an engine has one of them at most")
    settings: dict[str, Any] = {
        "method": (with_model or args.methods)[0],
        "num_speculative_tokens": max(args.drafts),
        "adaptive": True,  # so that the programs of every K are compiled
        "prompt_lookup_min": args.lookup_min,
        "prompt_lookup_max": args.lookup_max,
    }
    if settings["method"] in WITH_FOLDER:
        settings["model"] = args.draft_model
    core = EngineCore(
        engine_config(
            given,
            model=args.model,
            max_num_seqs=max(args.num_requests),
            max_model_len=args.max_model_len,
            speculative_config=settings,
            warmup="full",
        )
    )
    rows = []
    try:
        for count in args.num_requests:
            prompts = _prompts(args, core, count)
            variants: list[tuple[str, int]] = [("none", 0)]
            variants += [(method, k) for method in args.methods for k in args.drafts if k]
            if args.adaptive:
                variants += [(f"{method} adaptive", max(args.drafts)) for method in args.methods]
            base: list[list[int]] = []
            for name, k in variants:
                _use(core, name, k, settings)
                runs = [run(core, prompts, args.output_len) for _ in range(args.repeat)]
                figures, ids = max(runs, key=lambda one: one[0]["tokens_per_s"])
                base = base or ids
                same = ids == base
                rows.append({"requests": count, "method": name, "k": k, "same_ids": same} | figures)
                _print(rows)
    finally:
        core.shutdown()
    if args.output_json:
        content = results.result(
            "spec", vars(args) | given, machine.describe(), {"rows": rows}, ROW_KEYS
        )
        results.save(args.output_json, content)
    return 0


def parser() -> argparse.ArgumentParser:
    made = new_parser("spec", __doc__, engine=True)
    add = made.add_argument
    add("--model", default="demo", help="model folder, .gguf file, hub id or demo")
    add("--methods", nargs="+", default=["ngram", "suffix"], help="ways to draft")
    add("--draft-model", default=None, help="folder of the drafter with a model")
    add("--drafts", type=not_negative, nargs="+", default=[3, 5], help="values of K")
    add("--adaptive", action="store_true", help="measure an adaptive K too")
    add("--num-requests", type=positive, nargs="+", default=[1], help="batch sizes")
    add("--output-len", type=positive, default=96, help="tokens of an output")
    add("--lookup-min", type=positive, default=2, help="shortest n-gram")
    add("--lookup-max", type=positive, default=4, help="longest n-gram")
    add("--prompts", default=None, help="file with one prompt a line")
    add("--random", action="store_true", help="prompts of random tokens")
    add("--max-model-len", type=positive, default=1024, help="most tokens of a sequence")
    add("--repeat", type=positive, default=2, help="runs of each; the best counts")
    add_output(made)
    return made


def _prompts(args: argparse.Namespace, core: EngineCore, count: int) -> list[list[int]]:
    if args.random:
        rng = np.random.default_rng(0)
        vocab = core.facts.spec.vocab_size
        return [rng.integers(3, vocab, 128).tolist() for _ in range(count)]
    from jaxengine.text.tokenizer import load_tokenizer
    from jaxengine.weights.resolve import resolve_model

    files = resolve_model(args.model)
    tokenizer = load_tokenizer(files, None)
    if args.prompts:
        lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
        texts = [line for line in lines if line.strip()]
        if not texts:
            raise ValueError(f"{args.prompts} has no prompt in it")
    else:
        begun = _PASSAGE[: _PASSAGE.index(" opens")]
        texts = [f"{task}{_PASSAGE}\n\nHere it is:\n\n{begun}" for task in _TASKS]
    return [tokenizer.encode(texts[i % len(texts)]) for i in range(count)]


def _use(core: EngineCore, name: str, k: int, settings: dict[str, Any]) -> None:
    """Speculate so from now on. The engine is idle; its programs are compiled."""
    method, _, adaptive = name.partition(" ")
    if method == "none":
        core.use_speculation(None)
        # A drafter with a model would go on following the tokens, for steps with drafts to come.
        assert isinstance(core.executor, Verifier)
        core.executor.open_speculation([], (settings["prompt_lookup_min"],) * 2, "lazy")
        return
    chosen = {"method": method, "num_speculative_tokens": k, "adaptive": bool(adaptive)}
    if method not in WITH_FOLDER:
        settings = {name: value for name, value in settings.items() if name != "model"}
    core.use_speculation(settings | chosen)


def run(
    core: EngineCore, prompts: list[list[int]], output_len: int
) -> tuple[dict[str, float], list[list[int]]]:
    """One batch, greedy, from an empty engine: figures and ids. The time is that of decoding,
    from the first token of the last request on; `cpu_ms_per_token` (all threads of the process)
    stays comparable on a machine that others use too."""
    before = dict(core.stats().extra)
    done = run_batch(core, prompts, output_len)
    after = core.stats().extra

    def grew(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    drafted, accepted = grew("spec_num_draft_tokens"), grew("spec_num_accepted_tokens")
    steps = max(1, done.decode_steps)
    return {
        "tokens_per_s": done.decode_tokens / done.decode_seconds,
        "ms_per_step": 1e3 * done.decode_seconds / steps,
        "cpu_ms_per_token": 1e3 * done.decode_cpu / max(1, done.decode_tokens),
        "acceptance": accepted / drafted if drafted else 0.0,
        "mean_length": 1 + accepted / grew("spec_num_drafts") if drafted else 1.0,
        "draft_ms": 1e3 * grew("spec_draft_seconds") / steps,
    }, done.ids


def _print(rows: list[dict[str, Any]]) -> None:
    if len(rows) == 1:
        print(
            f"{'requests':>8}  {'method':<16}{'K':>3}{'tokens/s':>10}{'speed':>7}{'ms/step':>9}"
            f"{'cpu ms':>8}"
            f"{'accepted':>10}{'length':>8}{'draft ms':>10}  ids"
        )
    row = rows[-1]
    base = next(r for r in rows if r["requests"] == row["requests"])["tokens_per_s"]
    print(
        f"{row['requests']:>8}  {row['method']:<16}{row['k']:>3}{row['tokens_per_s']:>10.1f}"
        f"{row['tokens_per_s'] / base:>7.2f}{row['ms_per_step']:>9.2f}"
        f"{row['cpu_ms_per_token']:>8.1f}"
        f"{row['acceptance']:>10.1%}{row['mean_length']:>8.2f}{row['draft_ms']:>10.3f}"
        f"  {'equal' if row['same_ids'] else 'DIFFER'}",
        flush=True,
    )
