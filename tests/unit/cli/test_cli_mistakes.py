"""Mistakes of users, through the command line: one sentence that names what is wrong, exit code 2,
no traceback, and before any process is started."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections import namedtuple

import pytest

from jaxengine.cli import main as cli

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}

# Every row: the words of the command, and what the sentence must say.
MISTAKES = [
    ("serve ./nope/model", "'./nope/model' does not exist and is no hub id; give a folder"),
    ("serve empty", "folder empty has no config.json and no .gguf file"),
    ("serve note.txt", "'note.txt' is a file but not a .gguf file"),
    ("serve missing.gguf", "'missing.gguf' does not exist"),
    ("serve bert", "architecture BertModel is not supported (known: LlamaForCausalLM"),
    ("serve fp8", "quantized checkpoint (fp8) is not supported"),
    ("serve bad-json", "bad-json/config.json cannot be read as JSON"),
    ("serve no-weights", "no-weights has a config.json but no .safetensors file"),
    ("serve llama --max-model-len 4096", "--max-model-len 4096 is more than the 128 positions"),
    ("serve --dtype int4", 'Invalid value "int4" for --dtype. Choose from'),
    ("serve --max-num-seq 3", "Did you mean --max-num-seqs?"),
    ("serve --config typo.yaml", "Did you mean"),
    ("serve --config broken.yaml", "--config broken.yaml cannot be read"),
    ("serve --config list.yaml", "--config list.yaml must hold settings"),
    ("serve --config none.yaml", "none.yaml: no such file"),
    ("serve --speculative-config {bad", "speculative_config is not JSON"),
    ('serve --speculative-config {"method":"magic"}', "method must be one of ngram"),
    ('serve --speculative-config {"method":"ngram","tokens":3}', "no field 'tokens'"),
    ('serve --kv-transfer-config {"kv_connector":"Nope"}', "Nope"),
    ("serve --kv-events-config {bad", "kv_events_config"),
    ("serve --fault-tolerance-config [1]", "fault_tolerance_config"),
    ("serve --chat-template missing.jinja", "--chat-template missing.jinja: no such file"),
    ("serve --compilation-cache-dir note.txt/x", "compilation cache note.txt/x cannot be made"),
    ("serve --ssl-keyfile k.pem --ssl-certfile c.pem", "--ssl-keyfile k.pem: no such file"),
    ("serve --api-key=", "--api-key must not be empty"),
    ("serve --data-parallel-size 0", "--data-parallel-size must be at least 1"),
    ("serv", 'Did you mean "serve"?'),
    ("bench thruput", "there is no bench 'thruput'; there are throughput"),
    ("generate hi --temperature -3", "temperature must be between 0 and 2, got -3"),
    ("generate hi --max-tokens -1", "max_tokens must be"),
    ("generate hi ./nope/model", "'./nope/model' does not exist"),
    ("run-batch -i none.jsonl -o out.jsonl", "cannot open none.jsonl"),
    ("run-batch -i note.txt -o none/out.jsonl", "cannot open none/out.jsonl"),
    ("kv ls ./nope", "there is no folder nope"),
    ("chat --url http://127.0.0.1:9 -q hi", "no answer from http://127.0.0.1:9"),
    ("completion tcsh", "tcsh"),
]


@pytest.fixture(autouse=True)
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with one of each mistake; nothing may be started from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "300")

    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", start)
    configs = {
        "bert": {"model_type": "bert", "architectures": ["BertModel"]},
        "fp8": {**LLAMA, "quantization_config": {"quant_method": "fp8"}},
        "no-weights": LLAMA,
        "llama": LLAMA,
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"")
    (tmp_path / "bad-json").mkdir()
    (tmp_path / "bad-json" / "config.json").write_text("{not json")
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("x")
    (tmp_path / "typo.yaml").write_text("max-num-seq: 3\n")
    (tmp_path / "broken.yaml").write_text("port: [1\n")
    (tmp_path / "list.yaml").write_text("- port\n")


def said(capsys: pytest.CaptureFixture[str], words: list[str]) -> tuple[object, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    out = capsys.readouterr()
    # The frame of the parser's messages, and its line breaks.
    return left.value.code, " ".join((out.out + out.err).replace("│", " ").split())


@pytest.mark.parametrize("command,sentence", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_sentence(
    command: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(capsys, command.split(" "))
    assert code == 2, text
    assert sentence in text
    assert "Traceback" not in text and "Errno" not in text.replace("[Errno 111]", "")


def test_a_full_disk_is_said_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 2**40, 2**20))
    code, text = said(capsys, ["serve", "llama"])
    assert code == 2 and "has 1 MiB left on its disk" in text and "--compilation-cache-dir" in text


def test_a_taken_port_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = said(capsys, ["serve", "--stub", "--port", str(port)])
    assert code == 1
    assert text.endswith(f"jaxengine: cannot listen on 127.0.0.1:{port}: Address already in use")
