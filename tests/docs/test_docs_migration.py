"""Every flag, argument and field of docs/migration.md, tried on the real parser and classes."""

from __future__ import annotations

import inspect
import pathlib
import re
import shlex
from collections.abc import Callable

import pytest
from pages import read, section, tables

import jaxengine
from jaxengine.cli import main as cli
from jaxengine.config import PARTS, EngineConfig
from jaxengine.sampling_params import SamplingParams, StructuredOutputsParams
from jaxengine.settings.flags import _boolean_flags, flag, split_argv
from jaxengine.vllm_names import FLAGS, find, translate

PAGE = read("docs/migration.md")


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


(SAME,) = tables(section(PAGE, "Taken by the same name"))
EXAMPLES = [code(cell)[0] for cell, _ in SAME]
(FIELDS,) = tables(section(PAGE, "SamplingParams(...)"))
Run = Callable[..., EngineConfig]


def test_flags_of_the_same_name_parse(served_config: Run) -> None:
    """All at once, but for those that exclude others: a start of the parser for each would take
    half a minute."""
    assert len(EXAMPLES) > 60
    split = [shlex.split(example) for example in EXAMPLES]
    apart = ("--data-parallel-rank", "--data-parallel-external-lb", "--kv-transfer-config")
    config = served_config(*[word for one in split if one[0] in apart for word in one])
    assert config.data_parallel.data_parallel_external_lb and config.cache.kv_transfer_config
    config = served_config(*[word for one in split if one[0] not in apart for word in one])
    words = [word for one in split for word in one]
    assert config.cache.num_gpu_blocks_override == 4096 and config.server.shutdown_timeout == 30
    assert config.server.allowed_origins == ["*"] and config.parallel.enable_dbo
    foreign = [word for word in words if word.startswith("--") and find(word) is not None]
    assert foreign == []


def test_every_flag_of_ours_is_on_the_page() -> None:
    """Either with its example, or among those that vLLM does not have."""
    ours = {flag(name) for part in PARTS.values() for name in part.__dataclass_fields__}
    same = {w.replace("--no-", "--") for e in EXAMPLES for w in re.findall(r"--[a-z0-9-]+", e)}
    alone = set(code(PAGE.split("Flags of this engine alone", 1)[1].split("\n\n", 1)[0]))
    assert same & alone == set()
    assert same | alone == ours


def test_flags_by_another_name_mean_ours(served_config: Run) -> None:
    values = {
        "--quantization": "int8",
        "--speculative-config": '{"method": "ngram", "num_speculative_tokens": 2}',
        "--log-level": "debug",
    }
    values["--data-parallel-start-rank"] = "0"
    switches = ("--enable-expert-parallel", "--disable-access-log")
    theirs, ours = [], []
    for one in FLAGS:
        if one.status == "renamed":
            value = [] if one.ours in switches else [values.get(one.ours, "2")]
            theirs += [one.name, *value]
            ours += [one.ours, *value]
            assert f"| `{one.name}` | `{one.ours}` |" in PAGE
    assert translate(["serve", *theirs]) == ["serve", *ours]
    alone = theirs.index("-dpn")  # one rank: no local ones, and no first one
    assert served_config("-dpn", "1", "-dp", "2").data_parallel.data_parallel_rank == 1
    theirs[alone : alone + 2] = ["--data-parallel-hybrid-lb"]
    config = served_config(*theirs)
    assert config.parallel.tensor_parallel_size == 2 and config.server.log_level == "debug"


def test_flags_not_needed_change_nothing(
    served_config: Run, caplog: pytest.LogCaptureFixture
) -> None:
    unneeded = [one for one in FLAGS if one.status == "not needed"]
    assert len(unneeded) > 5
    words = [w for one in unneeded for w in ([one.name, "7"] if one.takes_value else [one.name])]
    assert served_config(*words) == EngineConfig()
    for one in unneeded:
        assert f"{one.name} is not needed: {one.reason}" in caplog.text
        assert f"| `{one.name}` | {one.reason} |" in PAGE


