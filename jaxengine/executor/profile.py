"""Profiles of a running engine, by jax.profiler, on order of a client.

A trace is a folder that TensorBoard reads; the files that end in `.json.gz` open in Perfetto.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from jaxengine.config import EngineConfig
from jaxengine.settings.coupling import member_of

log = logging.getLogger(__name__)


class Profiler:
    """The profiler of the process that owns the device. One trace at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self._folder = config.server.profiler_dir
        # With fault tolerance, and where ranks share experts, the device is a worker's.
        self._elsewhere = config.fault.enable_fault_tolerance or member_of(config) is not None
        self._rank = config.data_parallel.data_parallel_rank or 0
        self._running: Path | None = None

    def start(self) -> str:
        """Begin a trace in a new folder, and return that. Raises ValueError when none is wanted
        or one is running."""
        if self._folder is None:
            raise ValueError("profiling needs --profiler-dir")
        if self._elsewhere:
            raise ValueError(
                "profiling works in an engine that owns its device: not with "
                "--enable-fault-tolerance, nor with ranks that share experts"
            )
        if self._running is not None:
            raise ValueError(f"a profile is being taken already, in {self._running}")
        import jax

        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = Path(self._folder) / f"{stamp}-engine{self._rank}-{os.getpid()}"
        folder.mkdir(parents=True, exist_ok=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call would slow the loop it looks at
        jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
        self._running = folder
        return str(folder)

    def stop(self) -> list[str]:
        """End the trace and write it; the files that open in Perfetto. Raises ValueError when
        none is running."""
        if self._running is None:
            raise ValueError("no profile is being taken")
        import jax

        folder, self._running = self._running, None
        jax.profiler.stop_trace()
        return sorted(str(path) for path in folder.rglob("*.json.gz"))

    def close(self) -> None:
        """Keep what was recorded so far; an engine that ends does not fail of it."""
        if self._running is not None:
            try:
                self.stop()
            except Exception:
                log.exception("the profile could not be written")
