"""Servers with several ranks, seen from outside."""

from __future__ import annotations

import psutil
from serverlib import Server

LONG = {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True}


def rank_processes(up: Server) -> dict[int, psutil.Process]:
    """Engine processes by rank: their titles tell."""
    found = {}
    for child in psutil.Process(up.process.pid).children():
        title = " ".join(child.cmdline())
        if title.startswith("jaxengine::engine"):
            found[int(title.removeprefix("jaxengine::engine").split()[0])] = child
    return found
