"""The deployment files: the LeaderWorkerSet against the fields of its API, flags against ours."""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
from typing import Any

import jsonschema
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "configs" / "deploy"

STRINGS = {"type": "array", "items": {"type": "string"}}
PROBE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["httpGet"],
    "properties": {
        "httpGet": {
            "type": "object",
            "required": ["path", "port"],
            "properties": {"path": {"pattern": "^/"}, "port": {"type": "integer"}},
        },
        "periodSeconds": {"type": "integer", "minimum": 1},
        "failureThreshold": {"type": "integer", "minimum": 1},
    },
}
POD = {
    "type": "object",
    "additionalProperties": False,
    "required": ["spec"],
    "properties": {
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["containers"],
            "properties": {
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name", "image"],
                        "properties": {
                            "name": {"pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
                            "image": {"type": "string"},
                            "command": STRINGS,
                            "args": STRINGS,
                            "ports": {
                                "type": "array",
                                "items": {"required": ["containerPort"]},
                            },
                            "readinessProbe": PROBE,
                            "startupProbe": PROBE,
                            "resources": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {"limits": {"type": "object"}},
                            },
                            "volumeMounts": {
                                "type": "array",
                                "items": {"required": ["name", "mountPath"]},
                            },
                        },
                    },
                },
                "volumes": {"type": "array", "items": {"required": ["name"]}},
            },
        },
    },
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
        (container,) = spec["containers"]
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
    parallel = parsed(words).parallel
    assert (parallel.nnodes, parallel.node_rank, parallel.master_port) == (2, 1, 29500)
    assert parallel.tensor_parallel_size * parallel.attention_data_parallel_size == 16
