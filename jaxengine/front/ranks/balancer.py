"""Which rank gets the next request: the least loaded, unless the request has a home."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass

PREFIX_TOKENS = 64  # of a prompt that decide its home with affinity "prefix"
# A home is left when its score is above this multiple of the best one's plus a few requests: a
# cached prefix saves a prefill, not a queue.
_WORSE_FACTOR, _WORSE_MARGIN = 2.0, 4.0
_KV_WEIGHT, _KV_FREE = 6.0, 0.5


@dataclass(frozen=True)
class Placement:
    """What a request says about where it runs."""

    rank: int | None = None
    session: str | None = None


ANYWHERE = Placement()


@dataclass
class Load:
    """What is known of one rank: its last stats, and `own`, what this front has in flight there
    (stats may be old; that never is)."""

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    own: int = 0


def score(load: Load, clients: int = 1) -> float:
    """Lower is better. Waiting requests weigh more the fuller the KV pool is."""
    queue = max(load.own * clients, load.waiting + load.running)
    return queue + load.waiting * _KV_WEIGHT * max(0.0, load.kv_usage - _KV_FREE)


def prefix_key(token_ids: list[int]) -> str:
    """Equal for prompts with equal beginnings."""
    first = array("q", token_ids[:PREFIX_TOKENS]).tobytes()
    return hashlib.blake2b(first, digest_size=8).hexdigest()


class Balancer:
    """Loads by rank, and the choice among them. `clients`: fronts that share the ranks."""

    def __init__(self, ranks: Iterable[int], clients: int = 1) -> None:
        self.loads = {rank: Load() for rank in ranks}
        self._clients = clients
        self._turn = 0

    def choose(self, among: Collection[int], key: str | None = None) -> int:
        """A rank of `among` (not empty). Ties go round; `key` names a home that is kept while it
        is not much worse. The chosen rank counts as fuller at once, so that the next choices
        spread before its stats arrive."""
        order = sorted(among)
        turn = self._turn % len(order)
        self._turn += 1
        order = order[turn:] + order[:turn]
        scores = {rank: score(self.loads[rank], self._clients) for rank in order}
        best = min(order, key=scores.__getitem__)
        if key is not None:
            home = max(order, key=lambda rank: _affinity(key, rank))
            if scores[home] <= _WORSE_FACTOR * scores[best] + _WORSE_MARGIN:
                best = home
        self.loads[best].waiting += self._clients
        return best

    def update(self, rank: int, waiting: int, running: int, kv_usage: float) -> None:
        """Stats of a rank arrived."""
        load = self.loads[rank]
        load.waiting, load.running, load.kv_usage = waiting, running, kv_usage

    def entered(self, rank: int) -> None:
        self.loads[rank].own += 1

    def left(self, rank: int) -> None:
        self.loads[rank].own -= 1

    def emptied(self, rank: int) -> None:
        """The rank failed: nothing waits or runs there."""
        self.update(rank, 0, 0, 0.0)


def _affinity(key: str, rank: int) -> bytes:
    """Each key ranks the ranks in its own order: when one goes, only its keys move."""
    return hashlib.blake2b(f"{rank}:{key}".encode(), digest_size=8).digest()
