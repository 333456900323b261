"""`jaxengine kv ls|du|verify|gc`: look after what the fs and object tiers hold."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from jaxengine.offload.keys import group_of
from jaxengine.offload.tiers.fs_folder import stored_files
from jaxengine.offload.tiers.page_file import PageError, parse_whole

ACTIONS = ("ls", "du", "verify", "gc")


class Entry(NamedTuple):
    """A stored block. `name` is its path below the root; `used` in seconds since the epoch."""

    name: str
    size: int
    used: float


class Folder:
    """The fs tier."""

    def __init__(self, root: pathlib.Path) -> None:
        if not root.is_dir():
            raise ValueError(f"there is no folder {root}")
        self.root = root

    def entries(self) -> Iterator[Entry]:
        for path, size, used in stored_files(self.root):
            yield Entry(path.relative_to(self.root).as_posix(), size, used)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)


class Objects:
    """The object tier."""

    def __init__(self, url: str, options: dict[str, str]) -> None:
        from jaxengine.offload.tiers.object_store import open_store

        self._store = open_store(url, options)

    def entries(self) -> Iterator[Entry]:
        for page in self._store.list():
            for item in page:
                if item["path"].endswith(".kv"):
                    yield Entry(item["path"], item["size"], item["last_modified"].timestamp())

    def read(self, name: str) -> bytes:
        return bytes(self._store.get(name).bytes())

    def delete(self, name: str) -> None:
        self._store.delete(name)


def run_kv(
    action: str,
    target: str,
    *,
    max_bytes: int | None = None,
    options: str = "{}",
    delete: bool = False,
    as_json: bool = False,
) -> int:
    """Returns the exit code: 1 when verify found damage that it did not delete.

    target: folder, or URL of an object store, whose `options` are a JSON object. max_bytes: for
    gc, what may stay; the least recently used blocks go. delete: verify deletes damaged blocks.
    Raises ValueError for arguments that make no sense.
    """
    if action not in ACTIONS:
        raise ValueError(f"kv: the action must be one of {', '.join(ACTIONS)}, got {action!r}")
    if action == "gc" and (max_bytes is None or max_bytes < 0):
        raise ValueError("kv gc: --max-bytes says how many bytes may stay, at least 0")
    store = (
        Objects(target, json.loads(options)) if "://" in target else Folder(pathlib.Path(target))
    )
    if action == "ls":
        return _list(store, as_json)
    if action == "du":
        return _usage(store, as_json)
    if action == "verify":
        return _verify(store, delete, as_json)
    assert max_bytes is not None
    return _collect(store, max_bytes, as_json)


def _list(store: Folder | Objects, as_json: bool) -> int:
    for entry in sorted(store.entries()):
        key = bytes.fromhex(pathlib.PurePosixPath(entry.name).stem)
        namespace = entry.name.split("/")[0]
        if as_json:
            fields = {"namespace": namespace, "group": group_of(key), **entry._asdict()}
            print(json.dumps(fields))
        else:
            print(f"{namespace[:12]}  group {group_of(key)}  {entry.size:>10}  {key[:-4].hex()}")
    return 0


def _usage(store: Folder | Objects, as_json: bool) -> int:
    blocks: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for entry in store.entries():
        namespace = entry.name.split("/")[0]
        blocks[namespace] = blocks.get(namespace, 0) + 1
        sizes[namespace] = sizes.get(namespace, 0) + entry.size
    for namespace, size in sorted(sizes.items()):
        if as_json:
            fields = {"namespace": namespace, "blocks": blocks[namespace], "bytes": size}
            print(json.dumps(fields))
        else:
            print(f"{namespace}  {blocks[namespace]} blocks  {size / 2**20:.1f} MiB")
    if not as_json:
        print(f"total: {sum(blocks.values())} blocks, {sum(sizes.values()) / 2**20:.1f} MiB")
    return 0


def _verify(store: Folder | Objects, delete: bool, as_json: bool) -> int:
    whole = 0
    damaged: list[str] = []
    for entry in store.entries():
        try:
            namespace, key = parse_whole(store.read(entry.name))
            parts = pathlib.PurePosixPath(entry.name)
            if (namespace.hex(), key.hex()) != (parts.parts[0], parts.stem):
                raise PageError("it is not the block that its name says")
            whole += 1
        except FileNotFoundError:
            continue  # an engine deleted it meanwhile
        except (PageError, OSError) as error:
            damaged.append(entry.name)
            if not as_json:
                print(f"{entry.name}: {error}")
            if delete:
                store.delete(entry.name)
    if as_json:
        print(json.dumps({"whole": whole, "damaged": damaged, "deleted": delete}))
    else:
        print(f"{whole} blocks are whole, {len(damaged)} damaged{' and deleted' if delete else ''}")
    return 1 if damaged and not delete else 0


def _collect(store: Folder | Objects, max_bytes: int, as_json: bool) -> int:
    entries = sorted(store.entries(), key=lambda entry: entry.used)
    left = sum(entry.size for entry in entries)
    deleted = 0
    for entry in entries:
        if left <= max_bytes:
            break
        store.delete(entry.name)
        left -= entry.size
        deleted += 1
    if as_json:
        print(json.dumps({"deleted": deleted, "bytes": left}))
    else:
        print(f"{deleted} blocks deleted, {left / 2**20:.1f} MiB left")
    return 0
