"""Reference outputs on 2, 4 and 8 host devices: tensor, expert, pipeline and attention-data
parallelism and mixtures, with and without dual-batch overlap, through every exchange that a CPU
can run."""

import json
import pathlib
import subprocess
import sys

import pytest
from testdata import child_environment

HERE = pathlib.Path(__file__).parent
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
DBO = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}


def case(family: str, tensor: int = 1, data: int = 1, **more: object) -> dict:
    sizes = {"tensor_parallel_size": tensor, "attention_data_parallel_size": data}
    return {"family": family, **sizes, **more}


def experts(family: str, tensor: int, data: int, **more: object) -> dict:
    return case(family, tensor, data, enable_expert_parallel=True, **more)


QUICK = [  # each kind of mesh once
    experts("mixtral", 2, 2, all2all_backend="all_to_all", **DBO),
    experts("deepseek-v3", 2, 1, all2all_backend="allgather"),
    case("llama", tensor=2, pipeline_parallel_size=2),
]
DENSE = (
    "llama llama-gqa-tied-bias llama3-rope llama-yarn llama-linear-rope mistral-window qwen2 qwen3 "
    "gemma2 gemma3 phi3 smollm3 granite olmo2"
).split()
MOE = "mixtral qwen3-moe olmoe deepseek-v2 deepseek-v3 gpt-oss".split()
ALL = [
    case(family, tensor, data)
    for family in DENSE
    for tensor, data in ((2, 1), (1, 2), (4, 1), (2, 4))
    if not (family == "llama-gqa-tied-bias" and tensor > 1)  # 6 heads over 3 kv heads
]
ALL += [case(family, pipeline_parallel_size=2, tensor=2) for family in ("llama", "gemma3", "phi3")]
ALL += [experts(family, 2, 1, pipeline_parallel_size=2) for family in ("mixtral", "deepseek-v3")]
ALL += [
    experts(family, tensor, data, all2all_backend=backend, **overlap)
    for family in MOE
    for tensor, data in ((2, 1), (1, 2), (4, 2))
    for backend in ("allgather", "all_to_all")
    for overlap in ({}, DBO)
]
ALL += [case("smollm3", pipeline_parallel_size=4)]
ALL += [case(family, tensor, data) for family in MOE for tensor, data in ((2, 1), (2, 2))]


def check(cases: list[dict], timeout: float) -> None:
    # Compiling is what takes time here.
    env = child_environment(XLA_FLAGS=FLAGS)
    done = subprocess.run(
        [sys.executable, str(HERE / "mesh_cases.py")],
        input=json.dumps(cases), capture_output=True, text=True, timeout=timeout, cwd=HERE, env=env,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failed = [f"{line['case']}: {line['error']}" for line in lines if line["error"]]
    assert not failed, "\n".join(failed)
    assert len(lines) == len(cases), done.stderr[-2000:]
    for line in lines:
        if line["case"].get("enable_dbo"):
            assert line["stats"]["dbo_steps"] > 0


@pytest.mark.timeout(600)
def test_mesh() -> None:
    check(QUICK, 590)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", [*DENSE, *MOE])
def test_every_mesh(family: str) -> None:
    check([case for case in ALL if case["family"] == family], 3500)


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_copies_of_busy_experts(tmp_path: pathlib.Path) -> None:
    """Loads measured in one engine place the experts and copies of the next; nothing changes."""
    load = str(tmp_path / "load.json")
    placed = {"num_redundant_experts": 2, "eplb_load": load}
    check(
        [experts("mixtral", 1, 1, record_expert_load=load), experts("mixtral", 2, 1, **placed)], 590
    )
    tokens = json.loads(pathlib.Path(load).read_text())["tokens"]
    assert all(len(layer) == 8 and sum(layer) > 0 for layer in tokens)
