"""`jaxengine simulate` on the command line: figures, files, mistakes."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from jaxengine.cli import main as cli
from jaxengine.lab.bench.client import Trace
from jaxengine.lab.bench.summary import summarize

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000,
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip
SMALL = ["--num-prompts", "12", "--random-input-len", "40", "--random-output-len", "6"]


@pytest.fixture
def config(tmp_path: pathlib.Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def run(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        cli.main(["simulate", *words])
    return left.value.code


def figures(tmp_path: pathlib.Path, *words: str) -> dict[str, Any]:
    path = tmp_path / "out.json"
    assert run(*words, "--output-json", str(path)) == 0
    return json.loads(path.read_text())


def test_figures_have_the_names_of_bench_serve(config: str, tmp_path: pathlib.Path) -> None:
    found = figures(tmp_path, config, "--device", "h100", *SMALL, "--slo", "ttft:1000", "tpot:9")
    seen = Trace(1, started=0.0, first=0.1, last=0.3, gaps=[0.1, 0.1], num_tokens=3)
    assert set(summarize([seen], 1.0, limits={"ttft": 1})) <= set(found)
    assert found["completed"] == 12 and found["total_output_tokens"] == 72
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["engine"]["ranks"] == 1 and found["settings"]["hardware"]["device"] == "h100"


def test_traces_and_tiers(config: str, tmp_path: pathlib.Path) -> None:
    """Two prompts with the same 64 tokens at their beginning, and a session."""
    rows = [
        {"timestamp": 0, "input_length": 80, "output_length": 2, "hash_ids": [0, 1, 2, 3, 9]},
        {"timestamp": 500, "input_length": 72, "output_length": 2, "hash_ids": [0, 1, 2, 3]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    words = [config, "--device", "h100", "--dataset-path", str(trace), "--block-size", "16"]
    found = figures(tmp_path, *words, "--cpu-offload-gib", "0.01", "--policy", "arc")
    assert found["engine"]["prefix_hit_rate"] == pytest.approx(64 / 152)
    assert found["engine"]["kv_stored_gib"] > 0
    quick = figures(tmp_path, *words, "--speed", "10")
    assert quick["duration"] < found["duration"]


def test_the_search_writes_its_tries(
    config: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [config, "--device", "l40s", *SMALL, "--request-rate", "50", "--find-limit"]
    words += ["--host-us", "10", "--host-row-us", "0", "--max-num-seqs", "2"]
    found = figures(tmp_path, *words, "--slo", "ttft:3")
    assert found["limit"]["name"] == "slots"
    assert found["highest_rate"] in [one["offered_per_s"] for one in found["tries"]]
    assert "what breaks first: slots" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words,message",
    [
        ([], "--table FILE"),
        (["--device", "h100"], "needs MODEL"),
        (["MODEL", "--device", "tpu"], "device must be one of"),
        (["MODEL", "--device", "h100", "--table", "x"], "--table FILE"),
        (["--table", "none.json"], "none.json cannot be read"),
        (["MODEL", "--device", "h100", "--ranks", "5000"], "--ranks"),
        (["MODEL", "--device", "h100", "--num-prompts", "0"], "--num-prompts"),
        (["MODEL", "--device", "h100", "--speed", "0"], "speed"),
        (["MODEL", "--device", "h100", "--dataset-name", "trace"], "--dataset-path"),
        (["MODEL", "--device", "h100", "--slo", "ttft"], "ttft:200"),
        (["MODEL", "--device", "h100", "--find-limit"], "request rate"),
        (["MODEL", "--device", "h100", "--tensor-parallel-size", "3"], "3 devices"),
        (["MODEL", "--device", "h100", "--cpu-offload-gib", "-1"], "--cpu-offload-gib"),
        (["--check", "demo", "--rounds", "0"], "--rounds"),
    ],
    ids=str,
)
def test_mistakes(
    config: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run(*[config if word == "MODEL" else word for word in words]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.strip().splitlines()) == 1


def test_a_roofline_needs_no_jax(config: str) -> None:
    code = (
        "import sys\nfrom jaxengine.cli.main import main\n"
        f"try:\n    main(['simulate', {config!r}, '--device', 'h100', '--num-prompts', '2'])\n"
        "except SystemExit as left:\n    sys.exit(left.code or ('jax' in sys.modules))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
