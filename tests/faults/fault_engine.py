"""Drives one real engine process over its wire, without the front."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import zmq
from testdata import GOLDENS

from jaxengine.config import EngineConfig
from jaxengine.engine.process import EngineLaunch, run_engine
from jaxengine.sampling_params import SamplingParams
from jaxengine.wire import frames as wire
from jaxengine.wire.messages import (
    EngineOutput,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    FaultToleranceRequest,
    FaultToleranceResult,
    RankStatus,
    Siblings,
    UtilityCall,
    UtilityResult,
)

MODEL = GOLDENS / "llama"
KINDS: dict[bytes, Any] = {
    wire.READY: EngineReady,
    wire.OUTPUTS: EngineOutputs,
    wire.STATUS: RankStatus,
    wire.ORDER_RESULT: FaultToleranceResult,
    wire.RESULT: UtilityResult,
    wire.FAILED: wire.EngineFailure,
}
# The few programs that other tests compile too, so that the compilation cache has them.
SETTINGS: dict[str, Any] = {
    "model": str(MODEL),
    "max_model_len": 192,
    "block_size": 4,
    "num_gpu_blocks_override": 48,
    "max_logprobs": 5,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 17,
    "warmup": "lazy",
    "enable_fault_tolerance": True,
}


class EngineProcess:
    def __init__(self, faults: list[dict[str, Any]] | None = None, **fault_tolerance: Any) -> None:
        self.folder = tempfile.mkdtemp()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.input = self.context.socket(zmq.ROUTER)
        self.output = self.context.socket(zmq.PULL)
        addresses = [f"ipc://{self.folder}/{name}" for name in ("in", "out")]
        for socket, address in zip((self.input, self.output), addresses, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
        config = EngineConfig.of(
            **SETTINGS,
            inject_faults=json.dumps(faults) if faults else None,
            fault_tolerance_config=fault_tolerance or None,
        )
        launch = EngineLaunch(config, *addresses, parent_pid=os.getpid(), die_with_parent=True)
        spawn = multiprocessing.get_context("spawn")
        self.process = spawn.Process(target=run_engine, args=(launch,))
        self.process.start()
        self.seen: list[Any] = []
        self.family: set[psutil.Process] = set()
        self._count = 0

    # -- messages ---------------------------------------------------------------------------

    def wait(self, found: Callable[[], Any], seconds: float = 5.0) -> Any:
        """Read messages until `found` gives something."""
        deadline = time.monotonic() + seconds
        while True:
            result = found()
            if result:
                return result
            left = deadline - time.monotonic()
            assert left > 0, f"nothing came in {seconds} s; last: {self.seen[-4:]}"
            if self.output.poll(int(min(left, 0.2) * 1000) + 1):
                kind, payload = self.output.recv_multipart()
                self.seen.append(msgspec.msgpack.decode(payload, type=KINDS[kind]))

    def all(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.seen if isinstance(message, kind)]

    def ready(self) -> None:
        self.wait(lambda: self.all(EngineReady), 120)
        assert self.input.poll(10_000)
        self.input.recv_multipart()  # the hello frame
        self.remember()

    def send(self, kind: bytes, message: Any) -> None:
        self.input.send_multipart([b"\0\0", kind, msgspec.msgpack.encode(message)])

    def add(self, prompt: list[int], tokens: int, **params: Any) -> str:
        self._count += 1
        name = f"r{self._count}"
        self.send(
            wire.ADD,
            Siblings(
                EngineRequest(
                    request_id=name,
                    prompt_token_ids=prompt,
                    params=SamplingParams(
                        temperature=0.0, max_tokens=tokens, ignore_eos=True, **params
                    ),
                    arrival_time=time.time(),
                    eos_token_ids=[2],
                )
            ),
        )
        return name

    def outputs(self, name: str) -> list[EngineOutput]:
        every = [output for message in self.all(EngineOutputs) for output in message.outputs]
        return [output for output in every if output.request_id == name]

    def end(self, name: str, seconds: float = 5.0) -> EngineOutput:
        """The last output of a request, which is its only end."""
        ends = self.wait(
            lambda: [o for o in self.outputs(name) if o.finish_reason is not None], seconds
        )
        assert len(ends) == 1
        return ends[0]

    def complete(self, prompt: list[int], tokens: int) -> list[int]:
        """Greedy ids; it may have to compile."""
        name = self.add(prompt, tokens)
        assert self.end(name, 120).finish_reason == "length"
        return [token for output in self.outputs(name) for token in output.new_token_ids]

    def order(self, instruction: str, seconds: float = 10.0) -> FaultToleranceResult:
        self._count += 1
        name = f"order{self._count}"
        self.send(wire.ORDER, FaultToleranceRequest(name, instruction))
        return self.wait(
            lambda: [r for r in self.all(FaultToleranceResult) if r.request_id == name], seconds
        )[0]

    def call(self, method: str) -> UtilityResult:
        self._count += 1
        number = self._count
        self.send(wire.UTILITY, UtilityCall(number, method))
        return self.wait(lambda: [r for r in self.all(UtilityResult) if r.call_id == number])[0]

    @property
    def status(self) -> RankStatus:
        return self.all(RankStatus)[-1]

    def wait_state(self, state: str, seconds: float = 5.0) -> RankStatus:
        self.wait(lambda: self.all(RankStatus) and self.status.state == state, seconds)
        return self.status

    # -- processes --------------------------------------------------------------------------

    @property
    def worker(self) -> psutil.Process:
        """The engine's only child that runs a worker."""
        self.remember()
        children = psutil.Process(self.process.pid).children()
        [worker] = [p for p in children if p.status() != psutil.STATUS_ZOMBIE]
        return worker

    def remember(self) -> None:
        """Every process seen belongs to the family and must be gone in the end."""
        engine = psutil.Process(self.process.pid)
        self.family |= {engine, *engine.children(recursive=True)}

    def has_worker(self) -> bool:
        self.remember()
        return len(self.family) > 1

    def assert_gone(self, seconds: float = 5.0) -> None:
        self.process.join(seconds)
        _, alive = psutil.wait_procs(self.family, timeout=seconds)
        left = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not left, f"left behind: {left}"

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(5)
        self.input.close()
        self.output.close()
        self.context.term()
        shutil.rmtree(self.folder)
