"""Where the server listens: a TCP port or a Unix socket, plain or with TLS."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Sequence
from typing import Any

from jaxengine.config import ServerConfig

log = logging.getLogger(__name__)

_BACKLOG = 2048
# A name may stand for addresses of a kind that this machine does not have.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

Listeners = list[socket.socket]


def listen_for_metrics(config: ServerConfig) -> socket.socket | None:
    """The socket of --metrics-port, on the first address of the host. Raises OSError."""
    if config.metrics_port is None:
        return None
    host = "127.0.0.1" if config.uds is not None else config.host
    return _bound_all(_addresses(host, config.metrics_port)[:1], False)[0]


def listen(config: ServerConfig, count: int = 1) -> list[Listeners]:
    """The listening sockets of each of `count` processes: one for each address that the host's name
    stands for. Over TCP all processes share the ports, and the kernel spreads connections; a Unix
    socket is one that they share. Raises OSError."""
    if config.uds is not None:
        _remove_stale(config.uds)
        shared = _bound(socket.AF_UNIX, config.uds, False)
        return [[shared], *([shared.dup()] for _ in range(count - 1))]
    first = _bound_all(_addresses(config.host, config.port), False)
    if count == 1:
        return [first]
    # The first refuses a port that is in use; the ones that share it may not.
    taken = [(listener.family, listener.getsockname()) for listener in first]
    for listener in first:
        listener.close()
    return [[_bound(family, address, True) for family, address in taken] for _ in range(count)]


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """What a name or an address ([::1] too) stands for. Raises OSError."""
    found = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    # IPv4 first: the first one is what people are shown
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bound_all(
    addresses: Sequence[tuple[socket.AddressFamily, Any]], reuse_port: bool
) -> Listeners:
    """A socket for each address, on one port. Those that this machine does not have are left out,
    if it has any of them."""
    made: Listeners = []
    missing: OSError | None = None
    for family, address in addresses:
        if made:  # port 0 is any free one, but one for all
            address = (address[0], made[0].getsockname()[1], *address[2:])
        try:
            made.append(_bound(family, address, reuse_port))
        except OSError as error:
            if error.errno not in _NOT_HERE:
                for listener in made:
                    listener.close()
                raise
            log.warning("%s is left out: %s", address[0], error.strerror or error)
            missing = error
    if not made and missing is not None:
        raise missing
    return made


def _bound(family: socket.AddressFamily, address: Any, reuse_port: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and address[0] != "::":
            # an address of its own, which 127.0.0.1 can stand beside
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
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


def close(processes: list[Listeners], config: ServerConfig) -> None:
    """Close them, and remove a Unix socket's file."""
    for listeners in processes:
        for listener in listeners:
            listener.close()
    if config.uds is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(config.uds)


def address_of(config: ServerConfig) -> str:
    """What was asked for, for messages."""
    if config.uds is not None:
        return config.uds
    host = config.host.strip("[]")
    return f"{f'[{host}]' if ':' in host else host}:{config.port}"


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
