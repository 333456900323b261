"""Servers with several ranks that start, end, or serve some of the ranks only."""

from __future__ import annotations

import contextlib
import http.client
import threading

import psutil
import pytest
from dp_servers import LONG, rank_processes
from serverlib import call, chunks, eventually, metric, running, spawn

C = "/v1/completions"


def test_one_death_ends_the_server_without_fault_tolerance() -> None:
    """B46; B45: and nothing stays."""
    with running("--data-parallel-size", "2", "--shutdown-timeout", "1", step=0.02) as up:
        family = up.family()
        assert call(up.url, "/fault_tolerance/status")[0] == 404
        rank_processes(up)[1].kill()
        eventually(lambda: call(up.url, "/health")[0] == 503, 2)
        assert up.process.wait(15) == 1
        _, left = psutil.wait_procs(family, timeout=5)
        assert not left
        assert any("data-parallel rank 1" in line for line in up.lines)


def test_kill_9_of_the_front_leaves_no_rank() -> None:
    """B45, under load."""
    with running("--data-parallel-size", "2", "--enable-fault-tolerance", step=0.02) as up:
        family = up.family()
        thread = threading.Thread(target=_ignore_errors, args=(up.url,))
        thread.start()
        eventually(lambda: metric(up.url, "num_requests_running") == 1)
        up.process.kill()
        _, left = psutil.wait_procs(family, timeout=5)
        assert not left
        thread.join(5)


def _ignore_errors(url: str) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        chunks(url, C, LONG)


@pytest.mark.slow
def test_external_and_hybrid_modes() -> None:
    """A server for rank 1 of 3, and one for ranks 1 and 2: each refuses what is not its own."""
    size = ("--data-parallel-size", "3", "--enable-fault-tolerance")
    external = ("--data-parallel-rank", "1", "--data-parallel-external-lb")
    hybrid = (
        "--data-parallel-hybrid-lb",
        "--data-parallel-size-local",
        "2",
        "--data-parallel-start-rank",
        "1",
    )
    for mode, ranks in ((external, [1]), (hybrid, [1, 2])):
        with running(*size, *mode) as up:
            entries = call(up.url, "/fault_tolerance/status")[1]["engines"]
            assert [entry["id"] for entry in entries] == ranks
            for rank in range(3):
                body = {"prompt": "hi", "max_tokens": 2, "data_parallel_rank": rank}
                assert call(up.url, C, body)[0] == (200 if rank in ranks else 400)
            text = call(up.url, "/metrics")[1]
            assert 'engine="1"' in text and 'engine="0"' not in text
            psutil.Process(rank_processes(up)[1].pid).kill()
            eventually(lambda: call(up.url, "/health")[0] == (503 if ranks == [1] else 200), 2)  # noqa: B023
            order = {"instruction": "respawn", "params": {"rank": 1}}
            assert call(up.url, "/fault_tolerance/apply", order)[0] == 202
            eventually(lambda: call(up.url, "/health")[1] == {"status": "ok"}, 30)  # noqa: B023


def test_a_rank_that_cannot_start_is_shown() -> None:
    process = spawn("--data-parallel-size", "2", core="faulty_cores:StartFails")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "data-parallel rank" in text and "no device was found" in text
    assert "Traceback" in text
