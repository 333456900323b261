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

from jaxengine.parallel.mesh import DATA, TENSOR, Devices
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.runner.own_shards import OwnShards
from jaxengine.sched.executor import Batch


def test_same_batches_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core(False)
    try:
        batches, _ = recorded(engine)
        words = -(-engine.facts.spec.vocab_size // 32)

        def mask(batch: Batch) -> Any:
            return np.full((batch.sampler_rows, words), 0x0F0F0F0F, np.int32)

        runner = engine.executor
        assert isinstance(runner, ModelRunner)
        mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), (DATA, TENSOR))
        shards = OwnShards(Devices(mesh), 1)
        masked = [Batch(**{**vars(b), "masked": i % 2 == 0}) for i, b in enumerate(batches)]
        for script in (batches, masked):
            wanted = transcript(runner, script, mask)
            with monkeypatch.context() as patch:
                patch.setattr(runner, "_shards", shards)
                assert_same(wanted, transcript(runner, script, mask))
    finally:
        engine.shutdown()
