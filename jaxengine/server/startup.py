"""What the server says of itself when it is up: a small table."""

from __future__ import annotations

import time

from jaxengine.wire.messages import EngineReady


def startup_table(ready: EngineReady, num_engines: int, began: float) -> str:
    """Lines of name and value: what the engine reports (weights, KV cache, programs), and seconds
    since `began` (time.monotonic)."""
    rows = {"engines": str(num_engines), "context": f"{ready.max_model_len} tokens"}
    rows["KV blocks"] = f"{ready.num_blocks} of {ready.block_size} tokens"
    rows["KV tokens"] = str(ready.num_blocks * ready.block_size)
    rows |= {name: value for name, value in ready.info.items() if name not in rows}
    rows["start"] = f"{time.monotonic() - began:.1f} seconds"
    width = max(map(len, rows))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())
