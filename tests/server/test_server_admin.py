"""Who may do what, where the server listens, and profiles."""

from __future__ import annotations

import gzip
import http.client
import json
import pathlib
import socket
import ssl
import subprocess
import urllib.request
from typing import Any

import pytest
from serverlib import call, running, spawn

KEY = {"Authorization": "Bearer open"}
ADMIN = {"Authorization": "Bearer boss"}
C = "/v1/completions"
ADMIN_ROUTES = [
    ("POST", "/reset_prefix_cache"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("GET", "/server_info"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("GET", "/fault_tolerance/status"),
]


def test_two_keys_and_a_profile(tmp_path: pathlib.Path) -> None:
    """The admin key opens all, the API key all but the admin routes; the page needs none."""
    flags = ["--api-key", "open", "--admin-api-key", "boss", "--profiler-dir", str(tmp_path)]
    with running(*flags, core="profiled_core:Profiled") as up:
        for method, path in ADMIN_ROUTES:
            body = {} if method == "POST" else None
            for headers in ({}, KEY, {"Authorization": "Bearer bos"}):
                status, answer, _ = call(up.url, path, body, headers=headers)
                assert status == 401 and answer["error"]["type"] == "authentication_error", path
        for path in ("/v1/models", "/metrics", "/load"):
            assert call(up.url, path)[0] == 401
            assert call(up.url, path, headers=KEY)[0] == 200
            assert call(up.url, path, headers=ADMIN)[0] == 200
        assert call(up.url, "/v1/models", headers={"X-Api-Key": "open"})[0] == 200
        assert call(up.url, "/")[0] == 200
        info = call(up.url, "/server_info", headers=ADMIN)[1]
        assert "boss" not in str(info) and info["config"]["server"]["admin_api_key"] == "***"

        def order(path: str) -> Any:
            return call(up.url, path, {}, headers=ADMIN)

        status, answer, _ = order("/stop_profile")
        assert status == 400 and answer["error"]["message"] == "no profile is being taken"
        status, answer, _ = order("/start_profile")
        assert status == 200 and pathlib.Path(answer["folders"][0]).parent == tmp_path
        status, answer, _ = order("/start_profile")
        assert status == 400 and "already" in answer["error"]["message"]
        assert call(up.url, C, {"prompt": "hi", "max_tokens": 2}, headers=KEY)[0] == 200
        status, answer, _ = order("/stop_profile")
        assert status == 200
        for file in answer["files"]:  # the format of Chrome's traces, which Perfetto reads
            assert "traceEvents" in json.loads(gzip.decompress(pathlib.Path(file).read_bytes()))
        assert any(file.endswith("perfetto_trace.json.gz") for file in answer["files"])


def test_an_admin_key_alone_leaves_the_rest_open() -> None:
    origin = {"Origin": "https://a.example"}
    flags = ["--admin-api-key", "boss", "--allowed-origins", origin["Origin"]]
    flags += ["--allowed-methods", "GET", "--root-path", "/llm", "--disable-access-log"]
    with running(*flags) as up:
        bare = up.url.removesuffix("/llm")  # what the proxy in front asks for
        assert up.url.endswith("/llm")
        assert call(bare, C, {"prompt": "hi", "max_tokens": 2})[0] == 200
        assert call(bare, "/server_info")[0] == 401
        status, answer, _ = call(bare, "/start_profile", {}, headers=ADMIN)
        assert status == 400 and "--profiler-dir" in answer["error"]["message"]
        _, _, headers = call(bare, "/version", headers=origin)
        assert headers["access-control-allow-origin"] == origin["Origin"]
        assert headers["access-control-expose-headers"] == "X-Request-Id"
        assert "access-control-allow-origin" not in call(bare, "/version")[2]
        asked = origin | {"Access-Control-Request-Method": "GET"}
        request = urllib.request.Request(bare + "/version", headers=asked, method="OPTIONS")
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["access-control-allow-methods"] == "GET"
    assert not any("jaxengine.access" in line for line in up.lines)


class _Unix(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.host)


def test_unix_socket(tmp_path: pathlib.Path) -> None:
    """A file left by a killed server is no obstacle; the file goes with the server."""
    path = tmp_path / "api.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    process = spawn("--uds", str(path))
    try:
        assert process.stdout is not None
        assert any(f"http+unix://{path}" in line and "serves" in line for line in process.stdout)
        connection = _Unix(str(path))
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 0 and not path.exists()


def test_tls(tmp_path: pathlib.Path) -> None:
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out"]
    make += [cert, "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(make, check=True, capture_output=True)
    process = spawn("--ssl-keyfile", key, "--ssl-certfile", cert)
    try:
        assert process.stdout is not None
        url = next(
            line.split(" at ")[1].strip() for line in process.stdout if " at https://" in line
        )
        context = ssl.create_default_context(cafile=cert)
        with urllib.request.urlopen(url + "/health", context=context) as answer:
            assert json.load(answer) == {"status": "ok"}
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.mark.parametrize(
    "flags,sentence",
    [
        (["--ssl-keyfile", "x"], "--ssl-keyfile and --ssl-certfile go together"),
        (["--ssl-cert-reqs", "2"], "--ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile"),
        (["--otlp-traces-endpoint", "x:1"], "--otlp-traces-endpoint must be an http(s) URL"),
        (["--api-server-count", "0"], "--api-server-count must be at least 1, got 0"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--api-key", "a", "--admin-api-key", ""], "--admin-api-key must not be empty"),
        (["--pooler-config", '{"pooling_type": "CLS"}'], "pooler_config.pooling_type must be LAST"),
        (["--ssl-certfile", __file__, "--ssl-keyfile", __file__], "cannot be used"),
        (
            ["--ssl-certfile", __file__, "--ssl-keyfile", __file__, "--ssl-ca-certs", __file__],
            "--ssl-ca-certs and --ssl-cert-reqs (1 or 2) go together",
        ),
    ],
)
def test_flags_that_cannot_work(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxengine.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(["serve", "--stub", *flags])
    assert end.value.code == 2 and sentence in capsys.readouterr().err
