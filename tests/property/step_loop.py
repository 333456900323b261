"""The engine's step loop in small, over the fake device."""

from __future__ import annotations

from collections import deque

from fake_device import FakeDevice, oracle

from jaxengine.sched.config import SchedulerSizes
from jaxengine.sched.plan import StepPlan, StepResult
from jaxengine.sched.request import Request
from jaxengine.sched.scheduler import Scheduler


class Engine:
    """Runs plans at the given pipeline depth and keeps what a client would have seen.

    Every token and every end is checked: first indices are gapless, nothing comes after the end.
    """

    def __init__(self, cfg: SchedulerSizes, depth: int) -> None:
        self.config = cfg
        self.scheduler = Scheduler(cfg)
        self.device = FakeDevice(cfg, self.scheduler.block_tables)
        self.depth = depth
        self.flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: dict[str, Request] = {}
        self.seen: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.steps = 0

    def add(self, name: str, tokens: list[int], max_tokens: int, **more: object) -> Request:
        request = Request(name, tokens, max_tokens=max_tokens, **more)  # type: ignore[arg-type]
        self.scheduler.add(request)
        self.requests[name] = request
        self.seen[name] = []
        return request

    def submit(self) -> bool:
        """Plan one step and give it to the device, if the pipeline has room."""
        if len(self.flight) >= self.depth or not self.scheduler.has_work():
            return False
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is None:
            return False
        self.steps += 1
        self.flight.append((plan, self.device.run(plan)))
        return True

    def take(self) -> bool:
        """Take in the oldest result, if there is one."""
        if not self.flight:
            return False
        for update in self.scheduler.update(*self.flight.popleft()):
            name = update.request.request_id
            assert name not in self.reasons, f"{name}: output after its end"
            assert update.first == len(self.seen[name])
            assert update.new_token_ids or update.finish_reason
            self.seen[name] += update.new_token_ids
            if update.finish_reason:
                self.reasons[name] = update.finish_reason
        self.scheduler.check_integrity()
        return True

    def step(self) -> None:
        if not (self.submit() and len(self.flight) < self.depth):
            self.take()

    def abort(self, names: list[str] | None) -> None:
        for request in self.scheduler.abort(names):
            self.reasons[request.request_id] = "abort"
        self.scheduler.check_integrity()

    def fault(self, kv_lost: bool) -> None:
        """Everything in flight is lost."""
        for plan, _ in self.flight:
            self.device.lose(plan)
        self.flight.clear()
        if kv_lost:
            self.device.reset()
        for request in self.scheduler.on_fault(kv_lost):
            self.reasons[request.request_id] = "abort"
        self.scheduler.check_integrity()

    def run(self) -> None:
        """Until all is done. Fails when there is no progress."""
        idle = 0
        while self.scheduler.has_work() or self.flight:
            idle = 0 if self.submit() or self.take() else idle + 1
            assert idle < 3, f"stuck with {self.scheduler.state.requests}"
            if len(self.flight) == self.depth:
                self.take()
        self.scheduler.check_integrity()
        assert self.scheduler.kv_usage == 0

    def check_outputs(self) -> None:
        """Ended requests saw exactly the model's tokens; aborted ones a beginning of them."""
        windows = [group.window for group in self.config.groups]
        for name, request in self.requests.items():
            count = request.stop_length - request.num_prompt_tokens
            prompt = request.token_ids[: request.num_prompt_tokens].tolist()
            ends = {*request.eos_token_ids, *request.stop_token_ids}
            want = oracle(prompt, count, windows, ends)
            reason = self.reasons.get(name)
            if reason in ("stop", "length"):
                assert self.seen[name] == want, name
                stopped = bool(want) and want[-1] in ends
                assert reason == ("stop" if stopped else "length"), name
            else:
                assert self.seen[name] == want[: len(self.seen[name])], name
