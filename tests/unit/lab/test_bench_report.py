"""Reports: self-contained pages with figures, ratios and machines."""

from __future__ import annotations

import base64
import json
import pathlib
import re
from html.parser import HTMLParser

import pytest

from jaxengine.lab.bench import report, results
from jaxengine.lab.bench.flatten import direction

pytest.importorskip("matplotlib")
MACHINE = {"name": "a <b>machine</b>", "cores": 2, "versions": {"jax": "1.2.3"}}


def serve_result(scale: float) -> dict[str, object]:
    figures: dict[str, object] = {"completed": 3, "failed": 0, "output_throughput": 100 / scale}
    for metric in ("ttft", "tpot", "itl", "e2el"):
        figures |= {f"{key}_{metric}_ms": 10 * scale for key in ("mean", "std", "p50", "p99")}
    figures["requests"] = [{"error": None, "ttft": 1.0, "tpot": None, "e2el": 2.0}]
    return results.result("serve", {"api_key": "secret", "model": "m"}, MACHINE, figures)


def rows_result(bench: str, scale: float) -> dict[str, object]:
    rows = [{"requests": n, "tokens_per_s": scale * n} for n in (1, 8)]
    return results.result(bench, {"x": float("inf")}, MACHINE, {"rows": rows}, ["requests"])


class Page(HTMLParser):
    """Tags that stay open, and everything that would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page(tmp_path: pathlib.Path) -> None:
    contents = {
        "a.json": serve_result(1),
        "b.json": serve_result(2),
        "c.json": rows_result("throughput", 1),
        "d.json": rows_result("throughput", 3),
        "e.json": results.result("latency", {}, MACHINE, {"avg_latency": 1.5}),
    }
    for name, content in contents.items():
        results.save(tmp_path / name, content)
    out = tmp_path / "new" / "out.html"
    assert report.main([*(str(tmp_path / name) for name in contents), "-o", str(out)]) == 0
    text = out.read_text()
    page = Page(text)
    assert page.open == []
    assert len(page.sources) == 4  # two of the load, one of the rows, one of the single figure
    for source in page.sources:
        kind, _, data = source.partition(",")
        assert kind == "data:image/svg+xml;base64"
        drawn = base64.b64decode(data)
        assert b"<svg" in drawn and drawn.count(b"<path") > 10
    assert "<b>machine</b>" not in text and "secret" not in text and "1.2.3" in text
    assert 'mean_ttft_ms</td><td>10</td><td>20</td><td><span class="worse">2.00' in text
    assert 'output_throughput</td><td>100</td><td>50</td><td><span class="worse">0.50' in text
    assert 'requests=8/tokens_per_s</td><td>8</td><td>24</td><td><span class="better">3.00' in text
    assert not re.search(r"url\(|@import|<script", text)


def test_direction() -> None:
    assert direction("output_throughput") == direction("requests=1/tokens_per_s") == 1
    assert direction("p99_ttft_ms") == direction("start=cold of=engine/first_answer_s") == -1
    assert direction("percentiles/50") == direction("avg_latency") == -1
    assert direction("total_input_tokens") == direction("bytes") == 0


def test_names(tmp_path: pathlib.Path) -> None:
    paths = [tmp_path / "x" / "r.json", tmp_path / "y" / "r.json"]
    for path in paths:
        results.save(path, rows_result("spec", 1))
    out = tmp_path / "o.html"
    argv = [*map(str, paths), "-o", str(out)]
    assert report.main(argv) == 0 and "y/r" in out.read_text()
    assert report.main([*argv, "--names", "before", "after"]) == 0
    assert "before" in out.read_text()
    with pytest.raises(ValueError, match="--names gives 1"):
        report.main([*argv, "--names", "before"])
    with pytest.raises(ValueError, match="same name"):
        report.main([*argv, "--names", "a", "a"])


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[]", "no result"), (json.dumps({}), "no result")]
)
def test_files_that_are_no_results(tmp_path: pathlib.Path, text: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        report.main([str(path)])
    with pytest.raises(ValueError, match="there is no result file"):
        report.main([str(tmp_path / "none.json")])
