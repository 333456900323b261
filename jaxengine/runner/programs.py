"""The compiled programs: compiled ahead of time, once each, into the persistent cache.

Programs are dispatched as compiled executables, so a step can never trace or compile by
accident; every compilation goes through here and is counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxengine.models.decoder import KV
from jaxengine.models.spec import Params
from jaxengine.parallel.mesh import Devices
from jaxengine.runner.forward import ForwardOutput, StepConfig, forward
from jaxengine.runner.sampling_step import sample_rows, score_prompt
from jaxengine.runner.state import DeviceState, SlotState, seed_slot
from jaxengine.sched.batch import Bucket, layout_of, rows_layout
from jaxengine.sched.slot_record import SlotShape

log = logging.getLogger(__name__)


class Key(NamedTuple):
    """Names a program: the forward of a bucket, the sampler of so many rows, the prompt scorer of
    so many tokens, the slot writer."""

    kind: Literal["forward", "sample", "score", "seed"]
    size: Bucket | int = 0


class Specs(NamedTuple):
    """How parameters and caches are divided over the mesh: trees of PartitionSpec."""

    params: Any
    kv: Any


class Programs:
    """Programs by key. Thread-safe.

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
        devices: Devices | None = None,
        specs: Specs | None = None,
    ) -> None:
        self._config = config
        self._params = params
        self._state = state
        self._slot_shape = slot_shape
        self._devices = devices or Devices()
        self._specs = specs or Specs(P(), P())
        self._urgent = ThreadPoolExecutor(threads, "compile")
        # Half the threads: tracing holds the interpreter, which requests need too.
        self._pool = ThreadPoolExecutor(
            max(1, threads // 2), "warm-up", initializer=_yield_to_others
        )
        self._futures: dict[Key, Future[Any]] = {}
        self._lock = threading.Lock()
        self.num_compiled = 0
        self.compiled_after_warmup = 0
        self.warm = False

    def start(self, keys: Sequence[Key], urgent: bool = False) -> None:
        """Queue compilations, in this order; the urgent ones at full priority."""
        pool = self._urgent if urgent else self._pool
        with self._lock:
            for key in keys:
                if key not in self._futures:
                    self._futures[key] = pool.submit(self._compile, key)

    def wait(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Wait for all that was queued. Raises what a compilation raised."""
        futures = list(self._futures.values())
        for done, future in enumerate(futures):
            future.result()
            if progress:
                progress(done + 1, len(futures))
        self.warm = True

    def wait_in_background(self) -> None:
        """`warm` turns True when all that is queued now is compiled."""
        threading.Thread(target=self._wait_quietly, name="warm-up", daemon=True).start()

    def get(self, key: Key) -> Callable[..., Any]:
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
        return future.result()

    def ready(self, key: Key) -> bool:
        future = self._futures.get(key)
        return future is not None and future.done()

    def shutdown(self) -> None:
        for pool in (self._pool, self._urgent):
            pool.shutdown(wait=True, cancel_futures=True)

    def _wait_quietly(self) -> None:
        for key in list(self._futures):
            while True:
                future = self._futures[key]
                try:
                    error = future.exception()
                    break
                except CancelledError:
                    if self._futures[key] is future:
                        return  # shut down; otherwise `get` compiles it itself
            if error is not None:
                log.error("warm-up: %s does not compile: %s", _describe(key), error)
                return  # never warm; a step that needs it raises the error
        self.warm = True

    def _compile(self, key: Key) -> Any:
        started = time.monotonic()
        compiled = self._lowered(key).compile()
        self.num_compiled += 1
        seconds = time.monotonic() - started
        log.info("program %d ready: %s, %.1f s", self.num_compiled, _describe(key), seconds)
        return compiled

    def _lowered(self, key: Key) -> Any:
        config, slots, devices = self._config, self._state.slots, self._devices
        data, shards = devices.data, devices.num_shards
        width = config.spec.hidden_size
        if isinstance(key.size, Bucket):
            bucket = key.size

            def run_forward(
                params: Params, kv: KV, last_token: Array, blob: Array
            ) -> tuple[KV, ForwardOutput]:
                return forward(config, bucket, params, kv, last_token, blob)

            blob = _ints(shards * layout_of(bucket, config.shape).size)
            kv_specs = self._specs.kv
            return devices.lower(
                run_forward,
                (self._params, self._state.kv, slots.last_token, blob),
                (self._specs.params, kv_specs, data, data),
                (kv_specs, data),
                donate=(1,),
            )
        if key.kind == "seed":
            shape = self._slot_shape

            def run_seed(slots: SlotState, blob: Array) -> SlotState:
                return seed_slot(shape, slots, blob)

            args = (slots, _ints(shards * shape.blob_size))
            return devices.lower(run_seed, args, (data, data), data, donate=(0,))
        size = key.size
        head, head_specs = head_params(self._params), head_params(self._specs.params)
        hidden = jax.ShapeDtypeStruct((shards * size, width), jnp.float32)
        if key.kind == "score":

            def run_score(params: Params, hidden: Array, targets: Array) -> Array:
                return score_prompt(config, params, hidden, targets)

            targets = _ints(shards * size)
            specs = (head_specs, data, data)
            return devices.lower(run_score, (head, hidden, targets), specs, data)

        def run_sample(
            params: Params, slots: SlotState, hidden: Array, blob: Array, mask: Array
        ) -> tuple[SlotState, Array]:
            return sample_rows(config, size, params, slots, hidden, blob, mask)

        mask = _ints(shards * size, -(-config.spec.vocab_size // 32))
        rows = _ints(shards * rows_layout(size).size)
        return devices.lower(
            run_sample,
            (head, slots, hidden, rows, mask),
            (head_specs, data, data, data, data),
            (data, data),
            donate=(1,),
        )


def _yield_to_others() -> None:
    """Compile at low priority: requests are served meanwhile."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _describe(key: Key) -> str:
    if isinstance(key.size, Bucket):
        return f"{'decode' if key.size.decode_only else 'mixed'} {key.size.tokens}"
    return f"{key.kind} {key.size}" if key.size else key.kind


def head_params(params: Any) -> Any:
    """The leaves that the output head reads; a spec for all leaves stays as it is."""
    if not isinstance(params, dict):
        return params
    return {name: params[name] for name in ("head", "embed") if name in params}


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
