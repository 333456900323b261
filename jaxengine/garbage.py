"""Python's cyclic garbage collector around the start of a process that holds a model.

Imports and traces make many objects that stay: going through them again and again costs a tenth of
a start, and later a pause of a step now and then.
"""

from __future__ import annotations

import gc


def pause() -> None:
    """First thing in the process."""
    gc.disable()


def settle(one_answer: bool = False) -> None:
    """The start is over: what lives now lives for ever, and full collections need not visit it.
    `one_answer`: the process ends soon, so that its rubbish may stay, and the answer comes sooner.
    """
    if not one_answer:
        gc.collect()
    gc.freeze()
    gc.enable()
