"""Asks a model about public examples, and holds its votes for rows of several shapes, from which plans are made."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar, get_args

import numpy as np
from annotated_types import Interval
from langchain_core.runnables import RunnableConfig
from numpy.random import PCG64, Generator
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import EffectGenerator, LimitConcurrency, run_async, run_sync
from langchain_dpicl.options import LLM, CountOrZero, FewShotTask, LabelAnswers, TemplateLike, html_table, option_of
from langchain_dpicl.planning.expected_utility import Contest
from langchain_dpicl.planning.row_law import RowFacts, ShotLaw, VoteCounts, estimate_facts, mean_facts
from langchain_dpicl.planning.share_plan import Cost
from langchain_dpicl.privacy._validate import calls_at_once, check_choice, check_int, fail
from langchain_dpicl.released.base import FileForm, write_whole
from langchain_dpicl.runs.release_run import new_bar, tick
from langchain_dpicl.tasks import PublicRecords, VotingTask, choice_engine, wording_digest

if TYPE_CHECKING:
    from langchain_core.documents import Document


Origin: TypeAlias = Literal["same", "neighbour", "made_up"]
"""Where public examples come from: the domain of the private records, another one like it, or somebody's head."""

Floats = NDArray[np.float64]
T = TypeVar("T")
Walk: TypeAlias = Callable[[int | None, Any], EffectGenerator[T]]
"""The calls of a rehearsal, by how many may be in flight and the bar that they move."""

_LIKENESS = slice(1, 3)
"""Correlation and rival, among the numbers of rows: shared examples add to both."""
_SHIFT = 0.35
"""Deviation, in logits, of the share of right rows between a task and its neighbour: AG News and BBC, both ways."""
_RESAMPLES, _SEED = 24, 20_230_927
"""Resamples of the questions, with a constant public seed."""
WIDER = 1.6
"""Bootstrap deviations are this much too small after a choice among many plans; chosen on trivia and bank questions."""
_DEVIATIONS = 1.645
"""Of an interval of 90 %."""
_MOST_ROWS, _MOST_LABELS, _MOST_QUESTIONS, _MOST_SHAPES = 64, 10_000, 100_000, 64
"""What a file may hold."""
_SHARED = 0.6
"""What a shared example adds to the likeness of two rows, times the shots over the size of the pool."""
EXACT_KEYS = ConfigDict(extra="forbid")
"""Of the parts of a rehearsal: a file that has other keys is refused."""


@dataclass(frozen=True, slots=True)
class RehearsedShape:
    """Votes of the rows of one shape, question by question.

    Attributes:
      shots: examples of a row; 0: zero-shot, one row per question.
      calibrated: whether rows are divided by those on content-free inputs.
      deals: the deal of each row: rows of one deal show different examples, as private rows do.
      votes: for each question the place of the label that each row voted for; -1: the call gave no vote.
    """

    shots: CountOrZero
    calibrated: bool
    deals: tuple[CountOrZero, ...]
    votes: tuple[tuple[Annotated[int, Interval(ge=-1)], ...], ...]

    __pydantic_config__: ClassVar[ConfigDict] = EXACT_KEYS


