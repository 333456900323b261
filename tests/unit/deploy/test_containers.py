"""The images, the compose file and the Kubernetes manifests: linted, and every command in them
parsed by the real command line."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "configs" / "deploy"
DOCKERFILES = ["Dockerfile", "Dockerfile.cuda12"]

TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
DEVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["capabilities"],
    "properties": {"driver": TEXT, "count": {"enum": ["all"]}, "capabilities": TEXTS},
}
SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image", "build", "command", "environment", "cap_drop", "security_opt"],
    "properties": {
        "profiles": TEXTS,
        "image": {"pattern": r"^[a-z0-9/._-]+:[\w.-]+$"},
        "build": {
            "type": "object",
            "additionalProperties": False,
            "required": ["context", "dockerfile"],
            "properties": {"context": TEXT, "dockerfile": TEXT},
        },
        "command": TEXTS,
        "ports": {"type": "array", "items": {"pattern": r"^127\.0\.0\.1:\d+:\d+$"}},
        "volumes": {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "string", "pattern": r"^[a-z]\w*:/\w+(:ro)?$"},
                    {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["type", "source", "target"],
                        "properties": {
                            "type": {"enum": ["bind", "volume", "tmpfs"]},
                            "source": TEXT,
                            "target": {"pattern": "^/"},
                            "read_only": {"type": "boolean"},
                        },
                    },
                ]
            },
        },
        "environment": {
            "type": "object",
            "additionalProperties": False,
            "required": ["JAXENGINE_API_KEY"],
            "properties": {"JAXENGINE_API_KEY": {"pattern": r"^\$\{JAXENGINE_API_KEY:\?.+\}$"}},
        },
        "cap_drop": {"const": ["ALL"]},
        "security_opt": {"const": ["no-new-privileges:true"]},
        "shm_size": {"pattern": r"^\d+[kmg]b?$"},
        "stop_grace_period": {"pattern": r"^\d+(s|m)$"},
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
        "deploy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "resources": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "reservations": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {"devices": {"type": "array", "items": DEVICE}},
                        }
                    },
                }
            },
        },
    },
}
COMPOSE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["services"],
    "properties": {
        "name": {"pattern": "^[a-z0-9][a-z0-9_-]*$"},
        "services": {"type": "object", "additionalProperties": SERVICE},
        "volumes": {"type": "object"},
    },
}


def parsed(command: list[str]) -> Any:
    """The options of `jaxengine ...`."""
    from jaxengine.cli.main import app

    _, bound, _ = app.parse_args(command, exit_on_error=False, print_error=False)
    return bound.arguments["options"]


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, rest) in order, continued lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / name).read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(w[0], w[1]) for line in lines if len(w := line.split(maxsplit=1)) == 2]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile_lints(name: str) -> None:
    tool = pathlib.Path(sys.prefix) / "bin" / "hadolint"
    done = subprocess.run([tool, DEPLOY / name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile_keeps_the_rules(name: str) -> None:
    steps = instructions(name)
    stages = [i for i, (word, _) in enumerate(steps) if word == "FROM"]
    assert len(stages) == 2, "build tools stay in a first stage"
    last = dict(steps[stages[1] :])
    user = next(rest for word, rest in steps if word == "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "by number, for runAsNonRoot"
    assert f"--uid {user.split(':')[0]}" in last["RUN"]
    assert json.loads(last["VOLUME"]) == ["/cache"] and "XDG_CACHE_HOME=/cache" in last["ENV"]
    assert "/health'" in last["HEALTHCHECK"] and "--start-period" in last["HEALTHCHECK"]
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], name, "exec")
    for word, rest in steps:
        if word in ("ENV", "ARG"):
            assert not re.search(r"KEY|TOKEN|SECRET|PASSW", rest), "no secret stays in an image"
    assert json.loads(last["ENTRYPOINT"]) == ["jaxengine"]
    options = parsed(json.loads(last["CMD"]))
    assert (options.server.host, str(options.server.port)) == ("0.0.0.0", last["EXPOSE"])


def test_build_context_holds_what_the_package_needs() -> None:
    kept = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert {
        "jaxengine",
        "sched",
        "offload",
        "pallas_kernels",
        "pyproject.toml",
        "README.md",
    } <= kept
    assert all((ROOT / name).exists() for name in kept)


def test_compose_file() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    jsonschema.validate(compose, COMPOSE)
    for service in compose["services"].values():
        context = (DEPLOY / service["build"]["context"]).resolve()
        assert context == ROOT and (context / service["build"]["dockerfile"]).is_file()
        named = {v.split(":")[0] for v in service["volumes"] if isinstance(v, str)}
        assert named <= set(compose["volumes"])
        assert parsed(service["command"]).server.host == "0.0.0.0"
        grace = int(service["stop_grace_period"].rstrip("s"))
        assert grace > parsed(service["command"]).server.shutdown_timeout


def test_kubernetes_manifests_validate() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    for document in documents:
        kubernetes_validate.validate(document, "1.37", strict=True)
    claim, deployment, service = documents
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    spec = template["spec"]
    claims = [v.get("persistentVolumeClaim", {}).get("claimName") for v in spec["volumes"]]
    assert claim["metadata"]["name"] in claims
    (container,) = spec["containers"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in spec["volumes"]}
    port, metrics = container["ports"]
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    assert {probe["httpGet"]["port"] for probe in probes} == {port["containerPort"]}
    (variable,) = container["env"]
    assert "secretKeyRef" in variable["valueFrom"]
    assert variable["name"] == "JAXENGINE_API_KEY"
    options = parsed([*container["command"][1:], *container["args"]])
    assert options.server.host == "0.0.0.0" and options.server.port == port["containerPort"]
    told = int(template["metadata"]["annotations"]["prometheus.io/port"])
    assert options.server.metrics_port == metrics["containerPort"] == told
    assert options.server.api_key is None, "a flag is seen by everybody on the node"
    assert spec["terminationGracePeriodSeconds"] > options.server.shutdown_timeout


def test_the_validator_sees_mistakes() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    documents[1]["spec"]["replica"] = 2
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(documents[1], "1.37", strict=True)
