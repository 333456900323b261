"""A small server that speaks enough S3 for obstore, and fails on demand. Loopback, threads."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse


@dataclass
class Bucket:
    """objects by path; `status` answers every request with this code; `delay` seconds first."""

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    status: int = 0
    delay: float = 0.0
    requests: int = 0
    authorization: str = ""  # of the last request


def _deleted(keys: list[bytes]) -> bytes:
    rows = b"".join(b"<Deleted><Key>%s</Key></Deleted>" % key for key in keys)
    return b"<DeleteResult>%s</DeleteResult>" % rows


@contextmanager
def serve_bucket() -> Iterator[Bucket]:
    bucket = Bucket()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, code: int, body: bytes = b"", size: int | None = None) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body) if size is None else size))
            self.send_header("ETag", '"x"')
            self.send_header("Last-Modified", "Mon, 30 Nov 2026 00:00:00 GMT")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def handle_any(self) -> None:
            try:
                self.serve()
            except ConnectionError:  # the client gave up waiting
                self.close_connection = True

        def serve(self) -> None:
            bucket.requests += 1
            bucket.authorization = self.headers.get("Authorization", "")
            time.sleep(bucket.delay)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url = urlparse(self.path)
            if bucket.status:
                self.answer(bucket.status, b"<Error><Code>Made</Code></Error>")
            elif self.command == "PUT":
                bucket.objects[url.path] = body
                self.answer(200)
            elif self.command == "POST":  # bulk delete
                keys = re.findall(rb"<Key>(.*?)</Key>", body)
                for key in keys:
                    bucket.objects.pop(f"{url.path.rstrip('/')}/{key.decode()}", None)
                self.answer(200, _deleted(keys))
            elif "list-type" in url.query:
                prefix = parse_qs(url.query).get("prefix", [""])[0]
                self.answer(200, self.listing(url.path.rstrip("/"), prefix))
            elif self.command == "DELETE":
                bucket.objects.pop(url.path, None)
                self.answer(204)
            elif url.path in bucket.objects:
                data = bucket.objects[url.path]
                self.answer(200, data, len(data))
            else:
                self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

        def listing(self, root: str, prefix: str) -> bytes:
            rows = "".join(
                f"<Contents><Key>{path[len(root) + 1 :]}</Key><Size>{len(data)}</Size>"
                "<ETag>x</ETag><LastModified>2026-11-30T00:00:00Z</LastModified></Contents>"
                for path, data in bucket.objects.items()
                if path.startswith(f"{root}/{prefix}")
            )
            return f"<ListBucketResult><Name>b</Name>{rows}</ListBucketResult>".encode()

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    bucket.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
