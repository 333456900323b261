"""Before every step coupled ranks tell each other what they want, and all do the same.

Each rank sends a wish to rank 0, which combines them and answers all alike. That is one round over
a socket file, while the device works on the step before. Ranks never wait for each other elsewhere
on the host; a rank that does not come in time breaks the group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from jaxengine.executor.coupling import exchange_address
from jaxengine.sched.batch import Bucket
from jaxengine.sched.shapes import ProgramKey
from jaxengine.settings.coupling import Member
from jaxengine.wire.strangers import Strangers

_LOOK_MS = 20  # between looks at what else may end the wait
_MOST_BYTES = 16 * 2**20  # of a message; the names of all programs are the most of it


class PeerLostError(RuntimeError):
    """A rank of the group did not come in time."""


class Plan(msgspec.Struct, array_like=True, frozen=True):
    """The sizes of a rank's step (see `Executor.choose`), and what it runs beside: does it write
    slot records, and the kinds of programs that read all of its tokens (score, pool)."""

    num_tokens: int
    num_rows: int
    decode_only: bool
    fewest_tokens: int
    seeds: bool = False
    kinds: list[str] = []


class Wish(msgspec.Struct, array_like=True, frozen=True):
    """One rank's wish for the next step. `work`: something runs, waits or is in flight there.
    `ready`: the programs that it has compiled, when they changed; `warm`: those are all."""

    round: int
    wave: int
    work: bool
    plan: Plan | None = None
    ready: list[ProgramKey] | None = None
    warm: bool = False


class Agreement(msgspec.Struct, array_like=True, frozen=True):
    """What all ranks do next. `shape`: forward bucket and sampler rows of the step; None: no step.
    `start`: programs that all begin to compile. `cold`: the step may wait for one. `warm`: all
    ranks have compiled everything."""

    round: int
    waves: list[int]
    work: list[bool]
    shape: tuple[Bucket, int] | None = None
    start: list[ProgramKey] = []
    cold: bool = False
    warm: bool = False


# From the sizes to a shape: (num_tokens, num_rows, decode_only, fewest_tokens) -> shape.
Choose = Callable[[int, int, bool, int], tuple[Bucket, int]]


class Combiner:
    """Rank 0's: wishes of all, in order of rank, to what all do."""

    def __init__(
        self,
        size: int,
        make_choose: Callable[[Callable[[ProgramKey], bool], Callable[[ProgramKey], None]], Choose],
    ) -> None:
        """`make_choose(ready, start)` gives the chooser of shapes."""
        self._ready: list[frozenset[ProgramKey]] = [frozenset()] * size
        self._everywhere: frozenset[ProgramKey] = frozenset()
        self._start: list[ProgramKey] = []
        self._choose = make_choose(self._is_ready, self._start_later)

    def _is_ready(self, key: ProgramKey) -> bool:
        return key in self._everywhere

    def _start_later(self, key: ProgramKey) -> None:
        self._start.append(key)

    def combine(self, wishes: Sequence[Wish]) -> Agreement:
        """Raises PeerLostError when they are not of one round, ValueError when no shape could hold
        the step."""
        if len({wish.round for wish in wishes}) > 1:
            rounds = ", ".join(str(wish.round) for wish in wishes)
            raise PeerLostError(f"the ranks are not at the same step: {rounds}")
        for rank, wish in enumerate(wishes):
            if wish.ready is not None:
                self._ready[rank] = frozenset(wish.ready)
                self._everywhere = frozenset.intersection(*self._ready)
        plans = [wish.plan for wish in wishes if wish.plan is not None]
        self._start = []
        shape = None
        needed: list[ProgramKey] = []
        if plans:
            fewest = min(p.fewest_tokens for p in plans) if len(plans) == len(wishes) else 0
            shape = self._choose(
                max(p.num_tokens for p in plans),
                max(p.num_rows for p in plans),
                all(p.decode_only for p in plans),
                fewest,
            )
            needed = [("forward", shape[0]), ("sample", shape[1])]
            needed += [("seed", 0)] * any(p.seeds for p in plans)
            kinds = sorted({kind for p in plans for kind in p.kinds})
            needed += [(kind, shape[0].tokens) for kind in kinds]
        missing = [key for key in needed if key not in self._everywhere]
        return Agreement(
            wishes[0].round,
            [wish.wave for wish in wishes],
            [wish.work for wish in wishes],
            shape,
            list(dict.fromkeys(self._start + missing)),
            cold=bool(missing),
            warm=all(wish.warm for wish in wishes),
        )


class Exchange:
    """One rank's end. Made for one group; the next one has its own. One thread uses it."""

    def __init__(self, member: Member, combiner: Combiner | None) -> None:
        """`combiner` is rank 0's. Raises ValueError as `coupling.exchange_address` does."""
        address = exchange_address(member.port)
        self._member = member
        self._combiner = combiner
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER if combiner is None else zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        # Those who come to rank 0, by name.
        self._others = {_name(rank, member.port): rank for rank in range(1, member.size)}
        self._strangers = Strangers("the exchange of ranks that share experts")
        if combiner is None:
            self._socket.setsockopt(zmq.IDENTITY, _name(member.rank, member.port))
            self._socket.connect(address)
        else:
            self._socket.bind(address)

    def agree(self, wish: Wish, look: Callable[[], None], limit: float) -> Agreement:
        """Give the wish and wait for what all do. `look` is called now and then, and raises what
        else ends the wait. Raises PeerLostError after `limit` seconds."""
        deadline = time.monotonic() + limit
        if self._combiner is None:
            self._socket.send(_encode(wish))
            [answer] = self._receive(look, deadline, "rank 0 gave no answer")
            return _decode_agreement(answer)
        wishes: dict[int, Wish] = {0: wish}
        while len(wishes) < self._member.size:
            missing = ", ".join(str(r) for r in range(self._member.size) if r not in wishes)
            found = self._wish_of(self._receive(look, deadline, f"no word from rank {missing}"))
            if found is not None:
                wishes[found[0]] = found[1]
        agreement = self._combiner.combine([wishes[rank] for rank in range(self._member.size)])
        answer = _encode(agreement)
        for name in self._others:
            self._socket.send_multipart([name, answer])
        return agreement

    def _wish_of(self, frames: list[bytes]) -> tuple[int, Wish] | None:
        """A rank and its wish; None for a message that is not of this group."""
        rank = self._others.get(frames[0])
        if rank is None or len(frames) != 2:
            self._strangers.ignore(frames[0], "it is not of this group")
            return None
        try:
            return rank, _decode_wish(frames[1])
        except msgspec.MsgspecError:
            self._strangers.ignore(frames[0], "it is no wish")
            return None

    def _receive(self, look: Callable[[], None], deadline: float, what: str) -> list[bytes]:
        while not self._socket.poll(_LOOK_MS):
            look()
            if time.monotonic() > deadline:
                raise PeerLostError(f"the group of ranks is broken: {what} in time")
        return self._socket.recv_multipart()

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        self._context.term()


def _name(rank: int, port: int) -> bytes:
    return f"rank {rank} of {port}".encode()


_encode = msgspec.msgpack.Encoder().encode
_decode_wish = msgspec.msgpack.Decoder(Wish).decode
_decode_agreement = msgspec.msgpack.Decoder(Agreement).decode
