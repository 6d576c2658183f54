"""Runs membership inference against prompted models (Duan et al. 2023, section 3); results are NOT PRIVATE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np
from tqdm.auto import tqdm

from langchain_dpicl.audit.membership_results import MembershipResult, Nonmembers
from langchain_dpicl.audit.membership_targets import Record, Target
from langchain_dpicl.audit.scores import Floats
from langchain_dpicl.backends.silent import Hidden
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, PrivateAccessError, RecordError
from langchain_dpicl.privacy._validate import check_choice, check_int, fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM, Ints, SecureRandom


def membership_attack(
    records: Iterable[Record],
    target: Target,
    *,
    num_records: int,
    num_prompts: int = 100,
    num_members: int = 1,
    num_nonmembers: int = 50,
    nonmembers: Nonmembers = "any",
    text_key: str = "text",
    label_key: str = "label",
    progress: bool | None = None,
    rng: SecureRandom = SYSTEM_RANDOM,
) -> MembershipResult:
    """Attacks a target: can its answers tell who it was built of?

    Each of `num_prompts` times: draws `num_records` records, builds the target of them, and scores `num_members` of
    them and `num_nonmembers` others, asked in random order. A score is what the target gives the record's own label.

    Formal guarantees:
      - Before the target is built, members and non-members are alike: any of them could have been the other.
      - Records with the same text count once, so that no non-member reads as a member.
      - NONE of privacy: scores are functions of the records. The result says so.

    Args:
      records: made up, or your own; never what a ledger protects. They are read in clear, and the target's model sees
        those that it is built of.
      target: what is attacked; see `membership_targets`.
      num_records: records that the target is built of: the shots of a few-shot prompt, the data set of a component.
      num_prompts: how often it is built.
      num_members: records scored of those it was built of; 1 as in the paper.
      num_nonmembers: records scored that it was not built of.
      nonmembers: "any"; or "same_label": with the labels of the members in turn. A prompt that only says its labels
        again leaks to the first and not to the second.
      text_key: field of the text that is asked.
      label_key: field of the right label.
      progress: True shows a bar, False hides it, None shows it on a terminal only.
      rng: who is a member, and in which order they are asked.

    Returns:
      The scores; NOT PRIVATE.

    Raises:
      PrivateAccessError: `records` is a holder of private examples.
      RecordError: a record has no such texts, or a label that the target does not have.
      ConfigurationError: too few records, or what builds or answers failed: the message says with what kind of error,
        and none of it holds a record.

    Source: Duan et al. (2023), Flocks of Stochastic Parrots, section 3.
    """
    if isinstance(records, PrivateExamples):
        raise PrivateAccessError("membership_attack: expected a list of made-up or own records, found PrivateExamples.")
    check_choice("nonmembers", nonmembers, get_args(Nonmembers))
    shape = _Shape(
        check_int("num_records", num_records, low=1),
        check_int("num_members", num_members, low=1, high=num_records),
        check_int("num_nonmembers", num_nonmembers, low=1),
        is_same_label=nonmembers == "same_label",
    )
    pool, faults = _read(records, target, (text_key, label_key), shape)
    del records  # from here on in a box: no frame of an error shows one
    if faults:
        raise RecordError(faults) if pool is None else ConfigurationError(faults)
    inside, outside = [], []
    bar = tqdm(
        range(check_int("num_prompts", num_prompts, low=1)),
        desc=f"membership: {target.name}",
        unit="prompt",
        leave=False,
        disable=None if progress is None else not progress,
    )
    for _ in bar:
        scores, failure = _attempt(pool, target, shape, rng)
        if failure is not None:
            raise failure
        inside.append(scores[: shape.num_members])
        outside.append(scores[shape.num_members :])
    return MembershipResult(
        name=target.name,
        reads=target.reads,
        num_records=num_records,
        nonmembers=nonmembers,
        claim=target.claim,
        member_scores=np.array(inside),
        nonmember_scores=np.array(outside),
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    num_records: int
    num_members: int
    num_nonmembers: int
    is_same_label: bool


@dataclass(frozen=True, slots=True)
class _Pool:
    """Distinct records, with the place of each one's label among the target's."""

    records: tuple[dict[str, str], ...]
    texts: tuple[str, ...]
    places: Ints


def _read(
    records: Iterable[Record], target: Target, keys: tuple[str, str], shape: _Shape
) -> tuple[Hidden[_Pool] | None, str]:
    """Returns the records in a box, and what is wrong with them: no word of it is a record's."""
    place = {label: index for index, label in enumerate(target.labels)}
    distinct: dict[str, dict[str, str]] = {}
    for record in records:
        known = isinstance(record, Mapping) and all(isinstance(record.get(key), str) for key in keys)
        if not known or record[keys[1]] not in place:
            return None, (
                f"records: expected texts under {list(keys)}, the label among {list(target.labels)}, found another "
                "one. Index and value are hidden."
            )
        distinct.setdefault(record[keys[0]], dict(record))
    places = np.array([place[record[keys[1]]] for record in distinct.values()], dtype=np.int64)
    needed = shape.num_records + shape.num_nonmembers
    num_read = len(places)
    if shape.is_same_label:
        counts = np.bincount(places, minlength=len(place))
        num_read = int(counts[counts > 0].min(initial=num_read))
    box = Hidden(_Pool(tuple(distinct.values()), tuple(distinct), places))
    if num_read < needed:
        of = "of every label that there is, " if shape.is_same_label else ""
        return box, f"records: expected at least {needed} {of}with distinct texts, found {num_read}."
    return box, ""


