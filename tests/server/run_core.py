"""`jaxengine serve` with any engine core: run_core.py MODULE:CLASS FLAGS...

JAXENGINE_TEST_SECONDS shortens the time that a request's head and body may take.
"""

import os
import sys

from jaxengine.cli import main as cli
from jaxengine.server import http_protocol
from jaxengine.wire import frames as wire

if __name__ == "__main__":
    wire.STUB_CORE = sys.argv[1]
    if seconds := os.environ.get("JAXENGINE_TEST_SECONDS"):
        http_protocol.HEAD_SECONDS = http_protocol.BODY_SECONDS = float(seconds)
    cli.main(["serve", "--stub", *sys.argv[2:]])
