"""What helps who runs it: completion scripts, the bug report, the pages of `--help`."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from jaxengine.cli import main as cli
from jaxengine.cli import report
from jaxengine.config import EngineConfig
from jaxengine.engine import crash_note
from jaxengine.lab.bench.benches import BENCHES
from jaxengine.settings.flags import flag


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_commands_and_flags(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["completion", shell])
    assert left.value.code == 0
    script = capsys.readouterr().out
    for word in ("serve", "run-batch", "doctor", "max-num-seqs", "kv-transfer-config", "report"):
        assert word in script, word
    file = tmp_path / "script"
    file.write_text(script)
    if shell == "bash":
        assert subprocess.run(["bash", "-n", str(file)]).returncode == 0
    elif shutil.which(shell):
        assert subprocess.run([shell, "-n", str(file)]).returncode == 0


def test_the_bash_script_completes(capsys: pytest.CaptureFixture[str]) -> None:
    """bash itself, asked what may follow `jaxengine do` and `jaxengine serve --max-num-s`."""
    with pytest.raises(SystemExit):
        cli.main(["completion", "bash"])
    script = capsys.readouterr().out
    function = re.search(r"complete\b.*-F (\S+)", script)
    assert function is not None
    for words, wanted in (
        (["jaxengine", "do"], "doctor"),
        (["jaxengine", "serve", "--max-num-s"], "--max-num-seqs"),
    ):
        ask = (
            f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
            f'{function[1]}; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        done = subprocess.run(
            ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=20
        )
        assert wanted in done.stdout.split(), done.stderr


def test_report_masks_secrets() -> None:
    lines = report.environment_lines(
        {
            "HF_TOKEN": "hf_abc",
            "JAX_PLATFORMS": "cpu",
            "HTTPS_PROXY": "http://me:pw@proxy:3128",
            "JAXENGINE_API_KEY": "sk-1",
            "HOME": "/home/me",
            "XLA_FLAGS": "--xla_a=1",
        }
    )
    assert lines == [
        "HF_TOKEN=****",
        "HTTPS_PROXY=http://****@proxy:3128",
        "JAXENGINE_API_KEY=****",
        "JAX_PLATFORMS=cpu",
        "XLA_FLAGS=--xla_a=1",
    ]


def test_report_is_one_block_with_the_last_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret_word")
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--report"])
    first = capsys.readouterr().out
    assert "none recorded" in first and "not made yet" in first
    try:
        raise RuntimeError("what a user wrote")
    except RuntimeError as error:
        crash_note.note_crash(error, "engine 3")
    (tmp_path / "jaxengine" / "xla").mkdir()
    (tmp_path / "jaxengine" / "xla" / "jit_f-1-cache").write_bytes(b"x" * 2**20)
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--report"])
    text = capsys.readouterr().out
    assert text.startswith("### jaxengine report") and text.count("```") % 2 == 0
    for piece in ("jaxlib", "devices:", "HF_TOKEN=****", "GiB free", "1 programs, 1 MiB"):
        assert piece in text, piece
    assert "engine 3: RuntimeError" in text and "in test_report_is_one_block" in text
    assert "hf_secret_word" not in text and "what a user wrote" not in text


def test_help_shows_groups_and_defaults() -> None:
    code = "from jaxengine.cli.main import main; main(['serve', '--help'])"
    wide = {**os.environ, "COLUMNS": "300"}  # no flag's sentence is broken over two lines
    done = subprocess.run([sys.executable, "-c", code], env=wide, capture_output=True, text=True)
    shown = done.stdout
    titles = re.findall(r"^╭─ (.*?) ─", shown, re.MULTILINE)
    assert titles[:2] == ["Arguments", "Parameters"]
    assert titles[2:] == [
        "Model",
        "Server",
        "KV cache and offload",
        "Scheduler and speculation",
        "Devices in one engine",
        "Data parallel engines",
        "Fault tolerance",
        "Runner and start",
    ]
    entries = re.split(r"\n│ (?=--)", re.sub(r"\s*│\n│\s{5,}", " ", shown))
    for part in dataclasses.fields(EngineConfig):
        for field in dataclasses.fields(part.default_factory):  # type: ignore[arg-type]
            name = flag(field.name)
            (entry,) = [e for e in entries if re.match(rf"{name}[ ,│]", e)]
            assert re.search(r"[a-z]\w+ .*\[default: ", entry, re.DOTALL), entry


def test_every_bench_is_named_in_the_command_list(capsys: pytest.CaptureFixture[str]) -> None:
    for name in BENCHES:
        assert name in cli.app["bench"].help