def _attempt(
    box: Hidden[_Pool] | None, target: Target, shape: _Shape, rng: SecureRandom
) -> tuple[Floats, DPICLError | None]:
    """Returns the scores of one prompt, members first, or an error whose frames and words hold no record."""
    failure: DPICLError
    try:
        return _scores(box, target, shape, rng), None  # type: ignore[arg-type]  # it is a box where nothing is wrong
    except DPICLError as error:
        failure = error.with_traceback(None)
        failure.__cause__ = failure.__context__ = None
    except Exception as error:  # noqa: BLE001  what builds is anybody's, and its words may be a record's
        advice = "Call target.build(records)(texts) on made-up records to see where."
        failure = fail(f"target {target.name!r}", "something that builds and answers", type(error).__name__, advice)
    return np.empty(0), failure


def _scores(box: Hidden[_Pool], target: Target, shape: _Shape, rng: SecureRandom) -> Floats:
    pool = box.reveal()
    order = rng.permutation(len(pool.texts))
    built_of, rest = order[: shape.num_records], order[shape.num_records :]
    members = rng.permutation(shape.num_records)[: shape.num_members]
    asked = np.concatenate([built_of[members], _others(pool, built_of[members], rest, shape)])
    ask = target.build([pool.records[index] for index in built_of])
    # A target that drifts while it is asked (a memory, a cache, a limit) would tell members by when they are asked.
    turns = rng.permutation(len(asked))
    rows = np.asarray(ask([pool.texts[index] for index in asked[turns]]), dtype=np.float64)
    expected = (len(asked), len(target.labels))
    if rows.shape != expected:
        raise fail(f"target {target.name!r}", f"rows of shape {expected}", rows.shape)
    if np.isnan(rows).any():
        raise fail(f"target {target.name!r}", "numbers", "NaN")
    scores = np.empty(len(asked))
    scores[turns] = rows[np.arange(len(asked)), pool.places[asked[turns]]]
    return scores


def _others(pool: _Pool, members: Ints, rest: Ints, shape: _Shape) -> Ints:
    """Returns the places of the non-members: the first that were drawn, or those with the members' labels in turn."""
    if not shape.is_same_label:
        return rest[: shape.num_nonmembers]
    by_label = {label: iter(rest[pool.places[rest] == label]) for label in set(pool.places[members].tolist())}
    turns = [int(pool.places[member]) for member in members]
    return np.array([next(by_label[turns[turn % len(turns)]]) for turn in range(shape.num_nonmembers)])
