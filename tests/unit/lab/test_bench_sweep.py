"""Sweeps: every combination once, failures recorded and tried again, results kept."""

from __future__ import annotations

import json
import pathlib

import pytest

from jaxengine.lab.bench import sweep
from jaxengine.lab.bench.flatten import flatten


def plan_file(folder: pathlib.Path, **plan: object) -> str:
    path = folder / "plan.yaml"
    path.write_text(json.dumps(plan))
    return str(path)


def test_words() -> None:
    flags = {"num_prompts": 3, "stub": True, "save-result": False, "x": [1, 2], "e": {"a": 1}}
    line = sweep.words({**flags, "none": None})
    assert line == ["--num-prompts", "3", "--stub", "--x", "1", "2", "--e", '{"a": 1}']


def test_combinations() -> None:
    assert sweep.combinations({"a": [1, 2], "b": ["x"]}) == [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]
    assert sweep.combinations({}) == [{}]


def test_flatten() -> None:
    content = {
        "bench": "x", "machine": {"cores": 2}, "row_keys": ["n"], "ok": True, "a": {"b": 1},
        "rows": [{"n": 1, "t": 2.5, "what": "text"}, {"n": 2, "t": 3}],
    }  # fmt: skip
    assert flatten(content) == {"a/b": 1, "n=1/t": 2.5, "n=2/t": 3}


def test_sweep_resumes_and_records_failures(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"num-running": [2], "output-len": 2}
    plan = plan_file(tmp_path, bench="sched", flags=flags, lists={"input-len": [8, "none"]})
    out = tmp_path / "out"
    argv = [plan, "--output-dir", str(out), "--columns", "us_per_step"]
    assert sweep.main(argv) == 1
    (good,) = [p for p in out.glob("*.json") if "failed" not in p.name]
    (bad,) = out.glob("*.failed.json")
    first = json.loads(good.read_text())
    assert first["cell"] == {"input-len": 8} and first["rows"][0]["num_running"] == 2
    assert "invalid" in json.loads(bad.read_text())["error"]
    table = capsys.readouterr().out.splitlines()[-2:]
    assert table[0].split()[0] == "8" and table[1].split() == ["none", "failed"]
    good.write_text(json.dumps(first | {"kept": 1}))
    plan_file(tmp_path, bench="sched", flags=flags, lists={"input-len": [8]})
    assert sweep.main(argv) == 0
    assert json.loads(good.read_text())["kept"] == 1


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"bench": "speed"}, "bench must name"),
        ({"bench": "sweep"}, "bench must name"),
        ({"bench": "sched", "list": {}}, "unknown key list"),
        ({"bench": "sched", "lists": {"a": 1}}, "a list of values"),
        ({"bench": "sched", "flags": [1]}, "flags must be a mapping"),
        ({"bench": "sched", "server": {"model": "demo"}}, "server is for bench serve"),
    ],
)
def test_wrong_plans(tmp_path: pathlib.Path, plan: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sweep.read_plan(plan_file(tmp_path, **plan))


def test_no_plan(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="there is no plan"):
        sweep.read_plan(tmp_path / "x.yaml")
    (tmp_path / "x.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="is not YAML"):
        sweep.read_plan(tmp_path / "x.yaml")


@pytest.mark.slow
def test_a_server_for_each_of_its_parameters(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_file(
        tmp_path,
        bench="serve",
        flags={"num-prompts": 2, "random-input-len": 300, "random-output-len": 2},
        lists={"max-concurrency": [1, 2]},
        server={"stub": True},
        **{"server-lists": {"max-model-len": [256, 512, 0]}},
    )
    out = tmp_path / "out"
    assert sweep.main([plan, "--output-dir", str(out)]) == 1
    errors = [json.loads(p.read_text())["error"] for p in out.glob("*.failed.json")]
    assert len(errors) == 4  # two do not fit, two have no server
    assert sum("did not start" in e for e in errors) == 2
    good = [json.loads(p.read_text()) for p in out.glob("*.json") if "failed" not in p.name]
    assert [content["cell"]["max-model-len"] for content in good] == [512, 512]
    assert all(content["completed"] == 2 for content in good)
    lines = capsys.readouterr().out.splitlines()[-6:]
    assert sum(line.split()[-1] == "failed" for line in lines) == 4
