"""The chat page, in a real browser before real servers."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import pytest
import tiny_model
from browser import Page, browser
from serverlib import call, eventually, metric, running

from jaxengine.wire.frames import DEFAULT_CORE

ANSWER = "document.querySelector('.turn.assistant:last-child .body')?.innerText || ''"
IDLE = "document.getElementById('stop').hidden"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as made:
        yield made


def _picture(page: Page, name: str) -> None:
    """For a person to look at, where PICTURES names a folder."""
    if folder := os.environ.get("PICTURES"):
        page.picture(pathlib.Path(folder) / f"{name}.png")


def test_the_page_needs_no_key_and_nothing_from_elsewhere() -> None:
    with running("--api-key", "s3cret", "--root-path", "/llm") as up:
        status, text, headers = call(up.url.removesuffix("/llm"), "/")
        assert status == 200 and headers["content-type"].startswith("text/html")
        assert "script-src 'sha256-" in headers["content-security-policy"]
        outside = text.replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in outside and "https:" not in outside and 'src="' not in outside
        assert call(up.url, "/v1/models")[0] == 401


def test_talk_to_a_real_engine(page: Page, tmp_path: pathlib.Path) -> None:
    """Load, send, see text, set a parameter, reload: the conversation is still there."""
    model = tiny_model.build(tmp_path / "tiny")
    flags = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256"]
    flags += ["--num-gpu-blocks-override", "24", "--warmup", "lazy", "--served-model-name", "tiny"]
    with running(model, *flags, core=DEFAULT_CORE) as up:
        page.go(up.url + "/")
        page.until("document.getElementById('model').value === 'tiny'")
        page.js(
            "const t = document.getElementById('max_tokens'); t.value = 48;"
            "t.dispatchEvent(new Event('input'))"
        )
        page.write("#system", "Be brief.")
        page.write("#text", "Hello there")
        page.key("Enter", 13)
        page.until(f"{IDLE} && ({ANSWER}).length > 0 || !document.getElementById('error').hidden")
        assert page.js("document.getElementById('error').hidden")
        text = page.js(ANSWER)
        stats = page.js("document.querySelector('.turn.assistant .stats').innerText")
        assert "tokens/s" in stats and "first after" in stats
        assert metric(up.url, "request_params_max_tokens_sum") == 48
        stored = page.js("JSON.parse(localStorage.getItem('jaxengine.talks'))")
        assert stored[0]["system"] == "Be brief." and stored[0]["turns"][0]["content"]
        _picture(page, "answer")
        page.send("Page.reload")
        page.until(f"document.readyState === 'complete' && ({ANSWER}).length > 0")
        assert page.js(ANSWER) == text
        assert "Hello there" in page.js("document.getElementById('talks').innerText")
        page.click("#new")
        assert page.js("document.querySelectorAll('#talks li').length") == 2
        assert page.js("document.querySelectorAll('.turn').length") == 0
        assert page.problems == []


def test_streams_stops_and_asks_for_the_key(page: Page) -> None:
    """Text comes while the answer runs; Stop ends the request in the engine as well."""
    with running("--api-key", "s3cret", step=0.02) as up:
        key = {"Authorization": "Bearer s3cret"}
        page.go(up.url + "/")
        page.until("document.getElementById('error').innerText.includes('API key is needed')")
        page.write("#key", "s3cret")
        page.key("Enter", 13)
        page.until("document.getElementById('model').value === 'demo'")
        page.write("#text", "Count `up` please")
        page.click("#send")
        page.until(f"!{IDLE} && ({ANSWER}).length > 10")
        early = page.js(ANSWER)
        page.until(f"({ANSWER}).length > {len(early) + 20}")  # it grows
        _picture(page, "running")
        page.click("#stop")
        page.until(IDLE)
        text, turns = page.js(ANSWER), page.js("document.querySelectorAll('.turn').length")
        assert text.startswith(early[:10]) and turns == 2
        assert "stopped" in page.js("document.querySelector('.turn.assistant .stats').innerText")

        def aborted() -> bool:
            _, exposed, _ = call(up.url, "/metrics", headers=key)
            return 'request_success_total{engine="0",finished_reason="abort",' in exposed and (
                _value(exposed, 'finished_reason="abort"') == 1
            )

        eventually(aborted)
        page.click(".again")
        page.until(f"!{IDLE} && ({ANSWER}).length > 10")
        page.key("Escape", 27)
        page.until(IDLE)
        assert page.js("document.querySelectorAll('.turn').length") == 2
        _narrow_and_dark(page)
        assert page.problems == []


def _value(exposed: str, label: str) -> float:
    lines = [x for x in exposed.splitlines() if "request_success_total{" in x and label in x]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _narrow_and_dark(page: Page) -> None:
    """On a telephone the page has no sideways scroll bar; every control has a name; colours follow
    the system, with contrast enough to read."""
    page.send(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    page.send("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1,
              mobile=True)  # fmt: skip
    page.send("Page.reload")
    page.until("document.readyState === 'complete' && document.querySelectorAll('.turn').length")
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    background, ink = page.js(
        "['backgroundColor', 'color'].map((n) => getComputedStyle(document.body)[n]"
        ".match(/\\d+/g).map(Number))"
    )
    assert sum(background) < 150 and sum(ink) > 600
    _picture(page, "narrow-dark")
    nameless = page.js(
        "[...document.querySelectorAll('button, input, select, textarea')].filter((e) =>"
        " !(e.textContent.trim() && e.tagName === 'BUTTON') && !e.ariaLabel && !e.labels?.length)"
        ".map((e) => e.id || e.outerHTML)"
    )
    assert nameless == []
