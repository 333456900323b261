"""What every block of the pool is right now: for pictures and for people, not for planning."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jaxengine.sched.block_pool import BlockPool

FREE, CACHED, OWNED, SHARED = range(4)


def block_states(pool: BlockPool) -> NDArray[np.int8]:
    """[num_blocks] FREE; CACHED (free, but its contents can still be found by their hash); OWNED
    by one request; SHARED by several. Looks at every block, and changes none."""
    owners = np.array(pool.ref)
    hashed = np.array([key is not None for key in pool.hash_of], bool)
    states = np.where(owners > 0, OWNED, np.where(hashed, CACHED, FREE))
    return np.where(owners > 1, SHARED, states).astype(np.int8)
