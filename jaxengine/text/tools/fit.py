"""Scalars as their schema wants them, where only one reading fits: "5" for an integer is 5, and 5
for a string is "5". What no conversion would make fit stays as it is written."""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation

from jaxengine.text.tools.schema import Shape

_NUMBER = re.compile(r"([+-]?)(\d+(?:_\d+)*)?(?:(\.)(\d+(?:_\d+)*)?)?(?:[eE]([+-]?\d+))?", re.ASCII)
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_BASED = re.compile(r"([+-]?)(0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+)")
_LONGEST = 4000  # digits; Python's and others' JSON readers refuse longer numbers
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
_NULL = ("null", "None", "NULL", "none", "Null", "nil", "undefined")
_NO_NUMBER = ("nan", "infinity", "inf")


def quoted(text: str) -> str:
    """As a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def number(text: str) -> str | None:
    """A number in JSON's spelling; None if it is none: +5, 05, .5, 5., 1_000, 0x1F are some."""
    if len(text) > _LONGEST:
        return None
    if _JSON_NUMBER.fullmatch(text):
        return text
    based = _BASED.fullmatch(text)
    if based is not None and len(text) < 100:
        return based[1].replace("+", "") + str(int(based[2], 0))
    match = _NUMBER.fullmatch(text)
    if match is None or not (match[2] or match[4]):
        return None
    whole = (match[2] or "").replace("_", "").lstrip("0") or "0"
    fraction = "." + (match[4] or "0").replace("_", "") if match[3] else ""
    exponent = f"e{match[5]}" if match[5] else ""
    return f"{match[1].replace('+', '')}{whole}{fraction}{exponent}"


def whole_number(text: str) -> str | None:
    """A JSON number without point and exponent; None if its value is not whole."""
    if "." not in text and "e" not in text and "E" not in text:
        return text
    try:
        value = Decimal(text)
    except InvalidOperation:  # an exponent beyond all measure
        return None
    if value == 0:
        return "0"
    if value.adjusted() > 400 or value != value.to_integral_value():
        return None
    return str(int(value))


def fit_number(text: str, written: str, shape: Shape) -> str:
    """For `text`, a JSON number; `written` is how the model spelled it."""
    types = shape.types
    if types is None or "number" in types:
        return text
    if "integer" in types:
        whole = whole_number(text)
        if whole is not None:
            return whole
    if "string" in types:
        return quoted(written)
    if "boolean" in types and text in ("0", "1"):
        return "true" if text == "1" else "false"
    return text


def fit_word(written: str, shape: Shape) -> str:
    """For what stands without quotes: a number, a literal of JSON or Python, or plain text."""
    types = shape.types
    member = _member(written, shape)
    if member is not None:
        return member
    spelled = number(written)
    if spelled is not None:
        return fit_number(spelled, written, shape)
    if written in _TRUE or written in _FALSE:
        if types is not None and "boolean" not in types and "string" in types:
            return quoted(written)
        return "true" if written in _TRUE else "false"
    if written in _NULL:
        return "null"
    if written.lstrip("+-").lower() in _NO_NUMBER:
        if types is None or "string" not in types:
            return "null"
    return quoted(written)


def fit_string(text: str, shape: Shape) -> str | None:
    """For the text of a string where the schema wants none; None if it stays a string."""
    types = shape.types
    if shape.values and text not in shape.values:
        member = _member(text.strip(), shape)
        if member is not None:
            return member
    if types is None or "string" in types:
        return None
    text = text.strip()
    if "null" in types and text in _NULL:
        return "null"
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower()
    spelled = number(text)
    if spelled is not None and "number" in types:
        return spelled
    if spelled is not None and "integer" in types:
        return whole_number(spelled)
    return None


def _member(written: str, shape: Shape) -> str | None:
    """The one value that the schema lists which is written so; None if it lists none."""
    for value in shape.values:
        if not isinstance(value, str) and written == json.dumps(value):
            return written
    return quoted(written) if written in shape.values else None
