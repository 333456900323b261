"""Who leaves the queue: admission while tokens, slots and blocks last."""

from __future__ import annotations

from jaxengine.sched.kv_cache import PrefixHit
from jaxengine.sched.request import Request, RequestStatus
from jaxengine.sched.state import SchedulerState, cohort_is_full, release, run, start


def admit(state: SchedulerState, budget: int) -> None:
    """Start waiting requests. The head that does not fit stops the loop: nobody overtakes it.
    Requests that wait for something else (grammar, lookup, their own late output) are passed by.
    """
    held_back: list[Request] = []
    while budget > 0 and state.table.free and len(state.waiting) and not cohort_is_full(state):
        request = state.waiting.peek()
        hit = None if _is_blocked(request) else state.kv.find_prefix(request)
        local = hit.num_blocks * state.config.block_size if hit else 0
        external = _external_tokens(state, request, local) if hit else None
        if hit is None or external is None:
            held_back.append(state.waiting.pop())
            continue
        n = _fit_blocks(
            state, request, hit, external or _first_chunk(state, request, local, budget)
        )
        if n == 0:
            break
        state.waiting.pop()
        slot = start(state, request, hit, local + n)
        if state.connector is not None:
            blocks = state.kv.row_blocks(slot)
            state.connector.after_alloc(request, blocks, local, n if external else 0)
        if external:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            request.num_external_tokens = n
            state.loading[request.request_id] = request
        else:
            run(state, request)
            state.table.num_scheduled[slot] = n
            budget -= n
    for request in reversed(held_back):
        state.waiting.prepend(request)


def take_finished_loads(state: SchedulerState) -> None:
    """Requests whose load ended start to run behind what was loaded; the rest is computed."""
    if state.connector is None:
        return
    for request_id, num_tokens in state.connector.take_finished_loads():
        request = state.loading.pop(request_id, None)
        if request is None:
            continue  # its load was forgotten in a fault
        if request.is_finished:
            release(state, request)
            continue
        loaded = min(num_tokens, request.num_external_tokens)
        request.num_external_tokens = loaded
        state.table.num_computed[request.slot] += loaded
        # A windowed group was loaded no further back than it looks: the rest holds nothing.
        state.kv.release_window(request.slot)
        state.kv.register(request, request.num_computed_tokens)
        if not request.num_preemptions:
            request.num_cached_tokens += loaded
        run(state, request)


def _is_blocked(request: Request) -> bool:
    if request.grammar is not None and not request.grammar.ready:
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
        return True
    # Started before its late output is in, it would sample the same position again.
    return request.num_stale_output_tokens > 0 and not request.drop_stale


def _external_tokens(state: SchedulerState, request: Request, local: int) -> int | None:
    """Tokens that the connector will load behind the local hit; None = ask again later."""
    if state.connector is None or request.skip_reading_prefix_cache:
        return 0
    external = state.connector.matched_tokens(request, local)
    return external and max(0, min(external, request.num_tokens - 1 - local))


def _first_chunk(state: SchedulerState, request: Request, local: int, budget: int) -> int:
    """Tokens of the first step; 0 when they may not be split and are too many."""
    n = request.num_tokens - local
    threshold = state.config.long_prefill_token_threshold
    if threshold and state.contended():
        n = min(n, threshold)
    if n > budget and not state.config.enable_chunked_prefill:
        return 0
    return min(n, budget)


def _fit_blocks(state: SchedulerState, request: Request, hit: PrefixHit, n: int) -> int:
    """Tokens of `n` behind the hit for which there are blocks; 0 = not now."""
    config = state.config
    local = hit.num_blocks * config.block_size
    # Whoever is alone may use everything, in smaller chunks if need be: waiting brings no blocks.
    alone = not state.running and not state.loading
    whole = config.reserve_full_prompt and not alone
    reserve = 0 if alone else int(config.watermark * config.num_blocks)
    if n == 0 or state.kv.room_for(request, hit, local + n, whole=whole, reserve=reserve):
        return n
    return max(0, min(n, state.kv.most_tokens(hit) - local)) if alone else 0
