"""Checks public arguments and names, and adds public amounts exactly, rounded to a stated side."""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections.abc import Collection, Mapping
from decimal import Decimal
from fractions import Fraction
from importlib.resources import files
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any, Literal, TypeAlias, get_args

from langchain_dpicl.exceptions import ConfigurationError

# Errors show the value found, so nothing here may be called with private values.

Adjacency: TypeAlias = Literal["add_remove", "replace_one"]
RowShape: TypeAlias = Literal["slots", "units"]

ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)
ROW_SHAPES: tuple[RowShape, ...] = get_args(RowShape)

_PLAIN = (type(None), bool, int, float, str, PurePath, type)

MAX_INT = 2**63 - 1
"""The largest count: what every database keeps, and every sum as a float holds."""


def fail(name: str, expected: str, found: object, advice: str = "") -> ConfigurationError:
    """Returns the error for a public argument out of range; the caller raises it."""
    return ConfigurationError(
        f"{name}: expected {expected}, found {describe_value(found)}." + (f" {advice}" if advice else "")
    )


def describe_value(found: object) -> str:
    """Returns how a public value reads; what may hold records of somebody, passed by mistake, is shown by its type.

    Of a whole number of thousands of digits, which Python spells nowhere, the size is shown.
    """
    if isinstance(found, type) or not _is_flat(found):
        return (found if isinstance(found, type) else type(found)).__name__
    try:
        return repr(found)
    except ValueError:
        return (
            f"{type(found).__name__} of {found.bit_length()} bits" if isinstance(found, int) else type(found).__name__
        )


def _is_flat(found: object) -> bool:
    """Whether a value is a plain one, or a collection of plain ones."""
    parts: Collection[object] = (found,)
    if isinstance(found, Mapping):
        parts = (*found, *found.values())
    elif isinstance(found, (list, tuple, set, frozenset)):
        parts = found
    return all(isinstance(part, _PLAIN) for part in parts)


def plain_or_type(found: object) -> object:
    """Returns what to show of a value where a plain one is expected: of any other the type alone."""
    return found if isinstance(found, _PLAIN) else type(found)


def check_real(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
) -> float:
    """Returns `value` as a float within the stated interval; refuses NaN, bool and infinities."""
    first, last = "(" if low_open or low == -math.inf else "[", ")" if high_open or high == math.inf else "]"
    bounds = f"a number in {first}{low}, {high}{last}"
    if not is_finite(value):
        raise fail(name, bounds, plain_or_type(value), _of_another_kind(value, float))
    if value < low or value > high or (low_open and value == low) or (high_open and value == high):
        raise fail(name, bounds, value)
    return float(value)


def _of_another_kind(value: Any, kind: type[int | float]) -> str:
    """Returns what to do with a number of numpy or the like; taken as it is, it would overflow or round unseen."""
    kinds = (Integral,) if kind is int else (Real, Decimal)  # int() would cut what is no whole number
    is_number = isinstance(value, kinds) and not isinstance(value, (int, float))
    return f"Write {kind.__name__}(...) around it." if is_number else ""


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number of Python's own; a bool is none."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def check_positive(name: str, value: Any) -> float:
    """Returns `value` as a finite float above zero."""
    return check_real(name, value, low=0.0, low_open=True)


