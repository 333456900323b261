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
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jaxengine.runner.cache_lock import compiling
from jaxengine.runner.draft.drafter import Drafter
from jaxengine.runner.draft.lookup import FROM_DRAFTER, Lookup
from jaxengine.runner.lowering import (
    Shapes,
    lower_forward,
    lower_pool,
    lower_sample,
    lower_score,
    lower_seed,
    pipelined,
)
from jaxengine.runner.spec_programs import (
    lower_accept,
    lower_draft,
    lower_follow,
    lower_lookup,
    lower_remember,
    lower_verify,
)
from jaxengine.sched.batch import Bucket

log = logging.getLogger(__name__)


Kind = Literal[
    "forward", "sample", "greedy", "score", "pool", "seed",
    "lookup", "draft", "verify", "accept", "follow", "remember",
]  # fmt: skip


class Key(NamedTuple):
    """Identifies a compiled program: its kind and the shape that it is compiled for.

    | kind | size | what it does |
    |---|---|---|
    | forward | Bucket | the model over a step's tokens |
    | sample, greedy | rows | tokens from hidden states; greedy ones alone |
    | score, pool | tokens | log-probabilities of prompts; sums for embeddings |
    | seed | 0 | writes a slot's record |
    | lookup, draft | Bucket | drafts, looked up in the history or by the drafter |
    | verify, accept | Bucket | a step with drafts: the model over them, then what is kept |
    | follow, remember | Bucket, rows | the drafter takes note of a step (`runner.draft.drafter`) |
    """

    kind: Kind
    size: Bucket | int = 0


class Programs:
    """Programs by key, compiled in the background in the order asked for. Thread-safe."""

    def __init__(self, shapes: Shapes, threads: int = 2) -> None:
        self.shapes = shapes
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
        self.lookup = Lookup(1, 1)  # of the programs that look drafts up

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, while the engine drafts with it and not by look-up."""
        return self.shapes.drafter if self.lookup == FROM_DRAFTER else None

    def start(self, keys: Sequence[Key], urgent: bool = False) -> None:
        """Queue compilations, in this order; the urgent ones at full priority."""
        pool = self._urgent if urgent else self._pool
        with self._lock:
            for key in map(_own, keys):
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
        key = _own(key)
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
        future = self._futures.get(_own(key))
        return future is not None and future.done()

    def shutdown(self) -> None:
        for pool in (self._pool, self._urgent):
            pool.shutdown(wait=True, cancel_futures=True)

    def _wait_quietly(self) -> None:
        done: set[Key] = set()
        while waiting := [key for key in list(self._futures) if key not in done]:
            for key in waiting:
                if not self._ended_well(key):
                    return  # never warm; a step that needs it raises the error
                done.add(key)
        self.warm = True

    def _ended_well(self, key: Key) -> bool:
        """Wait for a compilation. False when it failed, or will not be done."""
        while True:
            future = self._futures[key]
            try:
                error = future.exception()
                break
            except CancelledError:
                if self._futures[key] is future:
                    return False  # shut down; otherwise `get` compiles it itself
        if error is not None:
            log.error("warm-up: %s does not compile: %s", _describe(key), error)
        return error is None

    def _compile(self, key: Key) -> Any:
        started = time.monotonic()
        compiled: Any
        if isinstance(key.size, Bucket) and len(self.shapes.stages) > 1:
            compiled = pipelined(self.shapes, key.size)
        else:
            with compiling(_cache_folder(), f"{self.shapes.config} {key}"):
                compiled = self._lowered(key).compile()
        self.num_compiled += 1
        seconds = time.monotonic() - started
        log.info("program %d ready: %s, %.1f s", self.num_compiled, _describe(key), seconds)
        return compiled

    def _lowered(self, key: Key) -> Any:
        of, kind, size = self.shapes, key.kind, key.size
        if isinstance(size, Bucket):
            if kind == "lookup":
                return lower_lookup(of, size, self.lookup)
            return _OF_BUCKETS[kind](of, size)
        if kind == "seed":
            return lower_seed(of)
        if kind in ("sample", "greedy"):
            return lower_sample(of, size, greedy=kind == "greedy")
        return _OF_COUNTS[kind](of, size)


_OF_BUCKETS: dict[Kind, Callable[[Shapes, Bucket], Any]] = {
    "forward": lower_forward,
    "draft": lower_draft,
    "verify": lower_verify,
    "accept": lower_accept,
    "follow": lower_follow,
}
_OF_COUNTS: dict[Kind, Callable[[Shapes, int], Any]] = {  # of rows or tokens
    "score": lower_score,
    "pool": lower_pool,
    "remember": lower_remember,
}


def _own(key: Key) -> Key:
    """The key of the program that serves it: only what runs the model's layers differs when a
    bucket is run as two microbatches."""
    if isinstance(key.size, Bucket) and key.size.dbo and key.kind not in ("forward", "verify"):
        return Key(key.kind, replace(key.size, dbo=False))
    return key


def _cache_folder() -> Path | None:
    """The cache folder to lock while compiling; None where this process would not write to it (JAX
    lets the first of several processes write, and the engine all of them on CPU): waiting would win
    nothing."""
    folder = jax.config.jax_compilation_cache_dir
    writes = jax.process_index() == 0 or jax.default_backend() == "cpu"
    return Path(folder) if folder and writes else None


def _yield_to_others() -> None:
    """Compile at low priority: requests are served meanwhile."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _describe(key: Key) -> str:
    if isinstance(key.size, Bucket) and key.size.drafts:
        return f"{key.kind} {key.size.rows} rows of {key.size.drafts} drafts"
    if isinstance(key.size, Bucket):
        what = "" if key.kind == "forward" else f"{key.kind} "
        return f"{what}{'decode' if key.size.decode_only else 'mixed'} {key.size.tokens}"
    return f"{key.kind} {key.size}" if key.size else key.kind
