"""By which names a server answers. A page on the web can make its own name resolve to 127.0.0.1 and
then read a local server as if it were the page's own (DNS rebinding), so that a server without a
key that listens on this machine alone looks at the name it is called by."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from jaxengine.config import ServerConfig


def trusted_hosts(config: ServerConfig) -> frozenset[str] | None:
    """Names beside the local ones, in lower case; None: every name is taken (a Unix socket, an
    address that others reach too, or --allowed-hosts '*')."""
    if config.uds is not None or not is_loopback(config.host) or "*" in config.allowed_hosts:
        return None
    return frozenset(name.lower() for name in (config.host, *config.allowed_hosts))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    host = host.strip("[]").lower()
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_trusted(header: str, known: frozenset[str]) -> bool:
    """Whether a Host header names this server. Addresses do, and names without a dot: no page of
    the web has such a name."""
    name = header.strip().lower()
    name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
    name = name.rstrip(".")
    if "." not in name or name in known or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def netloc_of(origin: str) -> str:
    """HOST or HOST:PORT of an Origin header, in lower case; "" for what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
