"""Ties a child process to its parent, so that nothing is left behind whatever is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tie_to_parent(parent_pid: int, by_signal: bool = True) -> None:
    """Die when the parent does, also when that is killed with -9.

    `by_signal` needs the parent's thread that spawned this process to live as long as the parent:
    the kernel's death signal follows that thread.
    """
    if by_signal and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the signal was set
        os._exit(1)
