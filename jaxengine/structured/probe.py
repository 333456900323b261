"""A child process that builds grammars for its parent, so that a runaway build can be killed.

Some schemas keep the grammar library busy for minutes and it cannot be interrupted. Each build
runs here under an alarm whose default action ends the process, whatever native code does, and
under a limit of memory. Run as a script; it imports nothing of the engine.

One line of JSON in: {"kind", "text", "seconds"}; one line out: {"grammar"} or {"error"}.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from typing import Any

import llguidance

MEMORY_BYTES = 4 << 30
BYTES = 256
_TOKEN = re.compile(r"<\[\d+\]>")
JSON_OPTIONS: Any = {
    # No whitespace: unlimited runs of it are legal JSON, and models get stuck in them.
    "whitespace_flexible": False,
    "lenient": False,
    # No unicode escapes: a free key must not spell a declared one in another way.
    "json_allowed_escapes": '"\\bfnrt',
}


class ByteTokenizer:
    """The smallest tokenizer that can write any text: a token a byte, and an end token."""

    is_tokenizer_wrapper = True
    eos_token_id = BYTES
    bos_token_id = None
    tokens = [bytes([byte]) for byte in range(BYTES)] + [b"<end>"]
    special_token_ids = [BYTES]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        verbose_errors=False,
        # The library's own limit would pass an object of a thousand properties here and fail on
        # it while tokens are sampled.
        max_items_in_row=20_000,
        step_max_items=20_000,  # such an object needs a quarter; an ambiguous grammar all it gets
        step_lexer_fuel=500_000,  # 10 ms of CPU at most
        max_lexer_states=50_000,  # of 1 to 2 kB; they are kept as long as the grammar
    )


def to_grammar(kind: Any, text: str) -> str:
    """The library's form of a spec. Raises ValueError."""
    if kind == "json":
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
    return llguidance.grammar_from(kind, text)


def build(tokenizer: llguidance.LLTokenizer, kind: str, text: str) -> dict[str, str]:
    try:
        grammar = probed = to_grammar(kind, text)
        if kind == "grammar" and _TOKEN.search(text):
            # a token by its number: this small tokenizer has only one that is no byte
            probed = to_grammar(kind, _TOKEN.sub(f"<[{BYTES}]>", text))
    except (ValueError, RecursionError) as e:
        return {"error": str(e) or "it is nested too deep"}
    matcher = llguidance.LLMatcher(tokenizer, probed, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        error = matcher.get_error()
        return {"error": "nothing satisfies it" if "NoExtension" in error else error}
    warnings = matcher.get_grammar_warnings()
    return {"error": warnings[0]} if warnings else {"grammar": grammar}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    small: Any = ByteTokenizer()
    tokenizer = llguidance.LLTokenizer(small, eos_token=[BYTES])
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        answer = build(tokenizer, request["kind"], request["text"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
