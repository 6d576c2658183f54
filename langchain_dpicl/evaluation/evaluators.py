"""Maps a record and an answer to a declared outcome: by the label, by an own pure function, or by a judge."""

from __future__ import annotations

import hashlib
import inspect
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any

from langchain_core.output_parsers import BaseLLMOutputParser
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable

from langchain_dpicl.backends.langchain.texts import ChoiceNames
from langchain_dpicl.backends.private_calls.call import read_silently
from langchain_dpicl.privacy._validate import check_name, check_real, fail

OTHER = "other"
"""The outcome of an answer that names no label, and of a call that failed; in brackets where a label has that name."""
_MOST_MARKS = 32


@dataclass(frozen=True, slots=True)
class Pure:
    """A function that its author declares pure: its result follows from its arguments, and it keeps and sends nothing.

    Nobody can check that. A function that remembers records couples them, and the guarantee is lost; one that logs or
    sends them leaks them. Reports list it by name and source under "assumed".

    Args:
      function: the function.

    Raises:
      ConfigurationError: it cannot be called, is a coroutine function, or is known not to be pure: a chain, a stock
        evaluator or a function that LangSmith traces.
    """

    function: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.function) or any(map(inspect.iscoroutinefunction, _called(self.function))):
            raise fail("Pure", "a function that returns its result", type(self.function).__name__)
        if _is_known_otherwise(self.function):
            found = getattr(self.function, "__qualname__", type(self.function).__name__)
            raise fail("Pure", "an own function", found, STOCK)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)

    @property
    def name(self) -> str:
        """The function's name and the first digits of its source's hash, for reports."""
        named = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        try:
            source = inspect.getsource(self.function)
        except (OSError, TypeError):
            return f"{named} (no source)"
        return f"{named} (source {hashlib.sha256(source.encode('utf-8')).hexdigest()[:12]})"


STOCK = (
    "A chain, a stock evaluator or a traced function may ask a model or show records to others: write "
    "Score(Pure(function), marks=...) of an own function, or Judge(prompt | model, marks=...), which asks in silence."
)
_CLASSIC = ("evaluation", "output_parsers.fix", "output_parsers.retry")  # these parsers ask a model
_STOCK_EVALUATORS = (
    *(f"{package}.{module}" for package in ("langchain", "langchain_classic") for module in _CLASSIC),
    *("langsmith", "openevals", "agentevals"),
)


