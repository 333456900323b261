"""Blocks as objects in S3, GCS, Azure or a local folder, through obstore."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np

from jaxengine.offload.counters import Counters
from jaxengine.offload.host_pool import Bytes
from jaxengine.offload.keys import OffloadKey
from jaxengine.offload.seldom import SeldomLog
from jaxengine.offload.tiers.page_file import PageError, check_page, header_of, header_size

log = logging.getLogger(__name__)

PARALLEL = 8  # requests at a time


def open_store(url: str, options: Mapping[str, str] | None = None, timeout: float = 5.0) -> Any:
    """An obstore store for s3://, gs://, az://, file:// or memory://.

    options: of the provider, as obstore names them (aws_endpoint, skip_signature, ...). Raises
    ImportError without obstore, ValueError for the address or the options.
    """
    try:
        import obstore.store
    except ImportError as error:
        raise ImportError(
            "object_store_url needs the package obstore: pip install obstore"
        ) from error
    settings: dict[str, Any] = dict(options or {})
    if "://" in url and not url.startswith(("file:", "memory:")):
        limit = timedelta(seconds=timeout)
        settings["client_options"] = {"timeout": limit, "connect_timeout": limit}
        if settings.pop("allow_http", "false").lower() == "true":
            settings["client_options"]["allow_http"] = True
        settings["retry_config"] = {"max_retries": 2, "retry_timeout": limit}
    try:
        return obstore.store.from_url(url, **settings)
    except Exception as error:  # obstore's errors have no common base besides it
        reason = str(error).partition("\n")[0]
        raise ValueError(f"object_store_url: cannot open {url}: {reason}") from error


def object_path(namespace: bytes, key: OffloadKey) -> str:
    name = key.hex()
    return f"{namespace.hex()}/{name[:2]}/{name}.kv"


class ObjectStore:
    """Whole objects, checked on every read. Errors of the service are misses, and counted."""

    writable = True

    def __init__(self, store: Any, namespace: bytes, counters: Counters | None = None) -> None:
        """store: what `open_store` gave."""
        import obstore

        self._api = obstore
        self._store = store
        self.namespace = namespace
        self.counters = counters or Counters()
        self._seldom = SeldomLog(log)  # a service that is down fails every block
        self._pool = ThreadPoolExecutor(PARALLEL, "kv-object")

    def contains(self, keys: Sequence[OffloadKey], stop_at_miss: bool) -> list[bool]:
        found: list[bool] = []
        for begin in range(0, len(keys), PARALLEL):
            found += self._pool.map(self._exists, keys[begin : begin + PARALLEL])
            if stop_at_miss and not all(found):
                return found + [False] * (len(keys) - len(found))
        return found

    def read(self, keys: Sequence[OffloadKey], into: Sequence[Bytes]) -> list[bool]:
        return list(self._pool.map(self._read, keys, into))

    def write(self, key: OffloadKey, data: Bytes) -> bool:
        whole = header_of(self.namespace, key, data) + data.tobytes()
        done = self._try("write", lambda: self._api.put(self._store, self._path(key), whole))
        return done is not None

    def delete(self, key: OffloadKey) -> None:
        self._try("delete", lambda: self._api.delete(self._store, self._path(key)))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _exists(self, key: OffloadKey) -> bool:
        return self._try("head", lambda: self._api.head(self._store, self._path(key))) is not None

    def _read(self, key: OffloadKey, page: Bytes) -> bool:
        size = header_size(key)
        data = self._try("read", lambda: self._get(key, size + page.nbytes))
        if data is None:
            return False
        whole = np.frombuffer(data, np.uint8)
        try:
            if len(whole) != size + page.nbytes:
                raise PageError("truncated or of another size")
            check_page(whole[:size].tobytes(), self.namespace, key, whole[size:])
        except PageError as error:
            path = self._path(key)
            self._seldom.warning("damaged", "object tier: %s: %s; deleted", path, error)
            self.counters.add("object_damaged")
            self.delete(key)
            return False
        page[:] = whole[size:]
        return True

    def _get(self, key: OffloadKey, size: int) -> Any:
        """The object's bytes; none of them when it says that it is of another size."""
        found = self._api.get(self._store, self._path(key))
        return found.bytes() if found.meta["size"] == size else b""

    def _try(self, what: str, call: Callable[[], Any]) -> Any:
        """None when the object is not there, or the service failed (counted)."""
        try:
            return call()
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001  whatever the service or network did is a miss
            reason = str(error).partition("\n")[0][:200]
            self._seldom.warning(what, "object tier: %s: %s", what, reason)
            self.counters.add(f"object_{what}_errors")
            return None

    def _path(self, key: OffloadKey) -> str:
        return object_path(self.namespace, key)