def check_int(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """Returns `value` as an integer within [low, high], and below 2^63; refuses bool and floats."""
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= (MAX_INT if high is None else high):
        return int(value)
    too_large = high is None and isinstance(value, int) and value > MAX_INT
    expected = f"an integer >= {low}" + (" and below 2^63" if too_large else "" if high is None else f" and <= {high}")
    raise fail(name, expected, plain_or_type(value), _of_another_kind(value, int))


def calls_at_once(config: Mapping[str, Any] | None) -> int | None:
    """Returns the model calls that a run may have in flight; None: as many as the engine makes."""
    limit = (config or {}).get("max_concurrency")
    return None if limit is None else check_int("max_concurrency", limit, low=1)


def check_flag(name: str, value: Any) -> bool:
    """Returns `value` if it is True or False."""
    if not isinstance(value, bool):
        raise fail(name, "True or False", plain_or_type(value))
    return value


def check_epsilon(value: Any) -> float:
    """Returns a finite epsilon above zero."""
    return check_positive("epsilon", value)


NEEDS_DELTA = (
    "At delta 0 only exact releases run: counts of declared values, and evaluations of all units (sample=None). "
    "What is asked for draws its noise, threshold or sample with a gap that delta pays for. Give delta=."
)


def check_delta(value: Any) -> float:
    """Returns a delta from 0 (pure differential privacy) to below 1."""
    return check_real("delta", value, low=0.0, high=1.0, high_open=True)


def check_positive_delta(value: Any) -> float:
    """Returns the delta of a share whose noise is drawn with a declared gap: above 0, below 1."""
    delta = check_delta(value)
    if delta == 0.0:
        raise fail("delta", "a number above 0 and below 1", delta, NEEDS_DELTA)
    return delta


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Returns `value` if it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise fail(name, "one of " + ", ".join(repr(c) for c in choices), plain_or_type(value))
    return plain_text(value)


def check_adjacency(value: Any) -> Adjacency:
    """Returns the neighbouring relation, refusing anything but the two that are proved here."""
    return check_choice("adjacency", value, ADJACENCIES)  # type: ignore[return-value]


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


def round_up_at(value: float, places: int = 4) -> float:
    """Returns a number rounded up at a decimal place: of noise, what is enough."""
    return math.ceil(exact(value) * 10**places) / 10**places if math.isfinite(value) else value


def effective_delta(delta: float, implementation_delta: float) -> float:
    """Returns what `delta` leaves for the mechanisms once `implementation_delta` is set aside, rounded down."""
    return round_down(exact(delta) - exact(implementation_delta))


def check_name(name: str, value: Any) -> str:
    """Returns a public name: printable, not empty, at most 200 characters."""
    if not is_name(value):
        is_long = isinstance(value, str) and len(value) > MAX_NAME_LENGTH
        found = f"{len(value)} characters" if is_long else plain_or_type(value)
        raise fail(name, PRINTABLE, found, f"{hidden} {HIDDEN}." if (hidden := hidden_in(value)) else "")
    return plain_text(value)


HIDDEN = "shows nothing, or as a space: leave it out, or write a plain space"
"""What to do about a character of `hidden_in`."""


def hidden_in(text: object) -> str:
    """Returns the first format character or space but " " of a text short enough for a name, as "U+200C"; or "".

    Keyboards and tables write them unseen, such as the joiners of Persian and a space that breaks no line.
    """
    letters = text if isinstance(text, str) and len(text) <= MAX_NAME_LENGTH else ""
    hidden = (letter for letter in letters if letter != " " and unicodedata.category(letter) in {"Cf", "Zs"})
    return next((f"U+{ord(letter):04X}" for letter in hidden), "")


def is_name(value: Any) -> bool:
    """Whether a value can be a public name; characters newer than Unicode 14 can, as other Pythons read the ledger."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_LENGTH:
        return False
    return value.isprintable() or all(letter.isprintable() or in_unicode_14(letter) != letter for letter in value)


def in_unicode_14(text: str) -> str:
    """Returns a text with a space for each character that Unicode 14 lacks.

    That is Python 3.11's Unicode. Later versions fold, compose and print more characters: where processes of several
    versions share a ledger, a unit of one label would be of another label in some of them, and be read for both.
    """
    if text.isascii():
        return text
    newer = _unassigned().findall("".join(set(text)))  # each character once: a text has few, and the pattern is slow
    return text.translate(dict.fromkeys(map(ord, newer), " ")) if newer else text


@functools.cache
def _unassigned() -> re.Pattern[str]:
    """Returns a pattern of the characters that Unicode 14 lacks; the file has the first and last of each run."""
    runs = files("langchain_dpicl.privacy").joinpath("unassigned_in_unicode_14.txt").read_text("ascii").split()
    ends = [(chr(int(first, 16)), chr(int(last, 16))) for first, _, last in (run.partition("-") for run in runs)]
    return re.compile("[" + "".join(f"{first}-{last}" for first, last in ends) + "]")


def plain_text(text: str) -> str:
    """Returns the characters of a text; `str` shows a member of an enumeration by its name instead."""
    return str.__str__(text)


def check_written(name: str, text: str) -> str:
    """Returns a public text that can be written as UTF-8: half of a surrogate pair cannot."""
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise fail(name, "valid Unicode text", "half of a surrogate pair", "Decode it again.")
    return text
