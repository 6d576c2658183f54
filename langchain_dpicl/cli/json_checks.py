"""Prices the events that a JSON file of accounting checks describes, for the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_dpicl.exceptions import ConfigurationError, DPICLError
from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_delta, check_int, check_positive, check_real
from langchain_dpicl.privacy.accounting import epsilon_upper_bound
from langchain_dpicl.privacy.accounting.events import (
    BoundedRangeEvent,
    ComposedEvent,
    Event,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
    SubsampledEvent,
)
from langchain_dpicl.privacy.extensions.logit_sums import ClippedLogitMean
from langchain_dpicl.privacy.mechanisms.vote_sums import VoteSum

_SPELLINGS: dict[str, tuple[Adjacency | None, RowShape]] = {
    "any": (None, "slots"),
    "add_remove": ("add_remove", "slots"),
    "add_remove_null": ("add_remove", "units"),
    "substitution": ("replace_one", "slots"),
    "replace_one": ("replace_one", "slots"),
}
_ADJACENCY_OF_TYPE: dict[str, Adjacency] = {
    "poisson_gaussian": "add_remove",
    "poisson_pure": "add_remove",
    "slot_gaussian": "replace_one",
    "slot_pure": "replace_one",
}

_Fields = Mapping[str, Any]


def _gaussian(fields: _Fields) -> Event:
    return GaussianEvent(check_positive("noise_multiplier", fields["noise_multiplier"]))


def _pure(fields: _Fields) -> Event:
    return PureEvent(check_positive("eps", fields["eps"]))


def _sampled_event(base: Callable[[_Fields], Event]) -> Callable[[_Fields], Event]:
    def event(fields: _Fields) -> Event:
        return SubsampledEvent(base(fields), check_real("q", fields["q"], low=0.0, high=1.0, low_open=True))

    return event


def _bounded_range_check(fields: _Fields) -> Event:
    return BoundedRangeEvent(check_positive("E", fields["E"]))


def _votes(fields: _Fields, name: str) -> Event:
    """A noisy vote histogram; the format fixes its sensitivity to that of a vote that changes."""
    l2 = VoteSum().sensitivity(row_shape="slots", adjacency="replace_one").require("l2")
    return GaussianEvent(check_positive(name, fields[name]) / l2)


def _gnmax(fields: _Fields) -> Event:
    return _votes(fields, "sigma")


_SIMPLE: dict[str, tuple[frozenset[str], Callable[[_Fields], Event]]] = {
    "gaussian": (frozenset({"noise_multiplier"}), _gaussian),
    "poisson_gaussian": (frozenset({"q", "noise_multiplier"}), _sampled_event(_gaussian)),
    "slot_gaussian": (frozenset({"q", "noise_multiplier"}), _sampled_event(_gaussian)),
    "pure": (frozenset({"eps"}), _pure),
    "poisson_pure": (frozenset({"q", "eps"}), _sampled_event(_pure)),
    "slot_pure": (frozenset({"q", "eps"}), _sampled_event(_pure)),
    "bounded_range": (frozenset({"E"}), _bounded_range_check),
    "gnmax": (frozenset({"sigma"}), _gnmax),
}
_EXP_MECH = frozenset({"clip", "slots", "tau", "count"})
_CONFIDENT_GNMAX = frozenset({"sigma1", "sigma2", "thresholds", "labels"})


def _exp_mech(fields: _Fields, row_shape: RowShape, adjacency: Adjacency) -> Event:
    """Softmax sampling at temperature tau of the mean of clipped logits."""
    mean = ClippedLogitMean(
        clip=check_positive("clip", fields["clip"]), num_slots=check_int("slots", fields["slots"], low=1)
    )
    score_range = mean.sensitivity(row_shape=row_shape, adjacency=adjacency).require("range")
    once = BoundedRangeEvent(score_range / check_positive("tau", fields["tau"]))
    return RepeatedEvent(once, check_int("count", fields["count"], low=0))


def _confident_gnmax(fields: _Fields) -> Event:
    """Threshold tests on the largest count (sensitivity 1) and noisy histograms; an unused noise may be null."""
    thresholds = check_int("thresholds", fields["thresholds"], low=0)
    labels = check_int("labels", fields["labels"], low=0)
    parts: list[Event] = []
    if thresholds:
        parts.append(RepeatedEvent(GaussianEvent(check_positive("sigma1", fields["sigma1"])), thresholds))
    if labels:
        parts.append(RepeatedEvent(_votes(fields, "sigma2"), labels))
    return ComposedEvent(tuple(parts))


def event_of_check(check: Mapping[str, Any]) -> tuple[Event, Adjacency]:
    """Translates one check.

    Args:
      check: mapping with `id`, `mechanisms` (each with a `type` and its parameters), `adjacency` and `delta`.

    Returns:
      The composition of all mechanisms, and the adjacency to price it under.

    Raises:
      ConfigurationError: a field is missing, unknown, out of range or contradicts the adjacency; the message names
        the check and the field.

    >>> event_of_check(
    ...     {
    ...         "id": "A1",
    ...         "mechanisms": [{"type": "gaussian", "noise_multiplier": 1.0, "count": 2}],
    ...         "adjacency": "any",
    ...         "delta": 1e-5,
    ...     }
    ... )
    (RepeatedEvent(event=GaussianEvent(noise_multiplier=1.0), count=2), 'add_remove')
    """
    name = _identifier(check)
    spelling = check.get("adjacency")
    if not isinstance(spelling, str) or spelling not in _SPELLINGS:
        raise _fault(name, "adjacency", f"expected one of {', '.join(_SPELLINGS)}; found {spelling!r}")
    mechanisms = check.get("mechanisms")
    if not isinstance(mechanisms, Sequence) or isinstance(mechanisms, str) or not mechanisms:
        raise _fault(name, "mechanisms", f"expected a list of at least one mechanism, found {mechanisms!r}")
    declared, row_shape = _SPELLINGS[spelling]
    adjacency = declared or _implied_adjacency(mechanisms)
    parts = []
    for position, fields in enumerate(mechanisms):
        try:
            parts.append(_event_of_mechanism(fields, row_shape, adjacency))
        except DPICLError as error:
            raise _fault(name, f"mechanisms[{position}]", str(error)) from error
    return (parts[0] if len(parts) == 1 else ComposedEvent(tuple(parts))), adjacency


def _implied_adjacency(mechanisms: Sequence[Any]) -> Adjacency:
    """What the sampled types of a check with adjacency "any" were priced under."""
    types = (fields.get("type") for fields in mechanisms if isinstance(fields, Mapping))
    return next((_ADJACENCY_OF_TYPE[t] for t in types if isinstance(t, str) and t in _ADJACENCY_OF_TYPE), "add_remove")


def _event_of_mechanism(fields: Any, row_shape: RowShape, adjacency: Adjacency) -> Event:
    kind = fields.get("type") if isinstance(fields, Mapping) else None
    if not isinstance(kind, str) or kind not in {*_SIMPLE, "exp_mech", "confident_gnmax"}:
        known = ", ".join(sorted({*_SIMPLE, "exp_mech", "confident_gnmax"}))
        raise ConfigurationError(f"type: expected one of {known}; found {kind!r}.")
    if _ADJACENCY_OF_TYPE.get(kind, adjacency) != adjacency:
        raise ConfigurationError(f"type: expected one that is defined under {adjacency!r}, found {kind!r}.")
    if kind == "exp_mech":
        return _exp_mech(_exactly(fields, _EXP_MECH), row_shape, adjacency)
    if kind == "confident_gnmax":
        return _confident_gnmax(_exactly(fields, _CONFIDENT_GNMAX))
    names, once = _SIMPLE[kind]
    given = _exactly(fields, names | {"count"})
    return RepeatedEvent(once(given), check_int("count", given["count"], low=0))


def _exactly(fields: _Fields, names: frozenset[str]) -> _Fields:
    found = set(fields) - {"type"}
    if found != names:
        raise ConfigurationError(
            f"fields: expected {', '.join(sorted(names))}; found {', '.join(sorted(map(str, found)))}."
        )
    return fields


def evaluate_checks(data: Mapping[str, Any] | Sequence[Any]) -> list[dict[str, Any]]:
    """Prices every check of a file.

    Args:
      data: a mapping with the list `checks`, or the list itself.

    Returns:
      One `{"id": str, "epsilon": float}` per check, in order; epsilon is an upper bound, rounded up.

    Raises:
      ConfigurationError: the data is no list of checks, or a check is malformed (its id and field are named).
    """
    checks = data.get("checks") if isinstance(data, Mapping) else data
    if not isinstance(checks, Sequence) or isinstance(checks, (str, bytes)):
        raise ConfigurationError(
            f"checks: expected a list, or a mapping with the list 'checks'; found {type(checks).__name__}."
        )
    return [{"id": _identifier(check), "epsilon": _price(check)} for check in checks]


def _price(check: Mapping[str, Any]) -> float:
    event, adjacency = event_of_check(check)
    try:
        delta = check_delta(check.get("delta"))
    except ConfigurationError as error:
        raise _fault(_identifier(check), "delta", str(error)) from error
    return epsilon_upper_bound(event, delta=delta, adjacency=adjacency)


def _identifier(check: Any) -> str:
    if not isinstance(check, Mapping):
        raise ConfigurationError(f"checks: expected mappings, found {type(check).__name__}.")
    name = check.get("id")
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"check: field 'id': expected a text that is not empty, found {name!r}.")
    return name


def _fault(name: str, field: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"check {name!r}: field {field!r}: {problem.rstrip('.')}.")


# Importing runs the user's code in the environment of the command, as pytest and uvicorn do.
