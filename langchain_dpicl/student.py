"""Searches a labelled pool for the demonstrations that make the best prompt, scored on held-back entries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_dpicl._voting_options import VotingTask
from langchain_dpicl.asking import Query
from langchain_dpicl.backends.label_rows import LabelRows
from langchain_dpicl.backends.walk import Walk
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError
from langchain_dpicl.labelled_pool import PoolEntry
from langchain_dpicl.privacy._validate import check_int, check_real, fail


@dataclass(frozen=True, slots=True)
class Candidate:
    """One prompt that was scored.

    Attributes:
      places: positions of its demonstrations in the pool, in the order of the prompt.
      right: number of held-back entries whose label it predicted.
      confidence: mean probability of the labels of held-back entries.
    """

    places: tuple[int, ...]
    right: int
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the candidate as JSON values."""
        return {"places": list(self.places), "right": self.right, "confidence": self.confidence}

    @classmethod
    def from_dict(cls, state: Any) -> Candidate:
        """Reads what `to_dict` returned."""
        state = _object("candidate", state, {"places", "right", "confidence"})
        confidence = check_real("confidence", state["confidence"], low=0.0, high=1.0)
        return cls(_places("places", state["places"]), check_int("right", state["right"], low=0), confidence)


@dataclass(frozen=True, slots=True)
class StudentChoice:
    """The best prompt, and all prompts that were scored. Public.

    Attributes:
      demonstrations: positions of the best prompt's demonstrations in the pool, in the order of the prompt.
      held_back: positions of the entries that candidates were scored on; none is a demonstration of any candidate.
      candidates: every prompt that was scored.
    """

    demonstrations: tuple[int, ...]
    held_back: tuple[int, ...]
    candidates: tuple[Candidate, ...]

    @property
    def validated(self) -> int:
        """Number of held-back entries."""
        return len(self.held_back)

    @property
    def right(self) -> int:
        """Number of held-back entries whose label the best prompt predicted."""
        return _best(self.candidates).right

    @property
    def accuracy(self) -> float:
        """Share of held-back entries whose label in the pool, which may be wrong, the best prompt predicted.

        Biased upwards, as the best of many candidates: measure an accuracy for a report on other inputs.
        """
        return self.right / len(self.held_back)

    def to_dict(self) -> dict[str, Any]:
        """Returns the choice as JSON values; `from_dict` reads them."""
        return {
            "demonstrations": list(self.demonstrations),
            "held_back": list(self.held_back),
            "right": self.right,
            "validated": self.validated,
            "accuracy": self.accuracy,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }

    @classmethod
    def from_dict(cls, state: Any) -> StudentChoice:
        """Reads what `to_dict` returned, and nothing else."""
        keys = {"demonstrations", "held_back", "right", "validated", "accuracy", "candidates"}
        state = _object("student", state, keys)
        candidates = tuple(Candidate.from_dict(each) for each in _list("candidates", state["candidates"]))
        held_back = _places("held_back", state["held_back"])
        choice = cls(_places("demonstrations", state["demonstrations"]), held_back, candidates)
        shown = {place for candidate in candidates for place in candidate.places}
        if choice.demonstrations != _best(candidates).places or not shown.isdisjoint(held_back):
            raise ConfigurationError("student: expected the best candidate, and none of the entries held back.")
        if any(candidate.right > len(held_back) for candidate in candidates) or choice.to_dict() != dict(state):
            raise ConfigurationError("student: expected counts that fit the candidates.")
        return choice


