"""The deployment files: the LeaderWorkerSet against the fields of its API, flags against ours."""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "configs" / "deploy"

POD = {
    "type": "object",
    "additionalProperties": False,
    "required": ["spec"],
    "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}},
}
LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "rolloutStrategy": {"type": "object"},
                "networkConfig": {"type": "object"},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate"],
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
                        "leaderTemplate": POD,
                        "workerTemplate": POD,
                    },
                },
            },
        },
    },
}
GIVEN = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "leader", "LWS_WORKER_INDEX": "1"}


def parsed(command: list[str]) -> Any:
    """The options of a serve command."""
    from jaxengine.cli.main import app

    _, bound, _ = app.parse_args(command[1:], exit_on_error=False, print_error=False)
    return bound.arguments["options"]


def test_leader_worker_set() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "leaderworkerset.yaml").read_text()))
    jsonschema.validate(documents[0], LEADER_WORKER_SET)
    template = documents[0]["spec"]["leaderWorkerTemplate"]
    assert str(template["size"]) == GIVEN["LWS_GROUP_SIZE"]
    for name in ("leaderTemplate", "workerTemplate"):
        spec = template[name]["spec"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(pod, "1.37", strict=True)
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        command = [
            re.sub(r"\$\((\w+)\)", lambda m: GIVEN[m[1]], word)
            for word in (*container["command"], *container["args"])
        ]
        options = parsed(command)
        assert options.parallel.nnodes == 2
        assert options.parallel.node_rank == (0 if name == "leaderTemplate" else 1)
        assert options.parallel.master_addr == "leader"
        if name == "leaderTemplate":  # it listens
            (key,) = container["env"]
            assert key["name"] == "JAXENGINE_API_KEY" and "secretKeyRef" in key["valueFrom"]
            told = template[name]["metadata"]["annotations"]["prometheus.io/port"]
            ports = [port["containerPort"] for port in container["ports"]]
            assert ports == [options.server.port, int(told)]
            assert options.server.metrics_port == int(told)
    service = documents[1]
    labels = template["leaderTemplate"]["metadata"]["labels"]
    assert service["spec"]["selector"]["role"] == labels["role"]


def test_slurm_script() -> None:
    path = DEPLOY / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    text = path.read_text()
    command = re.search(r"exec (jaxengine serve.*?)'", text, re.DOTALL)
    assert command is not None
    words = [
        {"$SLURM_NNODES": "2", "$SLURM_NODEID": "1", "$MASTER_PORT": "29500"}.get(word, word)
        for word in shlex.split(command[1].replace("\\\n", " "))
    ]
    options = parsed(words)
    assert options.server.api_key_file == "$KEY_FILE" and "export KEY_FILE=" in text
    parallel = options.parallel
    assert (parallel.nnodes, parallel.node_rank, parallel.master_port) == (2, 1, 29500)
    assert parallel.tensor_parallel_size * parallel.attention_data_parallel_size == 16
