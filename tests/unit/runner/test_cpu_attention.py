"""The CPU's paged attention against float64; every slot that no query may see holds NaN."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxengine.pallas_kernels.kv_write import kv_write
from jaxengine.pallas_kernels.paged_attention import decode_attention, prefill_attention

CHUNK = 128  # context tokens of one turn of the loops
DIM = 16
ROWS, TOKENS, WIDTH = 5, 96, 420 // 4  # static shapes, so that few programs are compiled

HEADS = st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 1), (4, 2), (8, 1)])  # kv heads, group
WINDOWS = st.sampled_from([0, 0, 1, 24, 130])
PAGES = st.sampled_from([4, 16])
edge = st.builds(
    lambda base, times, delta: max(1, min(420, base * times + delta)),
    st.sampled_from([4, 16, CHUNK]),
    st.integers(0, 3),
    st.integers(-1, 1),
)


class Pool:
    """Random keys and values of some rows, in blocks of a permuted pool."""

    def __init__(self, seed: int, lengths: list[int], lowest: list[int], kv_heads: int, page: int):
        """Slots of row i before lowest[i] and from lengths[i] on hold NaN."""
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.keys, self.values = [], []
        width = WIDTH * 4 // page
        count = ROWS * width + 1
        pool = np.full((2, count, page, kv_heads * DIM), np.nan, np.float32)
        order = rng.permutation(count)
        self.table = np.zeros((ROWS, width), np.int32)
        self.table[:] = order[-1]  # unused entries lead to NaN
        for row, (length, low) in enumerate(zip(lengths, lowest, strict=True)):
            blocks = order[row * width : (row + 1) * width]
            kv = rng.normal(size=(2, length, kv_heads, DIM)).astype(np.float32)
            self.keys.append(kv[0].astype(np.float64))
            self.values.append(kv[1].astype(np.float64))
            at = np.arange(low, length)
            pool[:, blocks[at // page], at % page] = kv[:, low:].reshape(2, length - low, -1)
            used = -(-length // page)
            self.table[row, :used] = blocks[:used]
            self.table[row, : low // page] = order[-1]  # given back behind a window
        self.k_cache, self.v_cache = jnp.asarray(pool[0]), jnp.asarray(pool[1])

    def expected(self, q: np.ndarray, row: int, position: int, window: int) -> np.ndarray:
        """[H, C] attention of one query of `row` at `position`."""
        begin = max(0, position - window + 1) if window else 0
        k, v = self.keys[row][begin : position + 1], self.values[row][begin : position + 1]
        group = q.shape[0] // k.shape[1]
        out = np.zeros(q.shape)
        for head in range(q.shape[0]):
            scores = k[:, head // group] @ q[head].astype(np.float64)
            weights = np.exp(scores - scores.max())
            out[head] = weights @ v[:, head // group] / weights.sum()
        return out


@partial(jax.jit, static_argnames=("kv_heads", "window", "turn"))
def run_decode(q, k, v, table, lens, rows, *, kv_heads, window, turn):  # type: ignore[no-untyped-def]
    return decode_attention(
        q, k, v, table, lens, rows, num_kv_heads=kv_heads, window=window, rows_per_turn=turn
    )


@partial(jax.jit, static_argnames=("kv_heads", "window", "query_block"))
def run_prefill(q, k, v, table, items, count, *, kv_heads, window, query_block):  # type: ignore[no-untyped-def]
    return prefill_attention(
        q, k, v, table, items, count,
        num_kv_heads=kv_heads, window=window, query_block=query_block,
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(edge, min_size=1, max_size=ROWS),
    heads=HEADS,
    window=WINDOWS,
    page=PAGES,
    turn=st.sampled_from([0, 2]),
)
@example(seed=1, lengths=[128, 129, 1, 127, 256], heads=(2, 2), window=0, page=16, turn=2)
@example(seed=2, lengths=[300, 25, 24, 23, 1], heads=(2, 2), window=24, page=4, turn=0)
def test_decode_is_float64s(
    seed: int, lengths: list[int], heads: tuple[int, int], window: int, page: int, turn: int
) -> None:
    kv_heads, group = heads
    live = len(lengths)
    lengths = lengths + [1] * (ROWS - live)
    lowest = [max(0, n - window) if window else 0 for n in lengths]
    pool = Pool(seed, lengths, lowest, kv_heads, page)
    q = pool.rng.normal(size=(ROWS, kv_heads * group, DIM)).astype(np.float32)
    out = np.asarray(
        run_decode(
            q,
            pool.k_cache,
            pool.v_cache,
            pool.table,
            np.array(lengths, np.int32),
            np.int32(live),
            kv_heads=kv_heads,
            window=window,
            turn=turn,
        )
    )
    for row in range(live):
        want = pool.expected(q[row], row, lengths[row] - 1, window)
        np.testing.assert_allclose(out[row], want, atol=2e-5)
    assert (out[live:] == 0).all()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.lists(st.tuples(st.integers(1, 19), edge), min_size=1, max_size=ROWS),
    heads=HEADS,
    window=WINDOWS,
    page=PAGES,
    query_block=st.sampled_from([8, 128]),
)
@example(
    seed=1, rows=[(16, 112), (17, 128), (1, 256)], heads=(2, 2), window=0, page=16, query_block=128
)
@example(seed=2, rows=[(9, 290), (19, 1)], heads=(2, 2), window=24, page=4, query_block=8)
def test_prefill_is_float64s(
    seed: int,
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    window: int,
    page: int,
    query_block: int,
) -> None:
    """Rows are (new tokens, tokens computed before + 1)."""
    kv_heads, group = heads
    starts = [min(before - 1, 420 - new) for new, before in rows]
    lengths = [start + new for start, (new, _) in zip(starts, rows, strict=True)]
    unused = ROWS - len(rows)
    lowest = [max(0, start - window + 1) if window else 0 for start in starts]
    pool = Pool(seed, lengths + [1] * unused, lowest + [0] * unused, kv_heads, page)
    q = pool.rng.normal(size=(TOKENS, kv_heads * group, DIM)).astype(np.float32)
    items, where, first = [], [], 0
    for row, (start, (new, _)) in enumerate(zip(starts, rows, strict=True)):
        where += [(row, start + i) for i in range(new)]
        for offset in range(0, new, query_block):
            count = min(query_block, new - offset)
            items.append([row, first + offset, start + offset, count])
        first += new
    padded = np.zeros((TOKENS // 8 + 2 * ROWS, 4), np.int32)
    padded[: len(items)] = items
    out = np.asarray(
        run_prefill(
            q,
            pool.k_cache,
            pool.v_cache,
            pool.table,
            padded,
            np.int32(len(items)),
            kv_heads=kv_heads,
            window=window,
            query_block=query_block,
        )
    )
    for token, (row, position) in enumerate(where):
        want = pool.expected(q[token], row, position, window)
        np.testing.assert_allclose(out[token], want, atol=2e-5)


def test_padding_writes_no_block() -> None:
    for tokens in (1, 2, 6):
        cache = jnp.arange(4 * 3 * 5, dtype=jnp.float32).reshape(4, 3, 5)
        new = -jnp.ones((tokens, 5))
        outside = 12 + jnp.arange(tokens)
        assert (kv_write(cache, new, outside) == cache).all()
        slots = outside.at[0].set(7)
        got = np.asarray(kv_write(cache, new, slots)).reshape(12, 5)
        want = np.asarray(cache).reshape(12, 5).copy()
        want[7] = -1
        assert (got == want).all()