def choose_student(
    entries: Sequence[PoolEntry],
    *,
    task: VotingTask,
    scorer: LabelRows,
    shots: int,
    num_candidates: int,
    num_validation: int,
    seed: int,
    records_of: Callable[[PoolEntry], Mapping[str, str]],
    query_of: Callable[[PoolEntry], Query],
    tick: Callable[[], object],
) -> Walk[StudentChoice]:
    """Scores prompts made of labelled entries on other labelled entries, and returns the best.

    Formal guarantees:
      - Reads public entries only and spends nothing. The same entries, numbers and model give the same choice.
      - No held-back entry is a demonstration of any candidate, and none repeats the input of one.

    Each candidate takes labels in turns, so that the numbers of demonstrations per label differ by at most one while
    entries last. The best has the most labels right, then the highest mean probability of the labels; ties go to the
    first.     At most half of the entries are held back, and so few that `shots` remain if there are enough.

    Args:
      entries: entries of a pool; unlabelled ones and repeated inputs are ignored.
      task: labels and prompt templates.
      scorer: scores the labels, in the order of `task.labels`.
      shots: demonstrations of a prompt; fewer if there are not as many.
      num_candidates: prompts to score; equal ones are scored once.
      num_validation: entries to hold back; fewer if there are not as many.
      seed: public; selects the candidates and the held-back entries.
      records_of: returns the fields of an entry with its label, for the template of examples.
      query_of: returns the query of an entry.
      tick: called after each scored candidate.

    Source: Duan et al. (2023), Flocks of Stochastic Parrots: the student's prompt.
    """
    for name, value in (("shots", shots), ("num_candidates", num_candidates), ("num_validation", num_validation)):
        check_int(name, value, low=1)
    check_int("seed", seed, low=0)
    labels = _labels(entries, task.labels)
    held_back = _held_back(labels, min(num_validation, len(labels) // 2, max(1, len(labels) - shots)), seed)
    # Held-back entries are chosen before any candidate, so they are a fair test for all of them.
    free = {place: label for place, label in labels.items() if place not in held_back}
    drawn = (_draw(free, shots, f"{seed}/{number}") for number in range(num_candidates))
    wanted = [task.labels.index(labels[place]) for place in held_back]
    asked = [task.wording.renderer(task.queries(query_of(entries[place]))) for place in held_back]
    candidates = []
    for places in dict.fromkeys(drawn):
        records = [records_of(entries[place]) for place in places]
        rows = yield scorer.ask_public_rows([render(records) for render in asked])
        candidates.append(Candidate(places, *_score(rows, wanted, scorer.width)))
        tick()
    return StudentChoice(_best(candidates).places, held_back, tuple(candidates))


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the best candidate; the first of equals."""
    return max(candidates, key=lambda candidate: (candidate.right, candidate.confidence))


def _labels(entries: Sequence[PoolEntry], known: tuple[str, ...]) -> dict[int, str]:
    """Returns the labels of the usable positions, in order: labelled, each input once."""
    labels: dict[int, str] = {}
    seen: set[frozenset[tuple[str, str]]] = set()
    for place, entry in enumerate(entries):
        key = frozenset(entry.fields.items())
        if entry.label is None or key in seen:
            continue
        if entry.label not in known:
            raise fail(f"entries[{place}].label", f"one of {known!r}", entry.label)
        seen.add(key)
        labels[place] = entry.label
    if len(labels) < 2:
        advice = "Label more inputs, or add labelled ones with add_public_example."
        raise fail(
            "entries", "at least two different inputs with a label (one to show, one to hold back)", len(labels), advice
        )
    return labels


def _held_back(labels: Mapping[int, str], count: int, seed: int) -> tuple[int, ...]:
    """Returns `count` positions with labels in proportion, rare labels last, in the order of the pool."""
    ranked: list[tuple[float, int, bytes, int]] = []
    for group in _groups(labels, f"{seed}/held back").values():
        size = len(group)
        # The members of each group are spread evenly over (0, 1), so every prefix of the merged list is proportional.
        ranked.extend(((rank + 0.5) / size, -size, _hash(f"{seed}/{place}"), place) for rank, place in enumerate(group))
    return tuple(sorted(place for *_, place in sorted(ranked)[:count]))


def _draw(labels: Mapping[int, str], shots: int, name: str) -> tuple[int, ...]:
    """Returns the positions of one candidate's demonstrations: labels in turns, then shuffled."""
    groups = _groups(labels, name)
    turns = sorted(groups, key=lambda label: _hash(f"{name}/{label}"))
    most = max(len(group) for group in groups.values())
    in_turns = [groups[label][turn] for turn in range(most) for label in turns if turn < len(groups[label])]
    return tuple(_shuffled(in_turns[:shots], name))


def _groups(labels: Mapping[int, str], name: str) -> dict[str, list[int]]:
    """Returns the positions of each label, in a pseudo-random order that depends on `name` only."""
    groups: dict[str, list[int]] = {}
    for place in _shuffled(labels, name):
        groups.setdefault(labels[place], []).append(place)
    return groups


def _shuffled(places: Iterable[int], name: str) -> list[int]:
    return sorted(places, key=lambda place: _hash(f"{name}/{place}"))


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _score(rows: NDArray[np.float64], wanted: Sequence[int], width: int) -> tuple[int, float]:
    """Returns the number of rows whose likeliest label is the wanted one, and its mean probability."""
    if (shape := np.shape(rows)) != (len(wanted), width):
        raise ModelCallError(f"label probabilities: expected shape {(len(wanted), width)}, found {shape}.")
    # A row of zeros names no label; a column behind the labels counts answers that name none.
    right = sum(bool(row.any()) and int(np.argmax(row)) == place for row, place in zip(rows, wanted, strict=True))
    confidence = sum(float(row[place]) for row, place in zip(rows, wanted, strict=True)) / len(wanted)
    return right, min(confidence, 1.0)


def _object(name: str, state: Any, keys: set[str]) -> Mapping[str, Any]:
    if not isinstance(state, Mapping) or set(state) != keys:
        raise ConfigurationError(f"{name}: expected an object with exactly the keys {sorted(keys)}.")
    return state


def _list(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        raise fail(name, "a non-empty list", type(value).__name__)
    return value


def _places(name: str, value: Any) -> tuple[int, ...]:
    places = tuple(check_int(name, place, low=0) for place in _list(name, value))
    if len(set(places)) < len(places):
        raise fail(name, "distinct places", list(places))
    return places
