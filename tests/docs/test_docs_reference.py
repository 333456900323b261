"""docs/configuration.md and the tables of docs/migration.md are what the code would write."""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib

import pytest
from pages import ROOT, read

from jaxengine.cli import reference
from jaxengine.config import PARTS
from jaxengine.settings.flags import flag

STALE = "run `python -m jaxengine.cli.reference` and commit what it wrote"


def test_pages_are_fresh() -> None:
    made = reference.made_pages(ROOT / "docs")
    assert {page.name for page in made} == {"configuration.md", "migration.md", "models.md"}
    assert [page.name for page, text in made.items() if page.read_text("utf-8") != text] == [], (
        STALE
    )


def test_every_field_has_a_row_and_a_meaning() -> None:
    page = reference.configuration()
    fields = [field for kind in PARTS.values() for field in dataclasses.fields(kind)]
    assert len(fields) > 80
    for field in fields:
        (row,) = (
            line for line in page.splitlines() if line.startswith(f"| `{flag(field.name)}` |")
        )
        assert row.endswith(". |"), f"the text of {field.name} is no sentence"


def test_a_changed_field_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**reference._ENVIRONMENT, "NEW_VARIABLE": "What it does."}
    monkeypatch.setattr(reference, "_ENVIRONMENT", changed)
    assert read("docs/configuration.md") != reference.configuration()


def test_every_page_is_in_the_index() -> None:
    index = read("docs/README.md")
    pages = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert [name for name in pages if f"]({name})" not in index] == []
    assert "](docs/README.md)" in read("README.md")


def test_every_extra_is_on_the_install_page() -> None:
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    page = read("docs/install.md")
    assert [name for name in extras if f"`{name}`" not in page and f"[{name}]" not in page] == []


def test_environment_is_of_the_code() -> None:
    """Each variable is read by the code, or said to be a library's."""
    code = "\n".join(p.read_text() for p in (ROOT / "jaxengine").rglob("*.py"))
    for name, text in reference._ENVIRONMENT.items():
        assert f'"{name}"' in code.replace(f'"{name}":', "") or "library" in text, name


def test_mistakes_of_the_generator(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reference.main() == 1
    assert "run this in the root of a checkout" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'renamed' once"):
        reference.with_tables("no marks", reference.migration_tables())


def test_it_writes_the_pages(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    marks = "<!-- begin {0} -->\nold\n<!-- end {0} -->\n"
    (docs / "migration.md").write_text("".join(map(marks.format, reference.migration_tables())))
    (docs / "models.md").write_text(marks.format("families"))
    monkeypatch.chdir(tmp_path)
    assert reference.main() == 0
    assert "| `--enable-lora` |" in (docs / "migration.md").read_text()
    assert "| gpt_oss | GptOssForCausalLM |" in (docs / "models.md").read_text()
    assert (docs / "configuration.md").read_text() == reference.configuration()
