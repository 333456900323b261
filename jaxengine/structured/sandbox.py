"""Child processes that prove a grammar harmless before it is built beside the engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from jaxengine.structured.spec import Spec

_SCRIPT = Path(__file__).with_name("probe.py")


class GrammarError(ValueError):
    """A constraint that cannot be enforced: the request is at fault (HTTP 400)."""


class GrammarTooComplexError(GrammarError):
    """Building the grammar took too long or too much memory."""


class Sandbox:
    """Builds one grammar at a time in each of its child processes. Thread-safe.

    A child is started when none is idle, so there are as many as threads that call. It ends
    itself when a build exceeds `seconds`, and with its parent.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._idle: list[subprocess.Popen[str]] = []
        self._closed = False
        self._finalizer = weakref.finalize(self, _end_all, self._idle)

    def build(self, spec: Spec) -> str:
        """The grammar in the library's form. Raises GrammarError with one sentence."""
        request = {"kind": spec.kind, "text": spec.text, "seconds": self._seconds}
        line = json.dumps(request) + "\n"
        child = self._take_idle()
        reply, code = ("", 0) if child is None else self._reply(child, line)
        if not reply and code != -signal.SIGALRM:
            # None was idle, or it was killed while nobody looked, for memory of others say.
            reply, code = self._reply(_start(), line)
        if not reply:
            late = code == -signal.SIGALRM
            why = f"took longer than {self._seconds:g} s to check" if late else "needs too much"
            raise GrammarTooComplexError(f"{spec.field} is too complex: it {why}")
        answer = json.loads(reply)
        if "error" in answer:
            raise GrammarError(
                f"{spec.field} cannot be enforced: {first_sentence(answer['error'])}"
            )
        grammar: str = answer["grammar"]
        return grammar

    def close(self) -> None:
        """End the idle children; busy ones end after their build."""
        with self._lock:
            self._closed = True
        self._finalizer()

    def _take_idle(self) -> subprocess.Popen[str] | None:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.poll() is None:
                    return child
                _close(child)
        return None

    def _reply(self, child: subprocess.Popen[str], line: str) -> tuple[str, int]:
        """Its reply; or "" and its exit status when it ended before."""
        reply = _ask(child, line)
        if reply:
            self._give(child)
            return reply, 0
        code = child.wait()
        _close(child)
        return "", code

    def _give(self, child: subprocess.Popen[str]) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        _end_all([child])


def _start() -> subprocess.Popen[str]:
    # -P: the script's folder is no place to import from
    return subprocess.Popen(
        [sys.executable, "-P", str(_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # panics of the library; the reply tells of them
        text=True,
        encoding="utf-8",
        env={**os.environ, "RUST_BACKTRACE": "0"},
        start_new_session=True,  # Ctrl-C is for the parent
    )


def first_sentence(error: str) -> str:
    """The library's message without its quotes of the grammar."""
    if error.startswith("panic"):
        return "it is too large"
    lines = [line.strip() for line in error.splitlines()]
    kept = [line for line in lines if line and not line.startswith(("<", "^", "|"))]
    reason = next((line for line in kept if line.startswith("error:")), None)
    text = reason.removeprefix("error:").strip() if reason else (kept or ["unknown reason"])[0]
    return text if len(text) <= 300 else text[:297] + "..."


def _ask(child: subprocess.Popen[str], line: str) -> str:
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(line)
        child.stdin.flush()
        return child.stdout.readline()
    except BrokenPipeError:  # it ended before it read everything
        return ""


def _close(child: subprocess.Popen[str]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:  # unsent data of a child that is gone
                continue


def _end_all(children: list[subprocess.Popen[str]]) -> None:
    while children:
        child = children.pop()
        child.kill()
        child.wait()
        _close(child)
