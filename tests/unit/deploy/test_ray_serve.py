"""The Ray Serve application: its ASGI app without Ray, and (slow) in Ray where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from jaxengine.cli.asgi import post

FILE = pathlib.Path(__file__).resolve().parents[3] / "configs" / "deploy" / "ray_serve.py"
STUB = "jaxengine.engine.stub:StubEngineCore"


@pytest.fixture(scope="module")
def ray_serve() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ray_serve", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Life:
    """The lifespan side of an ASGI server."""

    def __init__(self, app: Any) -> None:
        self._asked: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        self._said: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        self.task = asyncio.create_task(app({"type": "lifespan"}, self._asked.get, self._said.put))

    async def tell(self, what: str) -> dict[str, str]:
        await self._asked.put({"type": f"lifespan.{what}"})
        return await asyncio.wait_for(self._said.get(), 120)


async def test_the_app_starts_answers_and_stops(ray_serve: ModuleType) -> None:
    app = ray_serve.EngineApp({"max_model_len": 64}, core=STUB)
    life = Life(app)
    assert (await life.tell("startup"))["type"] == "lifespan.startup.complete"
    replica = ray_serve.Replica()
    replica.app = app
    await replica.check_health()
    body = json.dumps({"prompt": "hi", "max_tokens": 4}).encode()
    answer = await post(app, "/v1/completions", body, {})
    assert answer.status == 200 and json.loads(answer.body)["usage"]["completion_tokens"] == 4
    app.engine.kill()
    with pytest.raises(RuntimeError, match="the engine is dead"):
        for _ in range(200):
            await asyncio.sleep(0.05)
            await replica.check_health()
    assert (await life.tell("shutdown"))["type"] == "lifespan.shutdown.complete"
    await life.task


async def test_a_start_that_fails_is_said(ray_serve: ModuleType) -> None:
    life = Life(ray_serve.EngineApp({"model": "./no/model"}, core=STUB))
    said = await life.tell("startup")
    assert said["type"] == "lifespan.startup.failed" and "'./no/model'" in said["message"]


def test_a_wrong_setting_is_named(ray_serve: ModuleType) -> None:
    with pytest.raises(TypeError, match="'max_sequences'"):
        ray_serve.EngineApp({"max_sequences": 3})
    assert [ray_serve._value(v) for v in ("8", "0.5", "true", "demo", '{"a": 1}')] == [
        8, 0.5, True, "demo", '{"a": 1}',
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_serves_it() -> None:
    """In a process of its own: Ray leaves threads and processes behind."""
    pytest.importorskip("ray.serve", reason="pip install 'jaxengine[ray]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"""
import sys, json, urllib.request
sys.path.insert(0, {str(FILE.parent)!r})
import ray
from ray import serve
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
serve.start(http_options={{"host": "127.0.0.1", "port": {port}}})
import ray_serve
serve.run(ray_serve.app({{"max_model_len": "256"}}), name="jaxengine", route_prefix="/")
body = json.dumps({{"prompt": "The sky is", "max_tokens": 4, "temperature": 0}}).encode()
ask = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
print("ANSWER", json.loads(urllib.request.urlopen(ask, timeout=300).read())["choices"][0]["text"])
serve.shutdown()
"""
    quiet = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run([sys.executable, "-c", code], env=quiet, capture_output=True, text=True)
    assert "ANSWER" in done.stdout, done.stdout + done.stderr
