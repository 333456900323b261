"""Who is let in, by which names and keys, and what is shown to whom."""

from __future__ import annotations

import json
import pathlib
import re
import socket
from collections.abc import Iterator

import psutil
import pytest
from serverlib import Server, call, eventually, running, spawn

from jaxengine.config import EngineConfig
from jaxengine.server.keys import keys_of

C, CC = "/v1/completions", "/v1/chat/completions"
HELLO = {"prompt": "hi", "max_tokens": 1}
KEY, ADMIN = {"Authorization": "Bearer sesame"}, {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def up() -> Iterator[Server]:
    with running(core="schema_core:Willing") as server:
        yield server


# -- origins and names ---------------------------------------------------------------------------


def test_pages_of_other_origins_give_no_orders(up: Server) -> None:
    """M2: a browser sends these without asking first, when a page has a form or calls fetch()."""
    evil = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    orders = [("/pause", {}), ("/reset_prefix_cache", {}), ("/sleep", {}), (C, HELLO), (CC, {})]
    for path, body in orders:
        status, found, _ = call(up.url, path, body, headers=evil)
        assert (status, found["error"]["code"]) == (403, "origin_not_allowed"), path
        status, _, _ = call(up.url, path, body, headers={**evil, "Origin": "null"})
        assert status == 403
    # as JSON a browser would have asked, and been told no, unless the route is of the admin's
    json_of_evil = {"Origin": "http://evil.example"}
    assert call(up.url, "/pause", {}, headers=json_of_evil)[0] == 403
    assert call(up.url, C, HELLO, headers=json_of_evil)[0] == 200
    own = {"Origin": f"http://127.0.0.1:{up.port}", "Content-Type": "text/plain"}
    assert call(up.url, C, HELLO, headers=own)[0] == 200
    assert call(up.url, "/pause", {}, headers=own)[0] == 200
    assert call(up.url, "/pause", {})[0] == 200  # curl


def test_origins_that_are_allowed() -> None:
    page = {"Origin": "https://a.example", "Content-Type": "text/plain"}
    flags = ["--allowed-origins", "https://a.example", "--allowed-hosts", "llm.example"]
    with running(*flags, core="schema_core:Willing") as up:
        assert call(up.url, C, HELLO, headers=page)[0] == 200
        assert call(up.url, "/pause", {}, headers=page)[0] == 200
        other = {**page, "Origin": "https://b.example"}
        assert call(up.url, "/pause", {}, headers=other)[0] == 403
        assert call(up.url, C, HELLO, headers={"Host": "llm.example"})[0] == 200
        assert call(up.url, C, HELLO, headers={"Host": "b.example"})[0] == 403
    with running("--allowed-origins", "*", "--allowed-hosts", "*") as up:
        assert call(up.url, C, HELLO, headers={**page, "Host": "b.example"})[0] == 200


def test_names_that_lead_here(up: Server) -> None:
    """M2: the name of a page that was made to stand for 127.0.0.1 (DNS rebinding)."""
    for host in ("rebound.evil.example", "rebound.evil.example:80", "EVIL.example.", "1.2.3.4.x.y"):
        for path, body in (("/v1/models", None), ("/health", None), (C, HELLO), ("/", None)):
            status, found, _ = call(up.url, path, body, headers={"Host": host})
            assert (status, found["error"]["code"]) == (403, "host_not_allowed"), host
    names = ["127.0.0.1", "localhost:8000", "[::1]:8000", "x.localhost", "pod-3", "10.1.2.3"]
    for host in names:
        assert call(up.url, "/v1/models", headers={"Host": host})[0] == 200, host


# -- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["JAXENGINE_API_KEY", "VLLM_API_KEY", "file"])
def test_keys_need_not_be_on_the_command_line(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """M3: what is on it everybody on the machine can read."""
    flags: list[str] = []
    if way == "file":
        for name, key in (("api", "sesame"), ("admin", "boss")):
            (tmp_path / name).write_text(f"{key}\n# rotated in May\n")
        flags = ["--api-key-file", str(tmp_path / "api"), "--admin-api-key-file"]
        flags.append(str(tmp_path / "admin"))
    else:
        monkeypatch.setenv(way, "sesame")
        monkeypatch.setenv("JAXENGINE_ADMIN_API_KEY", "boss")
    with running(*flags, core="schema_core:Willing") as up:
        assert call(up.url, C, HELLO)[0] == 401
        named = {**KEY, "Host": "llm.example"}  # with a key it answers to every name
        assert call(up.url, C, HELLO, headers=named)[0] == 200
        assert call(up.url, C, HELLO, headers=KEY)[0] == 200
        assert call(up.url, "/pause", {}, headers=KEY)[0] == 401
        assert call(up.url, "/pause", {}, headers=ADMIN)[0] == 200
        for process in up.family():
            line = " ".join(process.cmdline())
            assert "sesame" not in line and "boss" not in line
        shown = json.dumps(call(up.url, "/server_info", headers=ADMIN)[1])
        assert '"sesame"' not in shown and '"boss"' not in shown


@pytest.mark.parametrize(
    ("given", "variables", "said"),
    [
        ({"api_key": ""}, {}, "api_key must not be empty"),
        ({"api_key_file": "{tmp}/none"}, {}, "api_key_file {tmp}/none cannot be read"),
        ({"admin_api_key_file": "{tmp}/blank"}, {}, "first line of {tmp}/blank must not be empty"),
        ({}, {"JAXENGINE_API_KEY": ""}, "variable JAXENGINE_API_KEY must not be empty"),
        ({}, {"VLLM_API_KEY": " "}, "variable VLLM_API_KEY must not be empty"),
    ],
)
def test_a_mistake_does_not_open_the_server(
    given: dict[str, str],
    variables: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "blank").write_text("\nsecret\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = {name: value.format(tmp=tmp_path) for name, value in given.items()}
    with pytest.raises(ValueError, match=re.escape(said.format(tmp=tmp_path))):
        keys_of(EngineConfig.of(**settings).server)


def test_a_key_file_that_is_not_there_ends_the_command(tmp_path: pathlib.Path) -> None:
    process = spawn("--api-key-file", str(tmp_path / "none"))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"api_key_file {tmp_path}/none cannot be read" in output and "Traceback" not in output


def test_an_open_server_says_so(up: Server) -> None:
    """M3."""
    warning = "this server has no key and listens on 0.0.0.0"
    with running("--host", "0.0.0.0") as opened:
        assert any(warning in line for line in opened.lines)
        assert call(f"http://127.0.0.1:{opened.port}", C, HELLO)[0] == 200
    assert not any("has no key" in line for line in up.lines)


# -- what is shown -------------------------------------------------------------------------------


def test_secrets_are_shown_to_nobody() -> None:
    """M1."""
    extra = {
        "cpu_bytes_to_use": 1 << 20,
        "object_store_url": "s3://keyid:TOPSECRET@bucket/x",
        "object_store_options": {"aws_secret_access_key": "TOPSECRET", "region": "TOPSECRET"},
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    transfer |= {"kv_connector_extra_config": extra}
    flags = [
        "--kv-transfer-config",
        json.dumps(transfer),
        "--otlp-traces-endpoint",
        "http://me:TOPSECRET@127.0.0.1:9/v1/traces",
    ]
    with running(*flags) as up:
        shown = json.dumps(call(up.url, "/server_info")[1])
        assert "s3://***@bucket/x" in shown and "http://***@127.0.0.1:9" in shown
        assert "TOPSECRET" not in shown
        assert "TOPSECRET" not in "\n".join(up.lines)


def test_a_path_makes_no_lines_of_its_own(up: Server) -> None:
    """M8: neither answered nor refused."""
    forged = "/x%0a12:00:00%20I%20jaxengine.access:%20FORGED%20GET%20/admin%20200%1b[2J%c3%a9"
    call(up.url, forged)
    call(up.url, forged, headers={"Host": "a.example"})
    call(up.url, "/" + "y" * 5000)
    call(up.url, "/v1/models", headers={"Host": "a.example\x1b[2J"})
    eventually(lambda: len([x for x in up.lines if "FORGED" in x]) == 2, 10)
    for line in up.lines:
        assert not line.startswith("12:00:00 I jaxengine.access: FORGED")
        assert line.isprintable() and line.isascii() and len(line) < 1000, line


def test_documentation_without_scripts(up: Server) -> None:
    """L9: a script from elsewhere could read the chat page's key."""
    for path in ("/docs", "/redoc"):
        status, page, headers = call(up.url, path)
        assert status == 200 and "/v1/chat/completions" in page and "<script" not in page
        assert "http://" not in page.replace("http://127", "") and "https://" not in page
        assert "default-src 'none'" in headers["content-security-policy"]


def test_metrics_on_a_port_of_their_own() -> None:
    """M3: a scraper that is told by annotations has no key to send."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running("--api-key", "sesame", "--metrics-port", str(port)) as up:
        beside = f"http://127.0.0.1:{port}"
        assert call(up.url, "/metrics")[0] == 401
        status, text, _ = call(beside, "/metrics")
        assert status == 200 and "jaxengine:num_requests_running" in text
        assert call(beside, "/health")[0] == 200
        for path in ("/v1/models", "/server_info", "/docs", "/", "/openapi.json"):
            assert call(beside, path)[0] == 404, path
        assert call(beside, C, HELLO)[0] == 404
        assert call(up.url, C, HELLO, headers=KEY)[0] == 200
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 5).close()


def test_a_metrics_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = spawn("--metrics-port", str(port))
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"cannot listen on port {port} (--metrics-port)" in output


# -- names and addresses -------------------------------------------------------------------------


def test_a_name_with_several_addresses() -> None:
    """Every address that the name stands for is listened on, by every process."""
    found = {entry[4][0] for entry in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    with running("--host", "localhost") as up:
        for address in found:
            shown = f"[{address}]" if ":" in address else address
            try:
                socket.create_connection((address, up.port), 5).close()
            except OSError as error:
                pytest.skip(f"{address} is not on this machine: {error}")
            assert call(f"http://{shown}:{up.port}", "/v1/models")[0] == 200
        listening = {
            c.laddr.port for c in psutil.Process(up.process.pid).net_connections() if not c.raddr
        }
        assert up.port in listening
