"""ZMQ addresses in settings: checked at the door, and whom they let in."""

from __future__ import annotations

import re

_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5}|\*)")
_LOCAL_HOST = re.compile(r"127(\.[0-9]{1,3}){3}|localhost|\[::1\]")


def check_address(address: str, where: str, *, bind: bool) -> None:
    """Raises ValueError that begins with `where`, unless ZMQ can use the address.

    bind: it is listened on, so that the port may be 0 or * for a free one.
    """
    if re.fullmatch(r"(ipc|inproc)://\S+", address):
        return
    match = _TCP.fullmatch(address)
    if match is None:
        raise ValueError(
            f"{where} must be an address like tcp://127.0.0.1:5710 or ipc:///run/kv, "
            f"got {address!r}"
        )
    port = match[2]
    if not (bind if port in ("*", "0") else 0 < int(port) < 65_536):
        raise ValueError(f"{where}: {port} is no port to use in {address!r}")


def is_local(address: str) -> bool:
    """Whether only this machine can reach what listens there."""
    match = _TCP.fullmatch(address)
    return match is None or _LOCAL_HOST.fullmatch(match[1]) is not None


def numbered(address: str, number: int) -> str:
    """The address of one of several that listen: the port plus the number, or the name with it.
    A port that the system chooses is left to it."""
    if number == 0:
        return address
    head, _, port = address.rpartition(":")
    if not address.startswith("tcp://"):
        return f"{address}_dp{number}"
    return address if port in ("*", "0") else f"{head}:{int(port) + number}"
