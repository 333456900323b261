"""Compiled step programs: compiled ahead of time, once each, into the persistent cache.

Programs are dispatched as compiled executables, so a step can never trace or compile by
accident; every compilation goes through here and is counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.models.spec import Params
from jaxengine.runner.state import DeviceState, SlotState, seed_slot
from jaxengine.runner.step import StepConfig, step
from jaxengine.sched.batch import Bucket, layout_of
from jaxengine.sched.slot_record import SlotShape

log = logging.getLogger(__name__)

SEED = "seed"  # key of the slot seeding program


class Programs:
    """Step programs by bucket, and the slot seeding program. Thread-safe.

    `params` and `state` may be ShapeDtypeStructs: compiling needs no weights, so that programs
    compile while weights load.
    """

    def __init__(
        self,
        config: StepConfig,
        params: Params,
        state: DeviceState,
        slot_shape: SlotShape,
        threads: int = 2,
    ) -> None:
        self._config = config
        self._params = params
        self._state = state
        self._slot_shape = slot_shape
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compile")
        self._futures: dict[Bucket | str, Future[Any]] = {}
        self._lock = threading.Lock()
        self.num_compiled = 0
        self.compiled_after_warmup = 0
        self.warm = False

    def start(self, keys: Sequence[Bucket | str]) -> None:
        """Queue compilations, in this order; `warm` turns True when they are done."""
        with self._lock:
            fresh = [key for key in keys if key not in self._futures]
            for key in fresh:
                self._futures[key] = self._pool.submit(self._compile, key)
        self._pool.submit(self._check_warm, list(keys))

    def wait(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Wait for all that was queued. Raises what a compilation raised."""
        futures = list(self._futures.values())
        for done, future in enumerate(futures):
            future.result()
            if progress:
                progress(done + 1, len(futures))
        self.warm = True

    def get(self, key: Bucket | str) -> Callable[..., Any]:
        """The program. One that is still queued is compiled here and now instead."""
        with self._lock:
            future = self._futures.get(key)
            mine = future is None or future.cancel()
            if mine:
                if self.warm:
                    self.compiled_after_warmup += 1
                    log.warning("compiling %s after warm-up", key)
                future = self._futures[key] = Future()
        assert future is not None
        if mine:
            try:
                future.set_result(self._compile(key))
            except BaseException as error:
                future.set_exception(error)
                raise
        return future.result()  # type: ignore[no-any-return]

    def ready(self, key: Bucket | str) -> bool:
        future = self._futures.get(key)
        return future is not None and future.done()

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _check_warm(self, keys: list[Bucket | str]) -> None:
        # Runs last on one thread of the pool; the others may still be at work.
        for key in keys:
            self.get(key)
        self.warm = True

    def _compile(self, key: Bucket | str) -> Any:
        started = time.monotonic()
        compiled = self._step(key) if isinstance(key, Bucket) else self._seed()
        self.num_compiled += 1
        log.debug("compiled %s in %.2f s", key, time.monotonic() - started)
        return compiled

    def _step(self, bucket: Bucket) -> Any:
        config = self._config

        def run(params: Params, state: DeviceState, blob: jax.Array) -> Any:
            return step(config, bucket, params, state, blob)

        blob = jax.ShapeDtypeStruct((layout_of(bucket, config.shape).size,), jnp.int32)
        jitted = jax.jit(run, donate_argnums=1)
        return jitted.lower(self._params, self._state, blob).compile()

    def _seed(self) -> Any:
        shape = self._slot_shape

        def run(slots: SlotState, blob: jax.Array) -> SlotState:
            return seed_slot(shape, slots, blob)

        blob = jax.ShapeDtypeStruct((shape.blob_size,), jnp.int32)
        return jax.jit(run, donate_argnums=0).lower(self._state.slots, blob).compile()