def _called(function: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Returns a function, and what its class runs for it where it is an object."""
    return function, type(function).__call__


def _is_known_otherwise(function: Any) -> bool:
    """Whether a callable is a chain, of a package of evaluators, or traced by LangSmith."""
    while isinstance(function, partial):
        function = function.func
    owner, name = getattr(function, "__self__", function), getattr(function, "__name__", "invoke")
    # Also its methods, but not the parse of a parser or the format of a prompt.
    is_text = isinstance(owner, BaseLLMOutputParser | BasePromptTemplate) and not hasattr(Runnable, name)
    is_chain = isinstance(owner, Runnable) and not is_text
    if is_chain or any(getattr(one, "__langsmith_traceable__", False) for one in _called(function)):
        return True
    homes = (f"{getattr(one, '__module__', '')}." for one in (function, type(function)))
    return any(home.startswith(f"{each}.") for home in homes for each in _STOCK_EVALUATORS)


class Same:
    """Compares by identity, and keeps what it compares alive."""

    __slots__ = ("_things",)

    def __init__(self, thing: Any) -> None:
        # A bound method is made anew whenever it is read.
        self._things = (thing.__self__, thing.__func__) if isinstance(thing, MethodType) else (thing,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and list(map(id, self._things)) == list(map(id, other._things))

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._things)))


class Evaluator(ABC):
    """Base of the evaluators: it maps a record and an answer to a place in a declared list of outcomes."""

    name: str

    @abstractmethod
    def bind(self, fields: Sequence[str], label_key: str | None, labels: Sequence[str] | None) -> BoundEvaluator:
        """Returns the evaluator for a data set.

        Args:
          fields: the declared fields of a record.
          label_key: the one that holds the label; None: there are no labels.
          labels: the declared labels.

        Raises:
          ConfigurationError: these do not suit it, or its name is none.
        """


@dataclass(frozen=True)
class BoundEvaluator:
    """An evaluator on a declared data set; public.

    Attributes:
      name: public name of the table.
      cells: outcomes, in the order of the counts: (label or "", what was said or the mark).
      scores: score of each outcome.
      place: the outcome of (record, answer, judge's answer); private arguments. None, an exception or a place that is
        none counts as the worst score.
      worst: the outcome of what failed, given the record.
      hidden: fields of the record that the chain under test must not see.
      judge: the judge's chain, whose answer is the third argument.
      assumed: what reports list under "assumed".
      labels: the declared labels, where the table is a confusion matrix.
      own_scores: where outcomes are pairs: the score of the chain under test; empty otherwise.
      kinds: the scores of a second table, which counts each unit by its score; empty where there is none.
      reads_text: whether it compares answers as texts, so that objects are wrong whatever they hold.
      identity: what makes it another evaluator beside what a report shows: its function.

    Raises:
      ConfigurationError: two outcomes have one name.
    """

    name: str
    cells: tuple[tuple[str, str], ...]
    scores: tuple[float, ...]
    place: Callable[[Mapping[str, Any], Any, Any], int | None] = field(repr=False)
    worst: Callable[[Mapping[str, Any]], int] = field(repr=False)
    hidden: frozenset[str] = frozenset()
    judge: Any = field(default=None, repr=False)
    assumed: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    own_scores: tuple[float, ...] = ()
    kinds: tuple[float, ...] = ()
    reads_text: bool = False
    identity: tuple[Same, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not len(set(self.cells)) == len(self.cells) == len(self.scores):
            raise fail("cells", "distinct outcomes, each with a score", list(self.cells))

    @property
    def widths(self) -> tuple[int, ...]:
        """How many outcomes each of its tables has."""
        return (len(self.cells), *([len(self.kinds)] if self.kinds else []))

    def places(self, cell: int) -> tuple[int, ...]:
        """Returns where a unit counts in each table."""
        return (cell, self.kinds.index(self.scores[cell])) if self.kinds else (cell,)


@dataclass(frozen=True)
class Exact(Evaluator):
    """Whether the answer names the record's label: a table of right and wrong, and the confusion matrix.

    Each table has half of epsilon. Accuracy is read from the small one, where only two counts bring noise.
    An answer names a label as a vote does (case, quotes and a short beginning such as "The label is:" do not count). An
    answer that names none, and a call that failed, counts as "other", which is wrong.

    Args:
      name: public name of the table.
    """

    name: str = "exact"

    @staticmethod
    def widths(labels: int) -> tuple[int, int]:
        """Returns the sizes of its tables, for `plan_evaluation`.

        Args:
          labels: how many there are.
        """
        return labels * (labels + 1), 2

    def bind(self, fields: Sequence[str], label_key: str | None, labels: Sequence[str] | None) -> BoundEvaluator:
        """Returns the evaluator for the declared labels; see `Evaluator.bind`."""
        del fields
        if label_key is None or not labels:
            advice = "Declare label_key= and labels= of the examples, or give a Score."
            raise fail("evaluators", "examples with declared labels for Exact", None, advice)
        check_name("name", self.name)
        names, told, known = ChoiceNames(labels), tuple(labels), dict(zip(labels, range(len(labels)), strict=True))
        width, outside = len(told) + 1, OTHER
        while outside in known:
            outside = f"({outside})"
        cells = tuple((label, said) for label in told for said in (*told, outside))

        def place(record: Mapping[str, Any], answer: Any, judged: Any) -> int | None:
            del judged
            said = names.named(answer)
            return known[record[label_key]] * width + (len(told) if said is None else said)

        return BoundEvaluator(
            self.name,
            cells,
            tuple(float(label == said) for label, said in cells),
            place,
            lambda record: known.get(record.get(label_key, ""), 0) * width + len(told),
            hidden=frozenset({label_key}),
            labels=told,
            kinds=(0.0, 1.0),
            reads_text=True,
        )


@dataclass(frozen=True)
class Score(Evaluator):
    """The mark that an own function gives, which is called by name with those of these that it takes, as by LangSmith.

    It takes `outputs`, and may take the others. `inputs` are the record's fields without the label, `outputs` the
    chain's answer (a text where the chain has no parser), `reference` or `reference_outputs` the label (None without
    labels). An empty answer has the least mark without a call. Anything that is not one of the declared marks, an
    exception, and a call that failed, counts as the least mark. True and False are the marks 1 and 0; of a mapping, as
    LangSmith takes it, "score" counts.

    Args:
      function: a `Pure` function.
      marks: every mark that it may give, public; at most 32.
      name: public name of the table.

    Raises:
      ConfigurationError: `function` is not declared `Pure` or takes other names, or marks are not distinct finite
        numbers.
    """

    function: Pure
    marks: tuple[float, ...] = (0.0, 1.0)
    name: str = "score"

    def __post_init__(self) -> None:
        if type(self.function) is not Pure:
            advice = "Nobody can check what an own function keeps or sends: write Pure(function) to declare it pure."
            raise fail("Score", "a Pure function", type(self.function).__name__, advice)
        object.__setattr__(self, "marks", checked_marks(self.marks))

    def bind(self, fields: Sequence[str], label_key: str | None, labels: Sequence[str] | None) -> BoundEvaluator:
        """Returns the evaluator; see `Evaluator.bind`."""
        del labels
        check_name("name", self.name)
        places = {mark: place for place, mark in enumerate(self.marks)}
        taken = _taken(self.function.function)
        shown = tuple(name for name in fields if name != label_key)

        def place(record: Mapping[str, Any], answer: Any, judged: Any) -> int | None:
            del judged
            inputs = {name: record[name] for name in shown if name in record}
            reference = None if label_key is None else record[label_key]
            given = {"inputs": inputs, "outputs": answer, "reference": reference, "reference_outputs": reference}
            found = self.function(**{name: given[name] for name in taken})
            return places.get(float(found["score"] if isinstance(found, Mapping) else found))

        own = {"assumed": (self.function.name,), "identity": (Same(self.function.function),)}
        return _of_marks(self.name, self.marks, place, label_key=label_key, **own)


_NAMES = ("inputs", "outputs", "reference", "reference_outputs")


def _taken(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns which of the names of a `Score` a function takes; refuses one that needs others."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise fail("Score", "a function with a signature", function, "Wrap it in one.") from None
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return _NAMES
    named = {one.name for one in parameters if one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY}}
    needed = [one.name for one in parameters if one.default is one.empty]
    if "outputs" not in named or not needed or not set(needed) <= named & set(_NAMES):
        expected = f"a function of some of {list(_NAMES)}, outputs among them"
        raise fail("Score", expected, needed, "It is called by these names.")
    return tuple(name for name in _NAMES if name in named)


@dataclass(frozen=True)
class Judge(Evaluator):
    """The mark that a judge, a model with a prompt, gives to an answer.

    The prompt shows `answer`, what the chain under test answered, and may use the record's fields, also the label. The
    judge's own answer counts if it begins with one of the marks, at once or behind a few words and a colon, and holds
    no other number: "4", "**Score:** 4.0", "4 - it is right". Anything else counts as the least mark: "4/5",
    "4 out of 5", "not 4", "4 or 5".

    Args:
      chain: `prompt | model`, refused and silenced as the chain under test is; sees private records too.
      marks: every mark that it may give, public; at most 32.
      name: public name of the table.

    Raises:
      ConfigurationError: marks are not distinct finite numbers.
    """

    chain: Any
    marks: tuple[float, ...] = (0.0, 1.0)
    name: str = "judge"

    def __post_init__(self) -> None:
        object.__setattr__(self, "marks", checked_marks(self.marks))

    def bind(self, fields: Sequence[str], label_key: str | None, labels: Sequence[str] | None) -> BoundEvaluator:
        """Returns the evaluator; see `Evaluator.bind`."""
        del fields, labels
        check_name("name", self.name)
        places: dict[float | None, int] = {mark: place for place, mark in enumerate(self.marks)}

        def place(record: Mapping[str, Any], answer: Any, judged: Any) -> int | None:
            del record, answer
            return places.get(_number_in(judged))

        return _of_marks(self.name, self.marks, place, judge=self.chain, label_key=label_key)


_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_MOST_BEFORE = 80
_BEFORE = re.compile(r"\W*(?:[^\W\d]+(?:[ '-][^\W\d]+){0,4}[*_\"' ]*[:=])?[\s*_\"'`(\[{<]*")
_ENDS = ".,;:!?)"
_CLOSING = _ENDS + "*_\"'`]}>"


def _number_in(judged: Any) -> float | None:
    """Returns the one number that a judge's answer names, None where it may mean another one; see `Judge`."""
    if isinstance(judged, int | float):
        return float(judged)
    text = unicodedata.normalize("NFKC", judged).replace("\u2212", "-").strip()
    found = _NUMBER.search(text)
    if found is None or found.start() > _MOST_BEFORE:
        return None
    before, after = text[: found.start()], text[found.end() :]
    if any(unicodedata.category(character)[0] == "N" for character in before + after):
        return None
    return float(found[0]) if _BEFORE.fullmatch(before) and _stops(after) else None


def _stops(after: str) -> bool:
    """Whether no word follows directly: the end, a new line, a mark of the end or a dash comes first."""
    rest = after.lstrip(_CLOSING)
    if not rest or rest.lstrip(" \t").startswith(("\n", "\r")):
        return True
    is_ended = any(end in after[: len(after) - len(rest)] for end in _ENDS)
    return rest[0].isspace() and (is_ended or rest.lstrip().startswith(("(", "-", "\u2013", "\u2014")))


def checked_marks(marks: Any) -> tuple[float, ...]:
    """Returns marks as numbers, the least first; refuses others than 2 to 32 distinct finite ones."""
    try:
        listed = tuple(sorted(check_real("marks", float(mark), low=-1e9, high=1e9) for mark in marks))
    except (TypeError, ValueError):
        raise fail("marks", "a list of numbers", type(marks).__name__) from None
    if not 2 <= len(set(listed)) == len(listed) <= _MOST_MARKS:
        raise fail("marks", f"2 to {_MOST_MARKS} distinct numbers", listed)
    return listed


def _of_marks(name: str, marks: tuple[float, ...], place: Any, *, label_key: str | None, **rest: Any) -> BoundEvaluator:
    hidden = frozenset({label_key} if label_key is not None else ())
    cells = tuple(("", _shown(mark)) for mark in marks)
    return BoundEvaluator(name, cells, marks, place, _first_cell, hidden=hidden, **rest)


def _first_cell(record: Mapping[str, Any]) -> int:
    """Returns the outcome with the least score: marks are in order."""
    del record
    return 0


def _shown(mark: float) -> str:
    """Returns a mark with all its digits: 1, 0.25."""
    return str(int(mark)) if mark.is_integer() else repr(mark)


def paired(bound: BoundEvaluator) -> BoundEvaluator:
    """Returns the table of pairs of scores, of the chain and of a baseline; `place` then takes pairs of answers."""
    kinds = tuple(sorted(set(bound.scores)))
    order = {score: place for place, score in enumerate(kinds)}

    def place(record: Mapping[str, Any], answers: Any, judged: Any) -> int | None:
        new, old = (
            order[bound.scores[cell_of(bound, record, answer, mark)]]
            for answer, mark in zip(answers, judged, strict=True)
        )
        return new * len(kinds) + old

    pairs = tuple((new, old) for new in kinds for old in kinds)
    return replace(
        bound,
        cells=tuple((_shown(new), _shown(old)) for new, old in pairs),
        scores=tuple(new - old for new, old in pairs),
        place=place,
        worst=_first_cell,
        labels=(),
        kinds=(),
        own_scores=tuple(new for new, _ in pairs),
    )


def cell_of(bound: BoundEvaluator, record: Mapping[str, Any], answer: Any, judged: Any) -> int:
    """Returns the outcome of a record; that of the worst score where the evaluator fails or says something else.

    It raises for no answer, and drops what own functions log and warn of.
    """
    failed = answer is None or (bound.judge is not None and judged is None)
    found = None if failed else read_silently(lambda: bound.place(record, answer, judged))
    is_place = type(found) is int and 0 <= found < len(bound.cells)
    return found if is_place and found is not None else bound.worst(record)
