"""The object tier against a service that fails: misses, counted, in bounded time."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator

import numpy as np
import pytest
from s3_server import Bucket, serve_bucket

from jaxengine.offload.keys import make_key, namespace_key
from jaxengine.offload.tiers.object_store import ObjectStore, open_store

PAGE = 4096
SPACE = namespace_key({"model": "test"})


def key_of(i: int) -> bytes:
    return make_key(i.to_bytes(32, "big"), 0)


def page_of(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, PAGE, np.uint8)


def read(store: ObjectStore, count: int) -> list[bool]:
    pages = [np.zeros(PAGE, np.uint8) for _ in range(count)]
    found = store.read([key_of(i) for i in range(count)], pages)
    for i, (there, page) in enumerate(zip(found, pages, strict=True)):
        assert not there or (page == page_of(i)).all()
    return found


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with serve_bucket() as served:
        yield served


def connect(bucket: Bucket) -> ObjectStore:
    options = {
        "aws_endpoint": bucket.url,
        "aws_region": "us-east-1",
        "aws_virtual_hosted_style_request": "false",
        "skip_signature": "true",
        "allow_http": "true",
    }
    return ObjectStore(open_store("s3://bucket/kv", options, timeout=0.5), SPACE)


def test_round_trip_over_s3(bucket: Bucket) -> None:
    store = connect(bucket)
    assert all(store.write(key_of(i), page_of(i)) for i in range(10))
    keys = [key_of(i) for i in range(20)]
    assert store.contains(keys, True) == [True] * 10 + [False] * 10
    assert read(store, 20) == [True] * 10 + [False] * 10
    store.delete(key_of(3))
    assert read(store, 5) == [True, True, True, False, True]
    assert not store.counters.snapshot()
    store.close()


def test_keys_from_the_environment(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/offload.md advises: no secret is in the settings."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEYOFTHETEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    options = {"aws_endpoint": bucket.url, "aws_region": "us-east-1", "allow_http": "true"}
    store = ObjectStore(open_store("s3://bucket/kv", options, timeout=5.0), SPACE)
    assert store.write(key_of(0), page_of(0))
    assert "Credential=KEYOFTHETEST/" in bucket.authorization
    store.close()


def test_errors_and_slowness_are_misses(bucket: Bucket) -> None:
    store = connect(bucket)
    assert store.write(key_of(0), page_of(0))
    for status, delay in [(500, 0.0), (403, 0.0), (0, 2.0)]:
        bucket.status, bucket.delay = status, delay
        before = store.counters.get("object_read_errors")
        began = time.monotonic()
        assert read(store, 1) == [False]
        assert not store.write(key_of(1), page_of(1))
        assert store.contains([key_of(0)], True) == [False]
        assert time.monotonic() - began < 8
        assert store.counters.get("object_read_errors") == before + 1
    assert store.counters.get("object_write_errors") == 3
    assert store.counters.get("object_head_errors") == 3
    bucket.status, bucket.delay = 0, 0.0
    assert read(store, 1) == [True]
    store.close()


def test_damaged_objects_are_deleted(bucket: Bucket) -> None:
    store = connect(bucket)
    for i in range(3):
        store.write(key_of(i), page_of(i))
    paths = sorted(bucket.objects)
    bucket.objects[paths[0]] = bucket.objects[paths[0]][:-5]
    damaged = bytearray(bucket.objects[paths[1]])
    damaged[-100] ^= 4
    bucket.objects[paths[1]] = bytes(damaged)
    assert sorted(read(store, 3)) == [False, False, True]
    assert store.counters.get("object_damaged") == 2 and len(bucket.objects) == 1
    store.close()


def test_a_service_that_is_down_is_a_line_of_each_kind_in_the_log(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    store = connect(bucket)
    bucket.status = 403
    assert read(store, 10) == [False] * 10
    assert not any(store.write(key_of(i), page_of(i)) for i in range(10))
    assert store.counters.get("object_read_errors") == 10
    ours = [record.args for record in caplog.records if record.name.endswith("object_store")]
    assert sorted(str(args[0]) for args in ours if isinstance(args, tuple)) == ["read", "write"]
    store.close()


class Huge:
    """An object that says how big it is, and must not be asked for more."""

    meta = {"size": 2**40}

    def bytes(self) -> bytes:
        raise AssertionError("it was fetched")


def test_an_object_of_another_size_is_not_fetched(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(open_store(tmp_path.as_uri()), SPACE)
    assert store.write(key_of(0), page_of(0))
    with monkeypatch.context() as patch:
        patch.setattr("obstore.get", lambda *args: Huge())
        assert read(store, 1) == [False]
    assert store.counters.snapshot() == {"object_damaged": 1}
    assert store.contains([key_of(0)], True) == [False]  # and it is deleted
    store.close()


def test_local_folder_and_mistakes(tmp_path: pathlib.Path) -> None:
    store = ObjectStore(open_store(tmp_path.as_uri()), SPACE)
    assert store.write(key_of(0), page_of(0)) and read(store, 2) == [True, False]
    store.close()
    with pytest.raises(ValueError, match="object_store_url: cannot open"):
        open_store("what://is/this")
