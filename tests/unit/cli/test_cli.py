"""The command line: flags from the config, YAML, mistakes, the doctor."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import jaxengine
from jaxengine.cli import main as cli
from jaxengine.cli.bench import run_bench
from jaxengine.cli.doctor import gpu_problem
from jaxengine.config import EngineConfig
from jaxengine.lab.bench.http import ServerError, get_json
from jaxengine.settings import flags as options

ROOT = pathlib.Path(__file__).resolve().parents[3]
Run = Callable[..., EngineConfig]


def test_defaults(served_config: Run) -> None:
    assert served_config() == EngineConfig()


def test_both_spellings_and_positional_model(served_config: Run) -> None:
    config = served_config("some/model", "--max-num-seqs", "7", "--max_num_batched_tokens", "99")
    assert config.model.model == "some/model"
    assert config.scheduler.max_num_seqs == 7
    assert config.scheduler.max_num_batched_tokens == 99
    assert served_config("--model", "other").model.model == "other"


@pytest.mark.parametrize(
    "argv,value",
    [
        (["--async-scheduling", "false"], False),
        (["--async-scheduling", "False", "--seed", "1"], False),
        (["--async_scheduling=false"], False),
        (["--no-async-scheduling"], False),
        (["--async-scheduling", "true"], True),
        (["--async-scheduling"], True),
        ([], True),
    ],
    ids=str,
)
def test_async_scheduling_forms(served_config: Run, argv: list[str], value: bool) -> None:
    assert served_config(*argv).scheduler.async_scheduling is value


def test_yaml_and_the_line_wins(served_config: Run, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("block-size: 32\nport: 9000\nasync-scheduling: false\nmodel: from-file\n")
    config = served_config("--config", str(file), "--port", "9001")
    assert config.cache.block_size == 32 and config.server.port == 9001
    assert config.scheduler.async_scheduling is False
    assert config.model.model == "from-file"


def test_units_and_auto(served_config: Run, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("max-model-len: 32k\nmax-num-batched-tokens: 8K\n")
    config = served_config("--config", str(file))
    assert config.model.max_model_len == 32_000
    assert config.scheduler.max_num_batched_tokens == 8192
    config = served_config("--config", str(file), "--max-model-len", "auto")
    assert config.model.max_model_len is None


def test_every_field_is_a_flag_with_help() -> None:
    # A process of its own: the width of the page is settled when it is first printed.
    code = "from jaxengine.cli.main import main; main(['serve', '--help'])"
    wide = {**os.environ, "COLUMNS": "200"}  # no flag is broken over two lines
    done = subprocess.run([sys.executable, "-c", code], env=wide, capture_output=True, text=True)
    shown = done.stdout
    for part in dataclasses.fields(EngineConfig):
        for field in dataclasses.fields(part.default_factory):  # type: ignore[arg-type]
            assert options.flag(field.name) in shown


@pytest.mark.parametrize(
    "argv,named",
    [
        (["--block-size", "0"], "--block-size must be at least 1"),
        (["--block-size", "x"], "--block-size"),
        (["--max-model-len", "32q"], "--max-model-len 32q is no whole number"),
        (["--max-model-len", "-5"], "--max-model-len must be at least 1"),
        (["--max-num-seqs", "-3"], "--max-num-seqs must be at least 1"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (["--watermark", "1"], "--watermark"),
        (["--port", "70000"], "--port"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["--dtype", "int4"], "--dtype"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--config", "missing.yaml"], "missing.yaml: no such file"),
        (["a", "--model", "b"], "two models are given: a and --model b"),
    ],
    ids=str,
)
def test_mistakes_exit_with_2(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", *argv])
    assert left.value.code not in (0, None)
    said = capsys.readouterr()
    assert named in said.err + said.out
    assert "Traceback" not in said.err + said.out
    assert left.value.code == 2


def test_version_and_no_jax_in_the_front() -> None:
    """`jaxengine --version` works without a device, and the server's modules never load JAX."""
    code = (
        "import sys; from jaxengine.cli import main; import jaxengine.server.run;"
        "assert 'jax' not in sys.modules; main.main(['--version'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == jaxengine.__version__


def test_bench_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_bench(["--help"]) == 0 and "throughput" in capsys.readouterr().out
    with pytest.raises(ValueError, match="there is no bench 'speed'"):
        run_bench(["speed"])
    seen: list[Any] = []

    class Module:
        @staticmethod
        def main(argv: list[str]) -> int:
            seen.append(argv)
            return 3

    monkeypatch.setitem(sys.modules, "jaxengine.lab.bench.latency", Module)  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "latency", "--batch-size", "4", "--help"])
    assert left.value.code == 3 and seen == [["--batch-size", "4", "--help"]]


def test_doctor_is_loud_about_an_idle_gpu() -> None:
    assert gpu_problem(True, "gpu") is None and gpu_problem(False, "cpu") is None
    said = gpu_problem(True, "cpu")
    assert said is not None and "NVIDIA" in said and "cuda13" in said


def test_client_errors_are_one_sentence() -> None:
    with pytest.raises(ServerError, match="no answer from"):
        get_json("http://127.0.0.1:9", "/v1/models", timeout=2)
    with pytest.raises(ServerError, match="not an http address"):
        get_json("ftp://x", "/")
