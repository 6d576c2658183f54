"""Adds public amounts exactly, rounds them to a stated side, and checks public names."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, TypeAlias

from langchain_dpicl.privacy._validate import fail, plain_or_type

# A float counts as the decimal that `repr` shows, so that ten shares of 0.1 fill a budget of 1 exactly.

MAX_NAME_LENGTH = 200
PRINTABLE = f"a printable string of 1 to {MAX_NAME_LENGTH} characters"
"""What a public name is, in words."""

Amount: TypeAlias = Fraction | int
"""An exact amount; whole amounts are `int`, which adds and compares faster."""

_WHOLE_FLOATS = 2**53


def exact(value: float) -> Fraction:
    """Returns the decimal that `repr` shows, exactly."""
    return Fraction(repr(float(value)))


def round_down(value: Amount) -> float:
    """Returns the largest float whose decimal is not above `value`, up to one unit in the last place."""
    out = float(value)
    if type(value) is int and -_WHOLE_FLOATS <= value <= _WHOLE_FLOATS:  # exact as a float
        return out
    while exact(out) > value:
        out = math.nextafter(out, -math.inf)
    return out


def round_up(value: Amount) -> float:
    """Returns the smallest float whose decimal is not below `value`, up to one unit in the last place."""
    out = float(value)
    while exact(out) < value:
        out = math.nextafter(out, math.inf)
    return out


def effective_delta(delta: float, implementation_delta: float) -> float:
    """Returns what `delta` leaves for the mechanisms once `implementation_delta` is set aside, rounded down."""
    return round_down(exact(delta) - exact(implementation_delta))


def check_name(name: str, value: Any) -> str:
    """Returns a public name: printable, not empty, at most 200 characters."""
    if not is_name(value):
        is_long = isinstance(value, str) and len(value) > MAX_NAME_LENGTH
        raise fail(name, PRINTABLE, f"{len(value)} characters" if is_long else plain_or_type(value))
    return str(value)


def is_name(value: Any) -> bool:
    """Whether a value can be a public name."""
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_LENGTH and value.isprintable()


def is_written(text: str) -> bool:
    """Whether a text can be written as UTF-8: half of a surrogate pair cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
