"""`jaxengine serve` with any engine core: run_core.py MODULE:CLASS FLAGS..."""

import sys

from jaxengine.cli import main as cli
from jaxengine.engine import wire

if __name__ == "__main__":
    wire.STUB_CORE = sys.argv[1]
    cli.main(["serve", "--stub", *sys.argv[2:]])
