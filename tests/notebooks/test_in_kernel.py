"""`LLM` in a Jupyter kernel, where an event loop runs: it works, shows itself, and interrupting the
kernel ends a batch only."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient.exceptions import CellExecutionError
from run_notebook import environment, execute, problems, save

# A core without a model, so that the kernel starts quickly: it answers 7 until max_tokens.
SETUP = """
import asyncio, time
from jaxengine import LLM, SamplingParams
from jaxengine.wire.messages import EngineOutput, EngineReady, EngineStats

class Core:
    live = {}
    def ready(self): return EngineReady(max_model_len=10**6, vocab_size=100, info={"model": "toy"})
    def stats(self): return EngineStats()
    def utility(self, method, args): return {"total": 4, "used": 0, "cached": 1}
    def has_work(self): return bool(self.live)
    def shutdown(self): pass
    def add_request(self, request): self.live[request.request_id] = request.params.max_tokens
    def abort_requests(self, ids): [self.live.pop(i, None) for i in ids]
    def step(self):
        if max(self.live.values()) > 1000:
            print("step", flush=True)
        time.sleep(0.001)
        self.live = {i: n - 1 for i, n in self.live.items()}
        done = [i for i, n in self.live.items() if n == 0]
        ends = {i: "length" for i in done}
        out = [EngineOutput(i, [7], finish_reason=ends.get(i)) for i in self.live]
        self.live = {i: n for i, n in self.live.items() if n}
        return out

asyncio.get_running_loop()
llm = LLM.from_core(Core())
await asyncio.sleep(0)
"""
SHORT = "llm.generate([1, 2], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids"


class Kernel:
    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3", env=environment())

    def messages(self, code: str) -> Iterator[Any]:
        """What a cell puts out, until it has ended."""
        sent = self.client.execute(code)
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != sent:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return
            yield message

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.close()


def results(messages: list[Any]) -> list[dict[str, str]]:
    assert [m["content"]["evalue"] for m in messages if m["msg_type"] == "error"] == []
    return [m["content"]["data"] for m in messages if m["msg_type"] == "execute_result"]


def test_generates_and_shows_itself(kernel: Kernel) -> None:
    assert results(list(kernel.messages(SETUP))) == []
    (said,) = results(list(kernel.messages(SHORT)))
    assert said["text/plain"] == "[7, 7, 7]"
    (shown,) = results(list(kernel.messages("llm")))
    assert "toy" in shown["text/html"] and "1 cached" in shown["text/html"]


def test_interrupting_the_kernel_ends_the_batch_only(kernel: Kernel) -> None:
    interrupted, ended = False, ""
    results(list(kernel.messages(SETUP)))
    long = "llm.generate([1, 2], SamplingParams(max_tokens=10**5), use_tqdm=False)"
    for message in kernel.messages(long):
        if message["msg_type"] == "stream" and not interrupted:  # it runs
            interrupted = True
            kernel.manager.interrupt_kernel()
        if message["msg_type"] == "error":
            ended = message["content"]["ename"]
    assert interrupted and ended == "KeyboardInterrupt"
    assert results(list(kernel.messages("llm._core.live")))[0]["text/plain"] == "{}"
    assert results(list(kernel.messages(SHORT)))[0]["text/plain"] == "[7, 7, 7]"


DRAW = """
import matplotlib.pyplot as plt
plt.bar([1, 2], [3, 4])
plt.show()
"""


def test_a_notebook_runs_and_is_saved(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "drawn.ipynb"
    cells = [nbformat.v4.new_code_cell(DRAW), nbformat.v4.new_code_cell("import os; os.getcwd()")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    notebook = execute(path, tmp_path)
    assert [p for p in problems(notebook) if "names the path" not in p] == []
    notebook.cells[1].outputs = []
    save(path, notebook)
    assert problems(nbformat.read(path, as_version=4)) == []


def test_an_error_in_a_cell_is_noticed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "wrong.ipynb"
    cells = [nbformat.v4.new_code_cell("import jaxengine\njaxengine.NoSuchName")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(CellExecutionError, match="NoSuchName"):
        execute(path, tmp_path)
