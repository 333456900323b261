"""The files of configs/: each through the real command line and the engine's own checks."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import pytest
import yaml
from pages import ROOT, read
from served import post, serving
from testdata import CONFIGS, GOLDENS

from jaxengine.cli import main as cli
from jaxengine.config import PARTS, EngineConfig
from jaxengine.models.families import spec_from_config
from jaxengine.offload.config import parse_offload
from jaxengine.parallel.layout import StepLayout
from jaxengine.runner.divide import divide
from jaxengine.speculate.config import parse_speculative_config

FILES = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """What `serve` was about to serve, after all checks that come before a process starts."""
    seen: list[EngineConfig] = []

    def fake(config: EngineConfig, core: str) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr("jaxengine.server.run.serve", fake)
    return seen


def config_of(path: pathlib.Path, settled: list[EngineConfig]) -> EngineConfig:
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "--config", str(path)])
    assert left.value.code == 0
    return settled.pop()


def test_the_common_cases_are_there() -> None:
    names = {path.stem for path in FILES}
    assert {
        "laptop",
        "one-h200",
        "eight-h200-moe-dbo",
        "long-context-tiers",
        "chat-speculation",
    } <= names
    index = read("docs/README.md")
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert text.startswith("# "), f"{path.name} does not say what it is for"
        assert f"#   jaxengine serve --config configs/{path.name}\n" in text
        assert f"`configs/{path.name}`" in index


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_is_taken(path: pathlib.Path, settled: list[EngineConfig]) -> None:
    """Every key is a setting, and its value is what the engine would run with."""
    config = config_of(path, settled)
    flat = {
        field.name: getattr(getattr(config, part), field.name)
        for part, kind in PARTS.items()
        for field in dataclasses.fields(kind)
    }
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert len(written) >= 5
    for key, value in written.items():
        got = flat[key.replace("-", "_")]
        if isinstance(value, dict) and isinstance(got, str):
            got = json.loads(got)
        assert got == value, key
    cache = config.cache
    offload = parse_offload(cache.kv_transfer_config, cache.kv_offloading_size)
    assert (offload is not None) == ("kv-transfer-config" in written)
    if config.scheduler.speculative_config is not None:
        assert parse_speculative_config(config.scheduler.speculative_config).adaptive


def test_eight_devices_divide_a_published_model(settled: list[EngineConfig]) -> None:
    config = config_of(ROOT / "configs" / "eight-h200-moe-dbo.yaml", settled)
    name = config.model.model.rpartition("/")[2]
    published = json.loads((CONFIGS / name / "config.json").read_text())
    layout = divide(config.parallel, StepLayout(), spec_from_config(published))
    assert (layout.data_size, layout.tensor_size) == (8, 1)
    assert layout.dbo and layout.expert_parallel
    # Every group has a scheduler of these settings (`EngineCore`), none shares them out.
    in_all = layout.data_size * (config.scheduler.max_num_seqs or 0)
    text = (ROOT / "configs" / "eight-h200-moe-dbo.yaml").read_text(encoding="utf-8")
    assert f"of every group, as of a data-parallel rank: {in_all} in all" in text


# -- served, with a tiny model in the place of the real one ------------------------------------

SMALL: dict[str, Any] = {
    "max-model-len": 128,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 64,
    "block-size": 16,
    "long-prefill-token-threshold": 32,
    "kv-cache-memory-bytes": 4 << 20,
    "warmup": "background",
    "host": "127.0.0.1",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_is_served(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    family = "qwen3-moe" if "enable-expert-parallel" in settings else "qwen3"
    tiny_model(GOLDENS / family, tmp_path / "model")
    settings |= {key: value for key, value in SMALL.items() if key in settings}
    settings |= {"model": "model", "max-model-len": 128, "kv-cache-memory-bytes": 4 << 20}
    if "kv-transfer-config" in settings:
        settings["kv-transfer-config"]["kv_connector_extra_config"]["cpu_bytes_to_use"] = 8 << 20
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(settings))
    devices = settings.get("attention-data-parallel-size", 1)
    flags = f"--xla_force_host_platform_device_count={devices}"
    with serving(["--config", "small.yaml"], tmp_path, XLA_FLAGS=flags) as url:
        body = {
            "model": "model",
            "prompt": "a b a b a b a b a b",
            "max_tokens": 8,
            "temperature": 0,
        }
        first = post(url, "/v1/completions", body)
        assert first["usage"]["completion_tokens"] == 8
        assert post(url, "/v1/completions", body)["choices"] == first["choices"]


def tiny_model(source: pathlib.Path, folder: pathlib.Path) -> None:
    """Random weights of a family, and a tokenizer with a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder / name)
    pieces = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(pieces[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
