"""The serve command."""

from __future__ import annotations

import logging

from jaxengine.cli.preflight import preflight
from jaxengine.config import EngineConfig
from jaxengine.progress import quiet_below
from jaxengine.server.sockets import check_tls
from jaxengine.wire import frames as wire


def run_server(config: EngineConfig, stub: bool = False) -> int:
    """Serve until told to stop; returns the exit code (see `jaxengine.server.run.serve`). Raises
    ValueError for settings that do not go together."""
    check_tls(config.server)
    if config.server.api_server_count > 1 and config.fault.enable_fault_tolerance:
        raise ValueError("--api-server-count above 1 does not work with --enable-fault-tolerance")
    if not stub:
        preflight(config)
    setup_logging(config.server.log_level)
    quiet_below(config.server.log_level)
    if config.server.disable_access_log:
        logging.getLogger("jaxengine.access").setLevel(logging.WARNING)
    if config.parallel.node_rank > 0:  # node 0 serves
        from jaxengine.executor.nodes import run_follower

        return run_follower(config)
    from jaxengine.server.run import serve

    return serve(config, wire.STUB_CORE if stub else wire.DEFAULT_CORE)


def setup_logging(level: str) -> None:
    """One line an event, to stderr; standard output stays free for answers."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
