"""jaxengine in Ray Serve: every replica is the whole OpenAI server around an engine of its own.

    pip install 'jaxengine[ray]'
    serve run --working-dir configs/deploy ray_serve:app
    serve run --working-dir configs/deploy ray_serve:app model=/models/m replicas=2 gpus=1

The first serves the demo model on http://127.0.0.1:8000. Every argument but `replicas`, `gpus`
and `cpus` is a setting of the engine, as in `LLM(...)`.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Receive, Scope, Send

from jaxengine.config import EngineConfig
from jaxengine.front.async_llm import AsyncLLM
from jaxengine.server.app import build_app
from jaxengine.wire.frames import DEFAULT_CORE


class EngineApp:
    """An ASGI app that starts its engine when it starts, and stops it when it stops."""

    def __init__(self, settings: dict[str, Any], core: str = DEFAULT_CORE) -> None:
        """Raises TypeError for a setting that does not exist."""
        # Ray chooses where to listen, and so by which names the server is called.
        self.config = EngineConfig.of(**{"allowed_hosts": ["*"], **settings})
        self.engine: AsyncLLM | None = None
        self._core = core
        self._app = build_app(None, self.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()  # lifespan.startup
        try:
            self.engine = await AsyncLLM.start(self.config, core=self._core)
        except Exception as error:  # noqa: BLE001 - the server says it, whatever it is
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        self._app.state.server.engine = self.engine
        await send({"type": "lifespan.startup.complete"})
        await receive()  # lifespan.shutdown
        await self.engine.shutdown(self.config.server.shutdown_timeout)
        await send({"type": "lifespan.shutdown.complete"})


class Replica:
    """What Ray asks beside the app: a replica whose check fails is replaced."""

    app: EngineApp  # set by serve.ingress

    async def check_health(self) -> None:
        """Raises RuntimeError when no rank of the engine can take requests."""
        engine = self.app.engine
        if engine is not None and (engine.dead_error is not None or not engine.board.healthy()):
            raise RuntimeError("the engine is dead")


def app(args: dict[str, str]) -> Any:
    """The application that `serve run ray_serve:app KEY=VALUE ...` runs."""
    from ray import serve

    settings = {name: _value(text) for name, text in args.items()}
    replicas = settings.pop("replicas", 1)
    actor = {"num_gpus": settings.pop("gpus", 0), "num_cpus": settings.pop("cpus", 1)}
    EngineConfig.of(**settings)  # a wrong name is said here, not in a replica

    def build() -> EngineApp:
        return EngineApp(settings)

    deployment = serve.deployment(serve.ingress(build)(Replica))
    return deployment.options(num_replicas=replicas, ray_actor_options=actor).bind()


def _value(text: str) -> Any:
    """Numbers and truth values from the command line; anything else is text."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, bool | int | float) else text
