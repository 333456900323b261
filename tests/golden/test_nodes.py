"""Two processes of `jax.distributed` on loopback are one engine and give the reference ids."""

import json
import pathlib
import socket
import subprocess
import sys

import pytest
from testdata import child_environment

HERE = pathlib.Path(__file__).parent
ENV_SETUP = "import os; os.environ['JAX_PLATFORMS'] = 'cpu'\n"
LEADER = """
import json, sys
sys.path.insert(0, sys.argv[2])
import mesh_cases
case = json.loads(sys.argv[1])
print(json.dumps(mesh_cases.run_case(case)))
"""
FOLLOWER = """
import json, sys
sys.path.insert(0, sys.argv[2])
import test_goldens
from jaxengine.config import EngineConfig
from jaxengine.executor.nodes import run_follower
case = json.loads(sys.argv[1])
family = case.pop("family")
sys.exit(run_follower(EngineConfig.of(
    model=str(test_goldens.GOLDENS / family), max_model_len=128, max_logprobs=8, warmup="lazy",
    block_size=16, max_num_seqs=4, **case)))
"""


def free_ports() -> int:
    """A port that is free together with the next one."""
    for _ in range(50):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise RuntimeError("no two free ports side by side")


def run_two(case: dict) -> None:
    case = {**case, "nnodes": 2, "master_port": free_ports()}
    processes = []
    for rank, code in ((0, LEADER), (1, FOLLOWER)):
        command = [sys.executable, "-c", ENV_SETUP + code, json.dumps({**case, "node_rank": rank})]
        processes.append(
            subprocess.Popen(
                [*command, str(HERE)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=HERE,
                env=child_environment(),
            )
        )
    try:
        _, said = processes[0].communicate(timeout=280)
        assert processes[0].returncode == 0, said[-3000:]
        _, said = processes[1].communicate(timeout=60)  # told to stop
        assert processes[1].returncode == 0, said[-3000:]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_tensor_parallel_over_processes() -> None:
    run_two({"family": "llama", "tensor_parallel_size": 2})


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "case",
    [
        {"family": "qwen3", "attention_data_parallel_size": 2},
        {
            "family": "mixtral", "attention_data_parallel_size": 2, "tensor_parallel_size": 2,
            "enable_expert_parallel": True, "enable_dbo": True, "dbo_decode_token_threshold": 2,
            "dbo_prefill_token_threshold": 2,
        },
        {"family": "gemma3", "tensor_parallel_size": 4},
    ],
    ids=str,
)  # fmt: skip
def test_meshes_over_processes(case: dict) -> None:
    run_two(case)
