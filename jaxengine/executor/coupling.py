"""Which ranks are coupled, and what each member of such a group is told. No JAX.

Ranks are coupled when they share experts: `--data-parallel-size N --enable-expert-parallel` on one
server. Their workers form one group of `jax.distributed` that runs one program over all devices, as
attention data parallelism inside one engine does, so they step together and fail together. Every
rank still plans for itself, over its own KV pool.

A group lives at a port, that of jax.distributed. The exchange of wishes (`exchange.py`) is over a
socket file named after the port, in a folder that only this user may enter. A group that broke is
never repaired: a new one is formed at a new port, and what still says anything about the old port
is out of date.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import tempfile
from pathlib import Path

from jaxengine.settings.coupling import HOST

_PORTS = 15_000, 32_000  # below the ephemeral ones
_LONGEST_FOLDER = 80  # bytes: a socket's whole path may have 107


class Interrupted(Exception):
    """The engine was told to stop while it waited for the others."""


def free_port() -> int:
    """A port that is free on the loopback. It is bound seconds later, so it is none that the system
    gives to anyone who asks for any."""
    chance = random.SystemRandom()
    for _ in range(100):
        port = chance.randrange(*_PORTS)
        with socket.socket() as tried:
            try:
                tried.bind((HOST, port))
            except OSError:
                continue
            return port
    raise OSError("no free port on the loopback")


def exchange_address(port: int) -> str:
    """Address at which the group of this port exchanges its wishes. Raises ValueError when there is
    no folder for it that other users are kept out of."""
    return f"ipc://{_private_folder()}/ranks-{port}"


def _private_folder() -> Path:
    bases = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    for base in filter(None, bases):
        folder = Path(base) / f"jaxengine-{os.geteuid()}"
        if len(os.fsencode(folder)) <= _LONGEST_FOLDER and os.access(base, os.W_OK | os.X_OK):
            break
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # a link may lead anywhere
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ValueError(
            f"{folder} is not a folder that only this user may enter; ranks that share experts "
            "meet there: remove it, or set TMPDIR to another place"
        )
    return folder
