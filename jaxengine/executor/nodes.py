"""One engine over several processes of `jax.distributed`: node 0 drives, the others follow.

Every process must run the same programs in the same order. Node 0 plans, and sends each command
(a packed batch, its masks, a reset) to the others before it runs it itself; they run what comes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from jaxengine.config import EngineConfig, ParallelConfig
from jaxengine.executor.worker_messages import Call, Sample, Stop, Submit, decoder, encode
from jaxengine.sched.batch import Bucket
from jaxengine.sched.executor import Batch
from jaxengine.sched.plan import Int32, StepResult
from jaxengine.sched.shapes import ProgramKey
from jaxengine.wire.strangers import Strangers

if TYPE_CHECKING:
    from jaxengine.offload.host_pool import PagePool
    from jaxengine.offload.jobs import Done, OffloadStep
    from jaxengine.offload.layout import KVLayout
    from jaxengine.runner.model_runner import Handle, ModelRunner

log = logging.getLogger(__name__)

JOIN_SECONDS = 600  # all nodes load and compile first
_POLL_MS = 1000
_MOST_BYTES = 4096  # of what a node says to node 0: its digest
_decode = decoder(Submit | Sample | Call | Stop)


def join_nodes(parallel: ParallelConfig) -> None:
    """Become one process of the group. Must come before JAX's first use of a device.

    Raises ValueError for settings that do not fit together.
    """
    if not 0 <= parallel.node_rank < parallel.nnodes:
        raise ValueError(f"node_rank must be from 0 to {parallel.nnodes - 1}")
    import jax

    on_cpu = os.environ.get("JAX_PLATFORMS", "") == "cpu"
    if on_cpu:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    else:  # each process tunes its programs itself: they do not compile in step with each other
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"--xla_gpu_shard_autotuning=false {flags}"
    jax.distributed.initialize(
        f"{parallel.master_addr}:{parallel.master_port}", parallel.nnodes, parallel.node_rank
    )
    if on_cpu:
        _cache_programs_everywhere()


def _cache_programs_everywhere() -> None:
    """JAX lets only process 0 write to the compilation cache, but on CPU each process looks its
    programs up under keys of its own: the others would compile again at every start."""
    import jax
    from jax._src import distributed

    jax.local_devices()  # the runtime has taken the process's number by now
    distributed.global_state.process_id = 0


def digest(config: EngineConfig) -> bytes:
    """Hash of the settings that must be equal on all nodes."""
    parallel = {k: v for k, v in asdict(config.parallel).items() if k != "node_rank"}
    parts = [asdict(config.cache), asdict(config.scheduler), parallel, config.model.dtype]
    return hashlib.sha256(msgspec.json.encode(parts)).digest()


def _address(parallel: ParallelConfig) -> str:
    return f"tcp://{parallel.master_addr}:{parallel.master_port + 1}"


class LeadingExecutor:
    """Node 0's executor: tells the others, then runs it itself. See `Executor`."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        """Waits until all nodes are there. Raises RuntimeError when one does not come or is
        configured differently."""
        self._runner = runner
        self._steps = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # While nodes join, the last to come under a name has it: a connection that is breaking, or
        # a stranger's that says nothing, must not keep the node itself out.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        self._others = [_name(rank) for rank in range(1, config.parallel.nnodes)]
        try:
            self._socket.bind(_address(config.parallel))
            self._welcome(digest(config))
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        except BaseException:
            self._context.destroy(linger=0)  # an open socket would hold the process back
            raise

    def _welcome(self, expected: bytes) -> None:
        missing, deadline = set(self._others), time.monotonic() + JOIN_SECONDS
        strangers = Strangers("the port where nodes join")
        while missing:
            left = deadline - time.monotonic()
            if left <= 0 or not self._socket.poll(int(left * 1000)):
                raise RuntimeError(f"nodes did not join: {', '.join(map(bytes.decode, missing))}")
            name, *told = self._socket.recv_multipart()
            if name not in self._others:
                strangers.ignore(name, "it is none of the nodes")
            elif told != [expected]:
                raise RuntimeError(f"{name.decode()} has other settings than node 0")
            else:
                missing.discard(name)

    def _tell(self, command: Submit | Sample | Call | Stop) -> None:
        data = encode(command)
        for name in self._others:
            self._socket.send_multipart([name, data])

    def ready(self, key: ProgramKey) -> bool:
        return self._runner.ready(key)

    def start(self, key: ProgramKey) -> None:
        self._runner.start(key)

    def choose(
        self, num_tokens: int, num_rows: int, decode_only: bool, fewest_tokens: int
    ) -> tuple[Bucket, int]:
        return self._runner.choose(num_tokens, num_rows, decode_only, fewest_tokens)

    def submit(self, batch: Batch) -> tuple[int, Handle]:
        self._steps += 1
        self._tell(Submit(self._steps, batch))
        return self._steps, self._runner.submit(batch)

    def sample(self, handle: tuple[int, Handle], mask: Int32) -> None:
        self._tell(Sample(handle[0], mask))
        self._runner.sample(handle[1], mask)

    def result(self, handle: tuple[int, Handle]) -> list[StepResult]:
        return self._runner.result(handle[1])

    def open_transfers(self, pools: Sequence[PagePool], layout: KVLayout) -> None:
        """Raises ValueError: the other nodes cannot reach this one's host memory."""
        raise ValueError("KV offload works within one node; nnodes must be 1 with it")

    def transfer(self, steps: Sequence[OffloadStep | None]) -> None:
        raise AssertionError("no transfers were opened")

    def poll_transfers(self) -> list[list[Done]]:
        return []

    def reset(self) -> None:
        self._tell(Call(0, "reset"))
        self._runner.reset()

    def sleep(self, level: int) -> None:
        self._tell(Call(0, "sleep", [level]))
        self._runner.sleep(level)

    def wake_up(self, weights: bool = True, kv_cache: bool = True) -> None:
        self._tell(Call(0, "wake_up", [weights, kv_cache]))
        self._runner.wake_up(weights, kv_cache)

    def stats(self) -> dict[str, float]:
        return self._runner.stats()

    def wait_warm(self) -> None:
        self._runner.wait_warm()

    def shutdown(self) -> None:
        """The others end too."""
        self._runner.shutdown()
        self._tell(Stop())
        self._socket.close(linger=2000)
        self._context.term()


