"""docs/configuration.md from the config dataclasses, and the tables of other pages.

`python -m jaxengine.cli.reference` writes them into the folder docs of the current folder.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxengine.config import PARTS
from jaxengine.settings.flags import Options, flag
from jaxengine.vllm_names import FLAGS, Status

_HEAD = """\
# Configuration

<!-- made by `python -m jaxengine.cli.reference` from jaxengine/config.py; edit the fields there -->

Every setting has three names, made from one field: a flag of `jaxengine serve` and
`jaxengine run-batch`, a key of a YAML file, and a keyword of `LLM(...)` and `EngineConfig.of(...)`.
The keyword has underscores; flag and key take either.

| where | how `max_num_seqs` is written |
|---|---|
| command line | `--max-num-seqs 32` |
| YAML, read with `--config FILE` | `max-num-seqs: 32` |
| Python | `LLM(model="demo", max_num_seqs=32)` |

The command line wins over the file. `model` is the first argument of the command line, or
`--model`. A switch that is on is turned off with `--no-NAME` (or `--NAME false`). A setting marked
JSON takes a string of JSON on the command line and an object in YAML and Python. A value out of
range ends the start with one sentence that names the flag. `max-model-len`,
`max-num-batched-tokens` and `kv-cache-memory-bytes` take units on the command line and in YAML:
`32k` is 32,000, `32K` 32,768 (and m, g, t, M, G, T); `25.6k` is 25,600. `configs/` has files for
common cases:

```sh
jaxengine serve --config configs/laptop.yaml
```

An empty default means: worked out from the model or the device, or off, as the last column says.
"""

_ENVIRONMENT = {
    "JAX_PLATFORMS": "`cpu` or `cuda`: what JAX runs on. Unset, JAX takes the best that it finds.",
    "CUDA_VISIBLE_DEVICES": "The GPUs that are used.",
    "XLA_FLAGS": "Flags of XLA. What the engine sets itself (see [kernels](kernels.md)) is added "
    "only where yours say nothing.",
    "XDG_CACHE_HOME": "Compiled programs are kept below it; default `~/.cache`.",
    "JAXENGINE_MALLOC": "`off` leaves the C library's allocator as it is (it matters on CPU).",
    "JAXENGINE_PROGRESS": "`off`: no progress bars, as with `--log-level warning`.",
    "OPENAI_API_KEY": "The key that `jaxengine bench serve` sends.",
    "OTEL_SERVICE_NAME": "The name of the service in traces.",
    "HF_TOKEN": "Read by the library huggingface-hub: the key for gated models on the hub.",
    "HF_HUB_OFFLINE": "Read by the library huggingface-hub: `1` takes models from its cache only.",
}


def field_help(kind: type) -> dict[str, str]:
    """The string under every field of a dataclass, on one line."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def type_name(hint: Any) -> str:
    """How a user would say the type: `int`, `a | b`, `JSON`, `switch`."""
    if hint is bool:
        return "switch"
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(str(value) for value in args)
    if origin in (Union, types.UnionType):
        kinds = [arg for arg in args if arg is not type(None)]
        if any(get_origin(arg) is dict for arg in kinds):
            return "JSON"
        return " | ".join(type_name(arg) for arg in kinds)
    if origin is list:
        return f"list of {type_name(args[0])}"
    return {str: "text", int: "int", float: "number"}[hint]


def default_text(field: dataclasses.Field[Any]) -> str:
    """The default as it would be written on the command line; empty for None and no text."""
    value = field.default
    if value is dataclasses.MISSING:
        assert field.default_factory is not dataclasses.MISSING
        value = " ".join(field.default_factory())
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def configuration() -> str:
    """The page docs/configuration.md."""
    groups = {
        name: hint.__metadata__[0].group[0]
        for name, hint in get_type_hints(Options, include_extras=True).items()
    }
    pages = [_HEAD]
    for name, kind in PARTS.items():
        hints, texts = get_type_hints(kind), field_help(kind)
        rows = [
            f"\n## {_title(groups[name])}\n",
            "| flag | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for field in dataclasses.fields(kind):
            cells = (
                f"`{flag(field.name)}`",
                type_name(hints[field.name]),
                default_text(field),
                texts[field.name],
            )
            rows.append("| " + " | ".join(_cell(text) for text in cells) + " |")
        pages.append("\n".join(rows) + "\n")
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in _ENVIRONMENT.items()]
    pages.append("\n## Environment\n\n| variable | meaning |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "".join(pages)


def migration_tables() -> dict[str, str]:
    """The flags of vLLM that have another name here, are not needed, or are refused."""
    tables: dict[str, str] = {}
    statuses: tuple[Status, ...] = ("renamed", "not needed", "refused")
    heads = {"renamed": "here", "not needed": "why", "refused": "why"}
    for status in statuses:
        rows = [f"| vLLM | {heads[status]} |", "|---|---|"]
        for one in FLAGS:
            if one.status == status:
                text = f"`{one.ours}`" if status == "renamed" else one.reason
                rows.append(f"| `{one.name}` | {_cell(text)} |")
        tables[status] = "\n".join(rows) + "\n"
    return tables


def family_table() -> dict[str, str]:
    """The model families, how they are tested and their limits."""
    from jaxengine.cli.models import rows

    lines = ["| family | architecture | weights | tested by | limits |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(_cell(text) for text in row) + " |" for row in rows()]
    return {"families": "\n".join(lines) + "\n"}


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """The page with the tables between its marks `<!-- begin NAME -->` and `<!-- end NAME -->`
    made anew. Raises ValueError when a mark is missing."""
    for name, table in tables.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        between = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        around = between.split(page)
        if len(around) != 2:
            raise ValueError(f"the page must have the marks of the table {name!r} once")
        page = f"{begin}\n{table}\n{end}".join(around)
    return page


def made_pages(docs: Path) -> dict[Path, str]:
    """What each page that is made, or has tables that are, must hold."""
    made = {docs / "configuration.md": configuration()}
    for name, tables in (("migration.md", migration_tables()), ("models.md", family_table())):
        page = docs / name
        made[page] = with_tables(page.read_text(encoding="utf-8"), tables)
    return made


def _title(group: Any) -> str:
    return str(getattr(group, "name", group))


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def main() -> int:
    """Write the pages. Exit code 1 outside of a checkout."""
    docs = Path("docs")
    if not (docs / "migration.md").is_file():
        print("run this in the root of a checkout: there is no docs/migration.md", file=sys.stderr)
        return 1
    for page, text in made_pages(docs).items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
