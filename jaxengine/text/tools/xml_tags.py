"""The tags of Qwen3-Coder's calls, in the spellings that models give them."""

from __future__ import annotations

import re
from typing import NamedTuple

TOOL_CALL, TOOL_CALLED = "<tool_call>", "</tool_call>"
FUNCTION = "<function"
_NAMED = (
    r"(?:[ \t]*=|[ \t]+name[ \t]*=)[ \t]*"
    r"""(?:"([^"<>\n]{1,256})"|'([^'<>\n]{1,256})'|([^<>\n"'=]{1,256}?))[ \t\r]*"""
)
# ">" may be missing at the end of the line or before the next tag
_FUNCTION = re.compile(rf"<function{_NAMED}(?:>|(?=[<\n]))")
_PARAMETER = re.compile(rf"<param(?:eter)?{_NAMED}(?:>|(?=\n))")
_FUNCTION_END = re.compile(r"</func\w{0,20}\s{0,20}[^<>\n]{0,64}>")
_PARAMETER_END = re.compile(r"</param\w{0,20}\s{0,20}[^<>\n]{0,64}>")
# what may still become one of them
_BEGUN = re.compile(
    r"<(?:function|param(?:eter)?)"
    r"(?:[ \t]*(?:=[^<>\n]{0,300})?|[ \t]+(?:n|na|nam|name[ \t]*(?:=[^<>\n]{0,300})?))"
)
_END_BEGUN = re.compile(r"</(?:func|param)\w{0,20}\s{0,20}[^<>\n]{0,64}")
_STARTS = ("<function", "<parameter", "</func", "</param", TOOL_CALL, TOOL_CALLED)
_LONGEST = 700


class Tag(NamedTuple):
    # "call", "function", "parameter", with "/" before it the closing ones; "/name": the parameter's
    # name closes it; "": none
    kind: str
    end: int  # the place behind it
    name: str = ""


def tag_at(text: str, at: int, final: bool, closer: str = "") -> Tag | None:
    """The tag that begins at `at` ("" as its kind for none); None when that is not known yet.
    `closer` is one more way to close a parameter."""
    if not text.startswith("<", at):
        return Tag("", at)
    if text.startswith(TOOL_CALL, at):
        return Tag("call", at + len(TOOL_CALL))
    if text.startswith(TOOL_CALLED, at):
        return Tag("/call", at + len(TOOL_CALLED))
    if closer and text.startswith(closer, at):
        return Tag("/name", at + len(closer))
    for kind, pattern in (("/function", _FUNCTION_END), ("/parameter", _PARAMETER_END)):
        match = pattern.match(text, at)
        if match is not None:
            return Tag(kind, match.end())
    for kind, pattern in (("function", _FUNCTION), ("parameter", _PARAMETER)):
        match = pattern.match(text, at)
        if match is not None:
            name = (match[1] or match[2] or match[3]).strip()
            return Tag(kind if name else "", match.end(), name)
    tail = text[at : at + _LONGEST]
    if not final and len(tail) < _LONGEST and may_be_tag(tail, closer):
        return None
    return Tag("", at)


def may_be_tag(tail: str, closer: str = "") -> bool:
    """Whether the whole of `tail` can be the beginning of a tag."""
    if any(start.startswith(tail) for start in _STARTS) or (closer and closer.startswith(tail)):
        return True
    return bool(_BEGUN.fullmatch(tail) or _END_BEGUN.fullmatch(tail))