def _name(rank: int) -> bytes:
    return f"node {rank}".encode()


def run_follower(config: EngineConfig) -> int:
    """A node that follows: load, join, run what node 0 says. Returns the exit code."""
    from jaxengine import platform

    platform.setup(config.parallel)
    from jaxengine.executor.build import build

    runner, _ = build(config)
    parallel = config.parallel
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, _name(parallel.node_rank))
    socket.setsockopt(zmq.RCVHWM, 0)
    # Node 0 that is gone without a word is noticed by the transport.
    for option, seconds in ((zmq.HEARTBEAT_IVL, 2), (zmq.HEARTBEAT_TIMEOUT, 20)):
        socket.setsockopt(option, seconds * 1000)
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    socket.connect(_address(parallel))
    socket.send(digest(config))
    log.info("node %d follows %s", parallel.node_rank, _address(parallel))
    try:
        return _follow(runner, socket, monitor)
    finally:
        runner.shutdown()
        socket.disable_monitor()
        context.destroy(linger=0)


def _follow(runner: Any, socket: Any, monitor: Any) -> int:
    masked: dict[int, Any] = {}
    while True:
        if not socket.poll(_POLL_MS):
            if monitor.poll(0):
                log.error("node 0 is gone")
                return 1
            continue
        match _decode(socket.recv()):
            case Submit(step=step, batch=batch):
                handle = runner.submit(batch)
                if handle.batch.masked:
                    masked[step] = handle
            case Sample(step=step, mask=mask):
                runner.sample(masked.pop(step), mask)
            case Call(method="reset"):
                masked.clear()
                runner.reset()
            case Call(method="sleep", args=args):
                runner.sleep(*args)
            case Call(method="wake_up", args=args):
                runner.wake_up(*map(bool, args))
            case Stop():
                return 0
