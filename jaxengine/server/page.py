"""The chat page: one HTML file that needs nothing but this server."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources


@functools.cache
def html() -> bytes:
    """The page. Raises FileNotFoundError from an installation without it."""
    return (resources.files("jaxengine.server") / "static" / "chat.html").read_bytes()


@functools.cache
def headers() -> dict[str, str]:
    """The page may run its own script, and talk to its own server; nothing else."""
    [script] = re.findall(rb"<script>(.*?)</script>", html(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
