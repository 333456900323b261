"""Structured output: constraints on the text, enforced token by token (or refused)."""

from jaxengine.structured.compiler import GrammarCompiler, Validator
from jaxengine.structured.matcher import Matcher, fill_bitmasks, fill_draft_bitmasks
from jaxengine.structured.sandbox import GrammarError, GrammarTooComplexError
from jaxengine.structured.spec import Spec, check_structured, from_response_format

__all__ = [
    "GrammarCompiler",
    "GrammarError",
    "GrammarTooComplexError",
    "Matcher",
    "Spec",
    "Validator",
    "check_structured",
    "fill_bitmasks",
    "fill_draft_bitmasks",
    "from_response_format",
]
