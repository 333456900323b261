"""jaxengine kv ls|du|verify|gc, on a folder and on an object store."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest

from jaxengine.cli.kv import run_kv
from jaxengine.offload.keys import make_key, namespace_key
from jaxengine.offload.tiers.fs import FsStore
from jaxengine.offload.tiers.object_store import ObjectStore, open_store

SPACE = namespace_key({"model": "test"})


@pytest.mark.parametrize("kind", ["folder", "object"])
def test_look_after_a_tier(
    kind: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store: Any = (
        FsStore(tmp_path, SPACE, 10**6)
        if kind == "folder"
        else ObjectStore(open_store(tmp_path.as_uri()), SPACE)
    )
    for i in range(4):
        store.write(make_key(i.to_bytes(32, "big"), i % 2), np.full(500, i, np.uint8))
    store.close()
    target = str(tmp_path) if kind == "folder" else tmp_path.as_uri()

    def run(action: str, **more: Any) -> tuple[int, list[Any]]:
        code = run_kv(action, target, as_json=True, **more)
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    _, rows = run("ls")
    assert sorted(row["group"] for row in rows) == [0, 0, 1, 1]
    size = rows[0]["size"]
    assert run("du")[1] == [{"namespace": SPACE.hex(), "blocks": 4, "bytes": 4 * size}]
    assert run("verify") == (0, [{"whole": 4, "damaged": [], "deleted": False}])
    files = sorted(tmp_path.rglob("*.kv"))
    for age, path in enumerate(files):
        os.utime(path, (age + 1, age + 1))
    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(data)
    files[1].write_bytes(files[2].read_bytes())  # whole, but not what its name says
    code, rows = run("verify")
    assert code == 1 and len(rows[0]["damaged"]) == 2
    assert run("verify", delete=True)[0] == 0
    assert run("verify")[1][0]["whole"] == 2
    assert run("gc", max_bytes=size)[1] == [{"deleted": 1, "bytes": size}]
    assert len(list(tmp_path.rglob("*.kv"))) == 1
    for action in ("ls", "du", "verify"):
        assert run_kv(action, target) == 0
    assert "1 blocks are whole, 0 damaged" in capsys.readouterr().out


def test_mistakes(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="must be one of ls, du, verify, gc"):
        run_kv("rm", str(tmp_path))
    with pytest.raises(ValueError, match="--max-bytes"):
        run_kv("gc", str(tmp_path))
    with pytest.raises(ValueError, match="there is no folder"):
        run_kv("ls", str(tmp_path / "none"))
