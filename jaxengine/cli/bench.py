"""The bench command: hands over to `jaxengine.lab.bench.NAME.main(argv)`."""

from __future__ import annotations

import importlib
import sys

from jaxengine.lab.bench.benches import BENCHES


def run_bench(words: list[str]) -> int:
    """Run the bench named by the first word; its own flags follow. Raises ValueError."""
    if not words or words[0] in ("-h", "--help"):
        print("usage: jaxengine bench NAME [FLAGS]; NAME is one of")
        for name, text in BENCHES.items():
            print(f"  {name:<12}{text}")
        return 0 if words else 2
    name, *rest = words
    if name not in BENCHES:
        raise ValueError(f"there is no bench {name!r}; there are {', '.join(BENCHES)}")
    module = f"jaxengine.lab.bench.{name}"
    try:
        bench = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        print(f"jaxengine: bench {name} is not part of this installation", file=sys.stderr)
        return 1
    code = bench.main(rest)
    return code if isinstance(code, int) else 0
