"""A runner that fills in its own shards only gives what the plain one gives. One process here:
several are run by tests/faults/test_coupled_ranks.py, which cannot send masks."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from conformance import assert_same, transcript
from jax.sharding import Mesh
from test_conformance import core, recorded

from jaxengine.executor.inline import InlineExecutor
from jaxengine.executor.shards import ShardRunner
from jaxengine.parallel.mesh import DATA, TENSOR, Devices
from jaxengine.sched.executor import Batch


def test_same_batches_same_results() -> None:
    engine = core(False)
    try:
        batches, _ = recorded(engine)
        words = -(-engine.built.spec.vocab_size // 32)

        def mask(batch: Batch) -> Any:
            return np.full((batch.sampler_rows, words), 0x0F0F0F0F, np.int32)

        inline = engine.executor
        assert isinstance(inline, InlineExecutor)
        runner: Any = inline.runner
        mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), (DATA, TENSOR))
        shards = ShardRunner(runner, Devices(mesh), 1)
        own: Any = InlineExecutor(shards, (1,))  # type: ignore[arg-type]
        own.reset = runner.reset
        masked = [Batch(**{**vars(b), "masked": i % 2 == 0}) for i, b in enumerate(batches)]
        for script in (batches, masked):
            assert_same(transcript(inline, script, mask), transcript(own, script, mask))
        with pytest.raises(ValueError, match="replaced together"):
            shards.reset()
        with pytest.raises(ValueError, match="cannot sleep"):
            shards.sleep(1)
    finally:
        engine.shutdown()