@pytest.mark.parametrize("command", ["serve", "run-batch"])
def test_refused_flags_say_why(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused = [one for one in FLAGS if one.status == "refused"]
    assert len(refused) > 60
    for one in refused:
        said = f"{one.name} is not for this engine: {one.reason}"
        for spelling in (one.name, one.name[:2] + one.name[2:].replace("-", "_") + "=1"):
            with pytest.raises(ValueError) as problem:
                translate([command, spelling])
            assert str(problem.value) == said
    with pytest.raises(SystemExit) as left:
        cli.main([command, "m", refused[0].name, "x"])
    assert left.value.code == 2
    assert f"{refused[0].name} is not for this engine" in capsys.readouterr().err


def test_no_flag_of_ours_is_called_foreign() -> None:
    """A flag that is added here must leave the list of vLLM's own."""
    ours = {flag(name) for part in PARTS.values() for name in part.__dataclass_fields__}
    assert ours & _boolean_flags()
    assert [one.name for one in FLAGS if one.name in ours] == []
    assert [one.ours for one in FLAGS if one.ours and one.ours not in ours] == []
    names = [one.name for one in FLAGS]
    assert len(set(names)) == len(names)


def test_reasons_name_flags_that_there_are() -> None:
    ours = {flag(name) for part in PARTS.values() for name in part.__dataclass_fields__}
    for one in FLAGS:
        named = set(re.findall(r"--[a-z-]+[a-z]", one.reason))
        assert named <= ours, f"{one.name}: {named - ours}"


def test_only_serving_commands_translate() -> None:
    assert translate(["serve", "m", "-tp=2"]) == ["serve", "m", "--tensor-parallel-size=2"]
    assert split_argv(["chat", "-q", "hello"])[0] == ["chat", "-q", "hello"]


def test_keys_of_a_file_are_treated_alike(served_config: Run, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("trust-remote-code: true\nuvicorn-log-level: debug\nseed: 3\n")
    config = served_config("--config", str(file))
    assert config.server.log_level == "debug" and config.model.seed == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("enable_lora: true", "enable_lora is not for this engine: LoRA adapters"),
        ("a: [", "cannot be read: while parsing"),
        ("just words", "must hold settings"),
    ],
)
def test_bad_files_end_with_a_sentence(
    text: str, said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "--config", str(file)])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


# -- Python ------------------------------------------------------------------------------------


def test_keywords_of_llm(caplog: pytest.LogCaptureFixture) -> None:
    assert EngineConfig.of(enforce_eager=True, trust_remote_code=True) == EngineConfig()
    assert "enforce_eager is not needed" in caplog.text
    with pytest.raises(TypeError, match="'enable_lora': LoRA adapters are not served"):
        jaxengine.LLM("no-such-model", enable_lora=True)
    with pytest.raises(TypeError, match="'uvicorn_log_level': here it is log-level"):
        EngineConfig.of(uvicorn_log_level="info")
    with pytest.raises(TypeError, match="unknown setting 'nonsense'$"):
        EngineConfig.of(nonsense=1)


def test_methods_of_llm() -> None:
    (table,) = tables(section(PAGE, "LLM(...)"))
    for call, here in table:
        for text in code(call):
            if not text.startswith("LLM."):
                continue
            name, _, arguments = text.removeprefix("LLM.").rstrip(")").partition("(")
            method = getattr(jaxengine.LLM, name, None)
            assert (method is None) == (here == "not there"), text
            if method is not None:
                known = set(inspect.signature(method).parameters)
                assert set(filter(None, arguments.split(", "))) <= known, text


@pytest.mark.parametrize(("cell", "here"), FIELDS, ids=lambda text: str(text).strip("`")[:20])
def test_fields_of_sampling_params(cell: str, here: str) -> None:
    (text,) = code(cell)
    name, _, value = text.partition("=")
    if here.startswith("unknown"):
        with pytest.raises(TypeError, match=name):
            SamplingParams(**{name: None})
    else:
        places = {"StructuredOutputsParams": StructuredOutputsParams}
        params = SamplingParams(**{name: eval(value, places)})  # noqa: S307 - of our own page
        assert getattr(params, name) != getattr(SamplingParams(), name)


def test_every_field_of_ours_is_there() -> None:
    named = {code(cell)[0].partition("=")[0] for cell, _ in FIELDS}
    ours = set(SamplingParams.__struct_fields__)
    assert ours - named <= {"spaces_between_special_tokens"}
