"""What the runners of several processes have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxengine.sched.batch import Bucket

if TYPE_CHECKING:
    from jaxengine.offload.jobs import Done, OffloadStep
    from jaxengine.runner.model_runner import ModelRunner
    from jaxengine.runner.programs import Programs


class AroundRunner:
    """Around the `ModelRunner` of this process. KV offload is refused when it is opened."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def buckets(self) -> list[Bucket]:
        return self._runner.buckets

    @property
    def programs(self) -> Programs:
        return self._runner.programs

    def transfer(self, steps: Sequence[OffloadStep | None]) -> None:
        raise AssertionError("no transfers were opened")

    def poll_transfers(self) -> list[list[Done]]:
        return []
