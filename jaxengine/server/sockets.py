"""Where the server listens: a TCP port or a Unix socket, plain or with TLS."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
from typing import Any

from jaxengine.config import ServerConfig

_BACKLOG = 2048


def listen(config: ServerConfig, count: int = 1) -> list[socket.socket]:
    """A listening socket for each of `count` processes: over TCP all on one port, where the kernel
    spreads connections; a Unix socket is one that they share. Raises OSError."""
    if config.uds is not None:
        _remove_stale(config.uds)
        shared = _bound(socket.AF_UNIX, config.uds, False)
        return [shared, *(shared.dup() for _ in range(count - 1))]
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    first = _bound(family, (config.host, config.port), False)
    if count == 1:
        return [first]
    # The first refuses a port that is in use; the ones that share it may not.
    address = (config.host, first.getsockname()[1])
    first.close()
    return [_bound(family, address, True) for _ in range(count)]


def _bound(family: socket.AddressFamily, address: Any, reuse_port: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """A socket file that nobody listens on is left from a server that was killed."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return  # not ours: binding says so
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


def close(listeners: list[socket.socket], config: ServerConfig) -> None:
    """Close them, and remove a Unix socket's file."""
    for listener in listeners:
        listener.close()
    if config.uds is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(config.uds)


def address_of(config: ServerConfig) -> str:
    """What was asked for, for messages."""
    return config.uds if config.uds is not None else f"{config.host}:{config.port}"


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """What to give to a client."""
    scheme = "https" if config.ssl_certfile else "http"
    if config.uds is not None:
        return f"{scheme}+unix://{config.uds}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}"


def check_tls(config: ServerConfig) -> None:
    """Raises ValueError naming the flag that is missing or the file that is not there."""
    if (config.ssl_keyfile is None) != (config.ssl_certfile is None):
        raise ValueError("--ssl-keyfile and --ssl-certfile go together")
    if config.ssl_certfile is None and (config.ssl_ca_certs or config.ssl_cert_reqs):
        raise ValueError("--ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile")
    if bool(config.ssl_ca_certs) != bool(config.ssl_cert_reqs):
        raise ValueError("--ssl-ca-certs and --ssl-cert-reqs (1 or 2) go together")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(config, name)
        if path is not None and not os.path.isfile(path):
            raise ValueError(f"--{name.replace('_', '-')} {path}: no such file")
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (ssl.SSLError, OSError) as error:
        raise ValueError(
            f"--ssl-certfile {config.ssl_certfile} with --ssl-keyfile {config.ssl_keyfile} cannot "
            f"be used: {error}"
        ) from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (ssl.SSLError, OSError) as error:
            raise ValueError(
                f"--ssl-ca-certs {config.ssl_ca_certs} cannot be used: {error}"
            ) from None


def tls_options(config: ServerConfig) -> dict[str, Any]:
    """Uvicorn's settings for TLS; none without a certificate."""
    if config.ssl_certfile is None:
        return {}
    return {
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_certfile": config.ssl_certfile,
        "ssl_ca_certs": config.ssl_ca_certs,
        "ssl_cert_reqs": config.ssl_cert_reqs,
    }