@functools.cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class SavedRehearsal(ABC):
    """What every rehearsal has: its JSON values, and a file of them, which its fields say how to read."""

    _FORM: ClassVar[FileForm]

    @abstractmethod
    def _is_whole(self) -> bool:
        """Whether the parts fit together."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the rehearsal as JSON values."""
        values: dict[str, Any] = _adapter(type(self)).dump_python(self, mode="json")
        return values

    def to_json(self) -> str:
        """Returns the text of the file that `save` writes."""
        return self._FORM.text(self.to_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the rehearsal to a JSON file, atomically.

        Args:
          path: file to create or replace; its folder must exist.
        """
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file written by `save`.

        Args:
          path: a plain file.

        Raises:
          ConfigurationError: the content is not what `save` writes.
        """
        text = json.dumps(cls._FORM.load(path))  # with keys that are no fields: "format" and "version"
        made: Self | None
        try:
            made = _adapter(cls).validate_json(text, strict=True)
        except ValidationError:
            made = None
        if made is None or not made._is_whole():  # noqa: SLF001  of this class
            raise fail(cls._FORM.what, "the content of a file that `save` wrote", "other values", "Rehearse again.")
        return made


@dataclass(frozen=True)
class Rehearsal(SavedRehearsal):
    """What a model did with public examples: everything a planner needs, and no text of an example.

    Components take it as `rows=`: it chooses the shape of rows, the noise and whether rows are calibrated, and their
    plan says what to expect. Make it with `rehearse`.

    Formal guarantees:
      - A function of public examples, public wording and the model: no private record was read, and epsilon is 0.
      - It may be repeated and looked at freely before a share is declared.

    Attributes:
      model: public name of the model.
      reads: how votes are read.
      labels: the answers, in the order of their places.
      wording: digest of templates, labels and verbalizers.
      origin: "same", "neighbour" or "made_up"; stated by the caller.
      gold: the place of each question's right label.
      shapes: the votes by shape.
      calls: model calls that were made.
      content_free: inputs that calibrated rows are divided by.
    """

    model: str
    reads: str
    labels: tuple[str, ...]
    wording: str
    origin: Origin
    gold: tuple[CountOrZero, ...]
    shapes: tuple[RehearsedShape, ...]
    calls: CountOrZero
    content_free: tuple[str, ...] = ()

    _FORM: ClassVar[FileForm] = FileForm(
        "rehearsal",
        "langchain-dpicl-rehearsal",
        1,
        frozenset({"model", "reads", "labels", "wording", "origin", "gold", "shapes", "calls", "content_free"}),
        "shapes",
    )

    @property
    def rests_on(self) -> str:
        """What a chance rests on, in words."""
        return rests_on(len(self.gold), self.origin)

    @property
    def readings(self) -> tuple[bool, ...]:
        """Whether rows were read raw (False), calibrated (True), or both."""
        return tuple(sorted({shape.calibrated for shape in self.shapes}))

    def shots(self, calibrated: bool) -> tuple[int, ...]:
        """Returns the numbers of examples that rows were measured with.

        Args:
          calibrated: whether rows are divided by those on content-free inputs.
        """
        return tuple(sorted({one.shots for one in self.shapes if one.calibrated == calibrated and one.shots}))

    # -- numbers -----------------------------------------------------------------------------------------------------

    def facts(
        self, *, labels: int | None = None, shots: float, calibrated: bool = False, weights: Any = None
    ) -> RowFacts:
        """Returns the numbers of private rows of so many records: interpolated over the logarithm of the shots.

        They are those of rows that share no example, as the rows of a large pool of records do.

        Args:
          labels: must be the number of labels of the rehearsal.
          shots: records of a row.
          calibrated: whether rows are divided by those on content-free inputs.
          weights: float64[questions]; None: each question counts once.

        Raises:
          ConfigurationError: another number of labels, or rows were not read that way.
        """
        if labels is not None and labels != len(self.labels):
            raise fail("rows", f"a rehearsal on {labels} labels", f"{len(self.labels)} labels", "Rehearse this task.")
        [found] = self.facts_each(((shots, 1.0),), calibrated=calibrated, weightings=(weights,))
        return found

    def facts_each(
        self, law: Sequence[tuple[float, float]], *, calibrated: bool, weightings: Sequence[Any]
    ) -> list[RowFacts]:
        """Returns `facts`, averaged over how many records a row shows, for each weighting of the questions.

        Args:
          law: how many records a row shows, with the chance of each number.
          calibrated: whether rows are divided by those on content-free inputs.
          weightings: float64[questions] each; None: each question counts once.
        """
        every = np.array([np.ones(len(self.gold)) if one is None else one for one in weightings])
        shares = np.array([share for _, share in law])
        numbers = np.array([self._between(float(shots), calibrated, every) for shots, _ in law])
        means = np.einsum("s,swn->wn", shares / shares.sum(), numbers).clip(0.0, 1.0)  # a mean of ones may exceed 1
        labels = len(self.labels)
        return [RowFacts(right, alike, rival, labels, silent) for right, alike, rival, silent in means.tolist()]

    def zero_shot(self, calibrated: bool, *, weights: Any = None) -> float:
        """Returns the share of questions that the prompt without examples answers right.

        Args:
          calibrated: whether rows are divided by those on content-free inputs.
          weights: float64[questions]; None: each question counts once.
        """
        [shape] = [one for one in self.shapes if one.shots == 0 and one.calibrated == calibrated]
        right = np.array([votes[0] == place for votes, place in zip(shape.votes, self.gold, strict=True)])
        return float(np.average(right, weights=weights))

    def label_shares(self, weights: Any = None) -> list[float]:
        """Returns the share of questions that each label is right for.

        Args:
          weights: float64[questions]; None: each question counts once.
        """
        counts = np.bincount(self.gold, weights=weights, minlength=len(self.labels))
        shares: list[float] = (counts / counts.sum()).tolist()
        return shares

    def free_votes(
        self, shapes: Sequence[tuple[int, bool]], *, rows: int, weightings: Sequence[Any] = (None,)
    ) -> Floats:
        """Returns the chances that votes of rows of the public examples name the right label: no noise, epsilon 0.

        Args:
          shapes: examples of a row, and whether rows are divided by those on content-free inputs; at least one.
          rows: rows that vote.
          weightings: float64[questions] each; None: each question counts once.

        Returns:
          float64[len(shapes), len(weightings)].
        """
        facts = [
            _together(alone, self._overlap(shots))  # rows made of the public examples share some by chance
            for shots, read in shapes
            for alone in self.facts_each(((shots, 1.0),), calibrated=read, weightings=weightings)
        ]
        return Contest(rows, 1.0, len(self.labels)).rights(facts).reshape(len(shapes), -1)

    def interval(
        self, chance: Callable[[RowFacts], float], *, labels: int, law: ShotLaw, calibrated: bool
    ) -> tuple[float, float]:
        """Returns the 90 % interval of a chance: questions are resampled, and widened for a choice among plans.

        It is never narrower than the number of questions allows, see `chance_interval`.

        Args:
          chance: of rows with the given numbers.
          labels: labels that an answer can have.
          law: how many records a row shows, with the chance of each number.
          calibrated: whether rows are divided by those on content-free inputs.
        """
        facts = mean_facts(self, labels=labels, law=law, calibrated=calibrated)
        least, most, *drawn = map(chance, (*extremes(facts), *self.resampled(law, calibrated)))
        return chance_interval(chance(facts), drawn, least, most, questions=len(self.gold), shift=self.shift)

    @property
    def shift(self) -> float:
        """Deviation, in logits, of the share of right rows between these questions' domain and that of the records."""
        return 0.0 if self.origin == "same" else _SHIFT

    def resampled(self, law: ShotLaw, calibrated: bool) -> list[RowFacts]:
        """Returns the numbers of rows on resamples of the questions; of another domain, with its right rows shifted.

        Args:
          law: how many records a row shows.
          calibrated: how rows are read.
        """
        found = self.facts_each(law, calibrated=calibrated, weightings=self.resamples)
        if not self.shift:
            return found
        moved = []
        for draw, facts in enumerate(found):
            shift = self.shift * float(Generator(PCG64([_SEED, draw])).standard_normal())
            right = min(max(facts.right, 0.01), 0.99)
            odds = 1.0 / (1.0 + math.exp(-math.log(right / (1.0 - right)) - shift))
            moved.append(dataclasses.replace(facts, right=odds))
        return moved

    @functools.cached_property
    def resamples(self) -> list[Floats]:
        """How often each question is in each resample; always the same ones."""
        count = len(self.gold)
        evenly = np.full(count, 1.0 / count)
        draws = (Generator(PCG64([_SEED, 1, draw])).multinomial(count, evenly) for draw in range(_RESAMPLES))
        return [drawn.astype(np.float64) for drawn in draws]

    @functools.cached_property
    def _measured(self) -> dict[tuple[int, bool], RehearsedShape]:
        return {(shape.shots, shape.calibrated): shape for shape in self.shapes}

    def _between(self, shots: float, calibrated: bool, weights: Floats) -> Floats:
        """Returns float64[n, 4]: the numbers of rows of so many records, for each weighting of the questions."""
        key = shots, calibrated, weights.tobytes()
        if key not in self._estimates:
            self._estimates[key] = self._interpolated(shots, calibrated, weights)
        return self._estimates[key]

    def _interpolated(self, shots: float, calibrated: bool, weights: Floats) -> Floats:
        known = self.shots(calibrated)
        if not known:
            raise fail("calibrate", f"one of {list(self.readings)}, as rows were rehearsed", calibrated)
        above = next((place for place, count in enumerate(known) if count >= shots), len(known) - 1)
        below = above if known[above] <= shots or above == 0 else above - 1
        if below == above:
            return self._at(known[above], calibrated, weights)
        one, other = (self._between(float(known[place]), calibrated, weights) for place in (below, above))
        share = math.log2(shots / known[below]) / math.log2(known[above] / known[below])
        return (1.0 - share) * one + share * other

    def _at(self, shots: int, calibrated: bool, weights: Floats) -> Floats:
        """Returns the numbers of rows of measured shots: from rows that share no example, and from rows that may."""
        own, mixed = (counts.numbers(weights) for counts in self._counts[shots, calibrated])
        overlap = self._overlap(shots)
        mixed[:, _LIKENESS] = ((mixed[:, _LIKENESS] - overlap) / (1.0 - overlap)).clip(0.0, 1.0)
        return (own + mixed) / 2.0

    def _overlap(self, shots: int) -> float:
        """Returns how much of what two rows have in common comes from the examples that they share by chance."""
        return _SHARED * shots / len(self.gold)

    @functools.cached_property
    def _counts(self) -> dict[tuple[int, bool], list[VoteCounts]]:
        """The votes of rows of each shape, counted among rows of one deal, and among rows of different deals."""
        gold, labels = np.array(self.gold), len(self.labels)
        return {
            (shape.shots, shape.calibrated): [
                VoteCounts.of(np.array(shape.votes), gold, labels=labels, deals=shape.deals, within=within)
                for within in (True, False)
            ]
            for shape in self.shapes
            if shape.shots
        }

    @functools.cached_property
    def _estimates(self) -> dict[tuple[float, bool, bytes], Floats]:
        return {}

    # -- file --------------------------------------------------------------------------------------------------------

    def check_fits(
        self,
        *,
        labels: Sequence[str],
        wording: str | None = None,
        model: str | None = None,
        reads: str | None = None,
        content_free: Sequence[str] = (),
    ) -> None:
        """Refuses a component whose task or model is another one; None: not known, where no model is asked.

        Args:
          labels: its answers, in any order.
          wording: digest of its templates.
          model: its model's name.
          reads: how its votes are read.
          content_free: inputs that its rows are divided by.

        Raises:
          ConfigurationError: other labels, another wording, model or way to read votes.
        """
        for name, mine, found in (
            ("labels", tuple(sorted(self.labels)), tuple(sorted(labels))),
            ("model", self.model, model),
            ("reads", self.reads, reads),
            ("wording", self.wording, wording),
        ):
            if found is not None and mine != found:
                shown = (mine, found) if name != "wording" else ("the rehearsed templates", "other ones")
                advice = "Rehearse with the model, labels and templates of the component."
                if name == "wording":
                    advice += " The usual templates show the names of fields: name the public file's as the records'."
                raise fail(f"rows: rehearsal.{name}", str(shown[0]), shown[1], advice)
        if content_free and tuple(content_free) != self.content_free:
            raise fail("LabelAnswers.content_free", f"{self.content_free}, as rehearsed", tuple(content_free))

    @property
    def digest(self) -> str:
        """SHA-256 of the rehearsal, for reports."""
        import hashlib

        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def summary(self) -> dict[str, Any]:
        """Returns what reports say of the rehearsal that chose the rows."""
        return {"examples": len(self.gold), "origin": self.origin, "calls": self.calls, "digest": self.digest}

    def _is_whole(self) -> bool:
        """Whether votes, questions and labels fit together."""
        num_labels, questions = len(self.labels), len(self.gold)
        is_asked = {(shape.shots, shape.calibrated) for shape in self.shapes}
        return (
            2 <= num_labels <= _MOST_LABELS
            and len(set(self.labels)) == num_labels
            and 3 <= questions <= _MOST_QUESTIONS
            and len(self.shapes) <= _MOST_SHAPES
            and all(place < num_labels for place in self.gold)
            and bool(self.shapes)
            and len(is_asked) == len(self.shapes)
            and all((0, read) in is_asked and self.shots(read) for read in self.readings)
            and all(
                len(shape.votes) == questions
                and 2 * shape.shots <= questions
                and 1 <= len(shape.deals) <= _MOST_ROWS
                and max(shape.deals) <= 1
                and all(len(row) == len(shape.deals) for row in shape.votes)
                and all(-1 <= vote < num_labels for row in shape.votes for vote in row)
                for shape in self.shapes
            )
        )

    # -- looking -----------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row per shape and reading: what rows are worth, and the most that votes of them can reach."""
        found: list[dict[str, Any]] = []
        for read in self.readings:
            right = self.zero_shot(read)
            margin = _margin(right, len(self.gold), self.shift)
            found.append({"shots": 0, "calibrated": read, "right": right, "margin": margin})
            for shots in self.shots(read):
                facts = self.facts(shots=shots, calibrated=read)
                asked = len(self._measured[shots, read].deals)
                spread = facts.correlation + (1.0 - facts.correlation) / asked
                found.append(
                    {
                        "shots": shots,
                        "calibrated": read,
                        "right": facts.right,
                        "margin": _margin(facts.right, len(self.gold) / spread, self.shift),
                        "correlation": facts.correlation,
                        "rival": facts.rival,
                        "ceiling": max(facts.ceiling(), facts.right),  # poor rows are best alone
                    }
                )
        return found

    def table(self) -> str:
        """Returns the rows as a text table."""
        lines = [
            f"{self.rests_on}, {len(self.labels)} labels, {self.model}: {self.calls:,} calls, epsilon 0",
            f"{'rows':<11}{'reading':<12}{'right':>6}{'+-':>5}{'correlation':>13}{'rival':>7}{'at most':>9}",
        ]
        for row in self.rows():
            name = "zero-shot" if row["shots"] == 0 else f"{row['shots']}-shot"
            reading = "calibrated" if row["calibrated"] else "raw"
            line = f"{name:<11}{reading:<12}{100 * row['right']:>5.0f}%{100 * row['margin']:>5.0f}"
            if row["shots"]:
                line += f"{row['correlation']:>13.2f}{row['rival']:>7.2f}{100 * row['ceiling']:>8.0f}%"
            lines.append(line)
        lines.append("at most: one such row, or a vote of any number of them without noise. +-: 90 %.")
        if self.origin == "same":
            more = 4 * len(self.gold)
            lines.append(f"{more} examples (max_examples=, --examples), four times as many, would halve +-.")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Rehearsal({self.rests_on}, model={self.model!r}, labels={self.labels!r}, calls={self.calls})"

    def _repr_html_(self) -> str:
        shown = {
            f"{row['shots']}-shot, {'calibrated' if row['calibrated'] else 'raw'}": f"{100 * row['right']:.0f} %"
            for row in self.rows()
        }
        return html_table("Rehearsal", {"rests on": self.rests_on, "model": self.model, **shown})


def _together(facts: RowFacts, overlap: float) -> RowFacts:
    """Returns the numbers of rows that share examples by chance, from those of rows that share none."""
    names = ("correlation", "rival")
    return dataclasses.replace(facts, **{name: overlap + (1.0 - overlap) * getattr(facts, name) for name in names})


def extremes(facts: RowFacts) -> tuple[RowFacts, RowFacts]:
    """Returns the numbers of rows that are all wrong, and of rows that are all right."""
    return dataclasses.replace(facts, right=0.0), dataclasses.replace(facts, right=1.0)


def chance_interval(
    at: float, drawn: Sequence[float] | Floats, least: float, most: float, *, questions: int, shift: float
) -> tuple[float, float]:
    """Returns the 90 % interval of a chance, from the chances on resamples of the questions.

    A resample holds no question that was not asked, so all of them are alike where all rows were right. The interval
    is therefore no narrower than that of a share of so many questions, between the ends that noise leaves.

    Args:
      at: the chance.
      drawn: the chance on each resample.
      least: the chance where all rows are wrong.
      most: the chance where all rows are right.
      questions: that were asked.
      shift: deviation, in logits, of the share in the domain of the records; 0: they are asked of that domain.
    """
    half = WIDER * _DEVIATIONS * float(np.std(drawn))
    reach = max(most - least, 1e-12)
    low, high = _share_interval(min(max((at - least) / reach, 0.0), 1.0), questions, shift)
    return max(0.0, min(at - half, least + reach * low)), min(1.0, max(at + half, least + reach * high))


def _share_interval(share: float, questions: float, shift: float = 0.0) -> tuple[float, float]:
    """Returns the 90 % interval of a share of so many questions; it has a width where all of them are alike.

    A share that moves by `shift` logits between domains is known as from fewer questions.

    Source: Agresti and Coull (1998), "Approximate is better than 'exact' for interval estimation of binomial
    proportions".
    """
    squared = _DEVIATIONS**2
    middle = (questions * share + squared / 2.0) / (questions + squared)
    questions = 1.0 / (1.0 / questions + middle * (1.0 - middle) * shift**2)
    middle = (questions * share + squared / 2.0) / (questions + squared)
    half = _DEVIATIONS * math.sqrt(middle * (1.0 - middle) / (questions + squared))
    return middle - half, middle + half


def _margin(share: float, questions: float, shift: float) -> float:
    """Returns how far the farther end of that interval is from the share."""
    low, high = _share_interval(share, questions, shift)
    return max(share - low, high - share)


def rests_on(num_examples: int, origin: Origin) -> str:
    """Returns what a chance rests on, in words."""
    kinds = {"same": "", "neighbour": " of a neighbouring domain", "made_up": " that were made up"}
    return f"a rehearsal of {num_examples} public examples{kinds[origin]}"


SHOTS = (1, 2, 4, 8)
MOST_EXAMPLES, MOST_CALLS = 64, 10_000
_FEW, _MANY, _DEALS = 2, 6, 2
"""Rows of one deal: asked first, and asked in all where the first rows err on their own; and deals per question."""
_ALONE = 0.3
"""Correlation below which more rows tell more."""
_BATCH = 256
_SEED_OF_QUESTIONS = 20_230_929
ONLY_PUBLIC = "A rehearsal is free because it reads no private record. Give public examples, or examples you made up."


def rehearse(
    llm: LLM,
    public_examples: Sequence[Mapping[str, Any] | Document],
    task: FewShotTask | None = None,
    *,
    example_prompt: TemplateLike | None = None,
    suffix: TemplateLike | None = None,
    prefix: TemplateLike = "",
    text_key: str = "text",
    label_key: str = "label",
    labels: Sequence[str] | None = None,
    answers: LabelAnswers | None = None,
    shots: Sequence[int] = SHOTS,
    max_examples: int = MOST_EXAMPLES,
    max_calls: int = MOST_CALLS,
    origin: Origin = "same",
    progress: bool | None = None,
    config: RunnableConfig | None = None,
) -> Rehearsal:
    """Measures on public examples what rows of each shape are worth with this model; epsilon 0.

    Every example is asked about in turn, with prompts of the other examples: rows of 1, 2, 4 and 8 of them, raw and
    calibrated, and the prompt without examples. Give about 60; the interval of what is said halves with four times as
    many. `rehearsal_cost` says beforehand what it costs.

    Args:
      llm: the model that will read the private records.
      public_examples: dicts or Documents with text and label. They must be PUBLIC, and not taken from the private
        records: a sample of one's customers' records is private, however small.
      task: the wording, as the component will have it; None: the three templates.
      example_prompt: template of one example; None: text and label on a line each.
      suffix: template of the query; None: as the example.
      prefix: template before the examples.
      text_key: field of the text.
      label_key: field of the label.
      labels: the answers, in the order of the component; None: those of the examples, sorted.
      answers: how labels are read; `calibrate` None measures both ways.
      shots: numbers of examples of a row; those above half of the examples are left out.
      max_examples: most examples that are used; the first ones after a fixed public shuffle.
      max_calls: a rehearsal that could need more is refused before the first call.
      origin: "same" where the examples are of the private records' domain, "neighbour" for another one like it, which
        widens what is said, or "made_up".
      progress: True shows a bar, False hides it, None shows it on a terminal only.
      config: its `max_concurrency` bounds the calls in flight.

    Raises:
      ConfigurationError: `PrivateExamples`, examples that cannot be read, or more calls than `max_calls`.
      CapabilityError: the model cannot choose among labels.
      ModelCallError: a call failed.
    """
    asking = _Asking.of(
        llm=llm,
        public_examples=public_examples,
        task=task,
        example_prompt=example_prompt,
        suffix=suffix,
        prefix=prefix,
        text_key=text_key,
        label_key=label_key,
        labels=labels,
        answers=answers,
        shots=shots,
        max_examples=max_examples,
        max_calls=max_calls,
        origin=origin,
    )
    return rehearse_now(asking.walk, asking.most_calls, progress, config)


async def arehearse(
    llm: LLM,
    public_examples: Sequence[Mapping[str, Any] | Document],
    task: FewShotTask | None = None,
    *,
    progress: bool | None = None,
    config: RunnableConfig | None = None,
    **options: Any,
) -> Rehearsal:
    """Async version of `rehearse`.

    Args:
      llm: as of `rehearse`.
      public_examples: as of `rehearse`.
      task: as of `rehearse`.
      progress: as of `rehearse`.
      config: as of `rehearse`.
      options: the other parameters of `rehearse`.
    """
    asking = _Asking.of(llm=llm, public_examples=public_examples, task=task, **options)
    return await arehearse_now(asking.walk, asking.most_calls, progress, config)


@dataclass(frozen=True, slots=True)
class RehearsalCost:
    """What a rehearsal costs.

    Attributes:
      least: model use if the first rows of every shape are enough.
      most: model use if all rows are asked.
    """

    least: Cost
    most: Cost

    def __add__(self, other: RehearsalCost) -> RehearsalCost:
        return RehearsalCost(self.least + other.least, self.most + other.most)


def asked_about(examples: Sequence[T], max_examples: int) -> list[T]:
    """Returns the examples that a rehearsal asks about: the first ones after a fixed public shuffle."""
    order = Generator(PCG64(_SEED_OF_QUESTIONS)).permutation(len(examples))[:max_examples]
    return [examples[place] for place in order]


def rehearsal_cost(
    num_examples: int,
    *,
    num_labels: int = 2,
    shots: Sequence[int] = SHOTS,
    calls_per_row: int = 2,
    record_tokens: int = 60,
    query_tokens: int = 60,
) -> RehearsalCost:
    """Returns the model calls and tokens of a rehearsal, before anything is asked.

    Args:
      num_examples: public examples.
      num_labels: labels that an answer can have.
      shots: numbers of examples of a row.
      calls_per_row: 2 where rows are calibrated with one content-free input, otherwise 1.
      record_tokens: cap of an example.
      query_tokens: cap of a query.

    Raises:
      ConfigurationError: a number is out of range, or too few examples for these shots.

    >>> cost = rehearsal_cost(64)
    >>> cost.least.public_calls, cost.most.public_calls
    (2176, 6272)
    """
    count = check_int("num_examples", num_examples, low=3)
    sizes = {"calls": calls_per_row, "record_tokens": record_tokens, "query_tokens": query_tokens}
    fitting = _possible(shots, count - num_labels)
    least, most = (_cost(count, fitting, per_deal, fits=count - num_labels, **sizes) for per_deal in (_FEW, _MANY))
    return RehearsalCost(least, most)


def _cost(
    count: int,
    shots: Sequence[int],
    per_deal: int,
    *,
    fits: int,
    calls: int,
    record_tokens: int = 60,
    query_tokens: int = 60,
) -> Cost:
    rows = {k: _DEALS * min(per_deal, fits // k) for k in shots}
    asked = count * calls * (1 + sum(rows.values()))
    tokens = (
        count * calls * (query_tokens + sum(number * (k * record_tokens + query_tokens) for k, number in rows.items()))
    )
    return Cost(private_calls=0, public_calls=asked, tokens_in=tokens, tokens_out=asked)


def _possible(shots: Sequence[int], fits: int) -> tuple[int, ...]:
    """Returns the numbers of shots of which two rows of different examples fit beside a question."""
    given = [check_int("shots", one, low=1) for one in shots]
    fitting = tuple(sorted({one for one in given if 2 * one <= fits}))
    if not given:
        raise fail("shots", "at least one number", 0)
    if not fitting:
        least = 2 * min(given)
        raise fail("public_examples", f"at least {least} examples more than there are labels", max(0, fits))
    return fitting


def rehearse_now(walk: Walk[T], most_calls: int, progress: bool | None, config: RunnableConfig | None) -> T:
    """Makes the calls of a rehearsal behind a bar, blocking."""
    with new_bar(most_calls, "call", "rehearsal", progress=progress) as bar:
        return run_sync(walk(calls_at_once(config), bar))


async def arehearse_now(walk: Walk[T], most_calls: int, progress: bool | None, config: RunnableConfig | None) -> T:
    """Async version of `rehearse_now`."""
    with new_bar(most_calls, "call", "rehearsal", progress=progress) as bar:
        return await run_async(walk(calls_at_once(config), bar))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Asking:
    """The questions of one rehearsal."""

    public: PublicRecords
    task: VotingTask
    scorer: LabelRows
    model: str
    readings: tuple[bool, ...]
    shots: tuple[int, ...]
    origin: Origin
    most_calls: int

    @classmethod
    def of(
        cls,
        *,
        llm: LLM,
        public_examples: Any,
        task: FewShotTask | None = None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        prefix: TemplateLike = "",
        text_key: str = "text",
        label_key: str = "label",
        labels: Sequence[str] | None = None,
        answers: LabelAnswers | None = None,
        shots: Sequence[int] = SHOTS,
        max_examples: int = MOST_EXAMPLES,
        max_calls: int = MOST_CALLS,
        origin: Origin = "same",
    ) -> _Asking:
        """Checks everything, and counts the calls, before the first call."""
        check_choice("origin", origin, get_args(Origin))
        check_int("max_examples", max_examples, low=3)
        wording, reading = (
            FewShotTask.of(task, example_prompt, suffix, prefix),
            option_of("answers", answers, LabelAnswers),
        )
        public = PublicRecords.of(
            public_examples, wording, text_key=text_key, label_key=label_key, labels=labels, instead=ONLY_PUBLIC
        )
        records = asked_about(public.records, max_examples)
        public = PublicRecords(tuple(records), text_key, label_key, public.labels, public.fields)
        asked = VotingTask.of(public, wording, reading)
        fits = len(public.records) - len(public.labels)
        possible = _possible(shots, fits)
        engine = choice_engine(llm, asked)
        texts = list(asked.texts.values())
        scorer = LabelRows(engine, texts, calibrate=False)
        calibrates = bool(asked.content_free) and scorer.kind in {"whole labels", "first tokens"}
        readings = (False, True) if calibrates else (False,)
        if reading.calibrate is not None:
            if reading.calibrate and not calibrates:
                advice = "A vote in text is no probability, and there has to be a content-free input."
                raise fail("LabelAnswers.calibrate", "False or None for this model and wording", True, advice)
            readings = (reading.calibrate,)
        calls = 1 + len(asked.content_free) if True in readings else 1
        most = _cost(len(public.records), possible, _MANY, fits=fits, calls=calls).public_calls
        if most > check_int("max_calls", max_calls, low=1):
            advice = (
                "Give fewer examples (max_examples=, --examples), fewer shots, or a larger max_calls= (--max-calls)."
            )
            raise fail("max_calls", f"at least the {most:,} calls that this rehearsal may need", max_calls, advice)
        name = getattr(engine, "name", type(engine).__name__)
        return cls(public, asked, scorer, name, readings, possible, origin, most)

    def walk(self, limit: int | None, bar: Any) -> EffectGenerator[Rehearsal]:
        """Asks everything (an effect generator)."""
        gold = [self.public.labels.index(record[self.public.label_key]) for record in self.public.records]
        shapes: list[RehearsedShape] = []
        calls = 0
        for shots in (0, *self.shots):
            deals = self._deals(shots, gold) if shots else []
            votes: dict[bool, list[NDArray[np.int64]]] = {read: [] for read in self.readings}
            for part in self._parts(shots):
                asked = [[deal[place] for deal in dealt for place in part] for dealt in deals] if shots else None
                found, made = yield from self._votes(asked, limit, bar)
                calls += made
                for read in self.readings:
                    votes[read].append(found[read])
                if shots == 0 or not self._tells_more(found, gold):
                    break
            widths = [array.shape[1] for array in votes[self.readings[0]]]
            places = [deal for width in widths for deal in _dealt(width)] if shots else [0]
            for read in self.readings:
                rows = np.concatenate(votes[read], axis=1)
                shapes.append(RehearsedShape(shots, read, tuple(places), tuple(map(tuple, rows.tolist()))))
        return Rehearsal(
            model=self.model,
            reads=self.scorer.kind,
            labels=self.task.labels,
            wording=wording_digest(self.task),
            origin=self.origin,
            gold=tuple(gold),
            shapes=tuple(shapes),
            calls=calls,
            content_free=self.task.content_free if True in self.readings else (),
        )

    def _parts(self, shots: int) -> Iterator[range]:
        """Yields which rows of a deal are asked at first, and which besides."""
        fits = self._rows_per_deal(shots)
        yield range(min(_FEW, fits))
        if fits > _FEW:
            yield range(_FEW, fits)

    def _tells_more(self, found: Mapping[bool, NDArray[np.int64]], gold: Sequence[int]) -> bool:
        """Whether rows err on their own, so that more of them tell more."""
        facts = (
            estimate_facts(votes, gold, labels=len(self.task.labels), deals=_dealt(votes.shape[1]))
            for votes in found.values()
        )
        return min(one.correlation for one in facts) < _ALONE

    def _deals(self, shots: int, gold: Sequence[int]) -> list[list[list[tuple[int, ...]]]]:
        """Returns for each question its deals, each of disjoint rows of the other examples.

        Leaving a question out would make its label rarer in its rows than in those of a new question. So one example of
        every other label that has several is left out beside it, another one in each deal.
        """
        rng = Generator(PCG64([_SEED_OF_QUESTIONS, shots]))
        by_label = [np.flatnonzero(np.asarray(gold) == place) for place in range(len(self.public.labels))]
        every = []
        for question, label in enumerate(gold):
            deals = []
            for _ in range(_DEALS):
                out = {question}
                out |= {int(rng.choice(own)) for place, own in enumerate(by_label) if place != label and len(own) > 1}
                order = rng.permutation([place for place in range(len(gold)) if place not in out])
                rows = [order[first * shots : (first + 1) * shots] for first in range(self._rows_per_deal(shots))]
                deals.append([tuple(row.tolist()) for row in rows])
            every.append(deals)
        return every

    def _rows_per_deal(self, shots: int) -> int:
        """Returns how many rows of one deal fit beside a question and what is left out with it."""
        return min(_MANY, (len(self.public.records) - len(self.public.labels)) // max(shots, 1))

    def _votes(
        self, asked: Any, limit: int | None, bar: Any
    ) -> EffectGenerator[tuple[dict[bool, NDArray[np.int64]], int]]:
        """Returns int64[questions, rows] votes by reading, and how many prompts were asked (an effect generator)."""
        records = self.public.records
        prompts: list[tuple[str, ...]] = []
        for question, record in enumerate(records):
            rows = [()] if asked is None else asked[question]
            prompts += self._prompts(record, rows)
        scores: dict[str, Any] = {}
        texts = list(dict.fromkeys(text for prompt in prompts for text in prompt))
        for first in range(0, len(texts), _BATCH):
            part = texts[first : first + _BATCH]
            scores |= yield LimitConcurrency(self.scorer.request_public_texts(part, is_whole=False), limit)
            for _ in part:
                tick(bar)
        out = {}
        for read in self.readings:
            rows = [
                self.scorer.calibrated(scores[own], [scores[text] for text in free]) if read else scores[own]
                for own, *free in prompts
            ]
            array = np.array(rows, dtype=np.float64)
            votes = np.where(array.any(axis=1), array.argmax(axis=1), -1)
            out[read] = votes.reshape(len(records), -1)
        return out, len(texts)

    def _prompts(self, record: Mapping[str, str], rows: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
        query = self._query(record)
        queries = [query, *(self.task.wording.with_content(query, text) for text in self.task.content_free)]
        render = self.task.wording.renderer(queries if True in self.readings else queries[:1])
        return [render.at(slot)([self.public.records[place] for place in row]) for slot, row in enumerate(rows)]

    def _query(self, record: Mapping[str, str]) -> tuple[str, ...]:
        """Returns the query's variables: `input` is the text, others are the record's fields of that name."""
        names, text = self.task.wording.input_variables, record.get(self.public.text_key)
        if len(names) == 1 and text is not None:
            return (text,)
        values = record if text is None else {"input": text, **record}
        missing = [name for name in names if name not in values]
        if missing:
            fields = f"the fields that example_prompt shows, {list(record)}, and 'input', which is text_key"
            raise fail("suffix", f"variables among {fields}", missing)
        return tuple(values[name] for name in names)


def _dealt(rows: int) -> list[int]:
    """Returns the deal of each row that was asked together: the same number of rows of each deal."""
    return [deal for deal in range(_DEALS) for _ in range(rows // _DEALS)]
