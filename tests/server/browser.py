"""Chromium without a window, driven by the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import pathlib
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest


def chromium() -> str:
    """The browser's path; skips the test where there is none."""
    pytest.importorskip("websockets", reason="the package websockets drives the browser")
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium is installed (apt-get install chromium)")


class Page:
    """One tab."""

    def __init__(self, url: str) -> None:
        from websockets.sync.client import connect

        self._socket = connect(url, max_size=None)
        self._next = 0
        self.problems: list[str] = []  # exceptions of scripts, and what the policy refused
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        self._next += 1
        self._socket.send(json.dumps({"id": self._next, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=30))
            if message.get("id") == self._next:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        if message["method"] == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(message["params"]["exceptionDetails"]))
        entry = message.get("params", {}).get("entry", {})
        if message["method"] == "Log.entryAdded" and entry["source"] != "network":
            self.problems.append(entry["text"])

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 20) -> Any:
        """Wait until the expression is true; its value."""
        end = time.monotonic() + seconds
        while not (value := self.js(expression)):
            assert time.monotonic() < end, (expression, self.js("document.body.innerText"))
            time.sleep(0.05)
        return value

    def go(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def write(self, selector: str, text: str) -> None:
        """Type into a field, as a keyboard would."""
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def key(self, name: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, **text
            )

    def click(self, selector: str) -> None:
        """Press the middle of an element, which must be what is seen there."""
        spot = self.js(
            f"""(() => {{
                const e = document.querySelector({json.dumps(selector)});
                e.scrollIntoView({{block: "nearest"}});
                const r = e.getBoundingClientRect();
                const x = r.x + r.width / 2, y = r.y + r.height / 2;
                return e.contains(document.elementFromPoint(x, y)) ? [x, y] : null;
            }})()"""
        )
        assert spot, f"{selector} cannot be clicked"
        for kind in ("mousePressed", "mouseReleased"):
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=spot[0],
                y=spot[1],
                button="left",
                clickCount=1,
            )

    def picture(self, path: pathlib.Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A fresh browser with one tab."""
    folder = tempfile.mkdtemp(prefix="chromium-")
    command = [
        chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-sync", "--no-first-run",
        "--window-size=1280,800", "--remote-debugging-port=0", f"--user-data-dir={folder}",
        "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Page(_tab(pathlib.Path(folder) / "DevToolsActivePort", process))
    finally:
        process.terminate()
        process.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def _tab(port_file: pathlib.Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, "the browser did not start"
        if port_file.exists() and (lines := port_file.read_text().splitlines()):
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                tabs = json.load(answer)
            found = [tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"]
            if found:
                return str(found[0])
        time.sleep(0.1)
    raise AssertionError("the browser has no tab")
