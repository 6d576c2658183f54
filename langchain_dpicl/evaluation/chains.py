"""Takes a chain apart (prompt | model | parser), asks its model and judges in silence, and makes rows of answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import CommaSeparatedListOutputParser, JsonOutputParser, StrOutputParser
from langchain_core.prompts import (
    AIMessagePromptTemplate,
    BasePromptTemplate,
    ChatPromptTemplate,
    FewShotPromptTemplate,
    HumanMessagePromptTemplate,
    PromptTemplate,
    SystemMessagePromptTemplate,
)
from langchain_core.runnables import RunnableLambda, RunnableSequence

from langchain_dpicl._opaque import OpaqueRows
from langchain_dpicl.backends.langchain.texts import text_of
from langchain_dpicl.backends.private_calls.call import (
    DEFAULT_CONCURRENCY,
    STOPS,
    CallPool,
    Crew,
    OpaqueValue,
    Reply,
    Request,
    RetryPolicy,
    quiet_arguments,
    quiet_settings,
    read_silently,
    silence,
    unwrap,
)
from langchain_dpicl.backends.private_calls.public_calls import answer_or_raise
from langchain_dpicl.backends.resolve import as_model
from langchain_dpicl.backends.sync_async import Blocking, Call, EffectGenerator, Guarded, LimitConcurrency
from langchain_dpicl.evaluation.evaluators import BoundEvaluator, Pure, Same, cell_of
from langchain_dpicl.exceptions import CapabilityError
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.privacy.private_examples import Unit

_PARSERS = (StrOutputParser, JsonOutputParser, CommaSeparatedListOutputParser)
_MESSAGES = (AIMessagePromptTemplate, HumanMessagePromptTemplate, SystemMessagePromptTemplate)
_RELEASED = "langchain_dpicl.prompts"
_SHAPE = "prompt | model, and after it stock parsers or RunnableLambda(Pure(function))"
_LABELS = frozenset({"metadata", "name", "tags"})  # of runs, which private calls are not
_DIGITS = 15  # of the words of a probe
_ADVICE = "Nothing else can be shown to keep private records to itself."

Answer = OpaqueValue[Any]

_CREW = Crew(DEFAULT_CONCURRENCY)
"""The threads of all chains and judges, which answer one after the other."""


def fields_shown(
    prompt: Any, *, known: Sequence[str], hidden: frozenset[str], inputs: Mapping[str, str] | None, name: str
) -> dict[str, str]:
    """Returns the declared field that each variable of a template shows; refuses others; `name` is for errors."""
    named = {} if inputs is None else inputs
    if not isinstance(named, Mapping) or not all(isinstance(one, str) for pair in named.items() for one in pair):
        raise fail("inputs", "the field of each variable, by its name", named)
    if not prompt.input_variables:
        advice = "Its text is the same for all records, and so is the answer. Nothing was charged."
        raise fail(name, f"a template with a variable among {sorted(set(known) - hidden)}", None, advice)
    fields = {variable: named.get(variable, variable) for variable in prompt.input_variables}
    for variable, shown in fields.items():
        if shown in hidden:
            advice = f"Variable {variable!r} would show it the reference."
            raise fail(name, "a template that does not show the label", shown, advice)
        if shown not in known:
            advice = "Name the field of each variable: inputs={variable: field}."
            raise fail(name, f"variables that are among {sorted(set(known) - hidden)}", variable, advice)
    return fields


@dataclass(frozen=True, repr=False, eq=False)
class SilentChain:
    """A chain whose parts are known: a template that formats, a silent model and pure parsers.

    Formal guarantees:
      - The chain and its steps are never invoked: LangChain's callbacks, tracers, caches and debug output see no run.
      - The answer to a record is computed from that record and public things alone; a record whose template, call or
        parser fails has the answer None and moves no other. Nothing private is kept.

    Attributes:
      prompt: the stock template.
      calls: the silent model.
      steps: what reads the answer, in order.
      fields: the declared field that each variable of the template shows.
      gives_text: whether the answer is a text, as far as is known before: no parser makes it a list or an object.
    """

    prompt: Any
    calls: CallPool
    steps: tuple[Callable[[Any], Any], ...]
    fields: Mapping[str, str]
    stop: tuple[str, ...]
    identity: tuple[Any, ...]
    assumed: tuple[str, ...] = field(default=())
    gives_text: bool = True

    @classmethod
    def of(
        cls,
        chain: Any,
        *,
        known: Sequence[str],
        hidden: frozenset[str] = frozenset(),
        inputs: Mapping[str, str] | None = None,
        retry: RetryPolicy | None = None,
        name: str = "chain",
    ) -> SilentChain:
        """Takes a chain apart; see the class.

        Args:
          chain: `prompt | model | parsers`.
          known: names that a variable of the template may show.
          hidden: those among them that it must not show.
          inputs: field by variable, where their names differ.
          retry: how long each record's call is waited for.
          name: of the parameter, for errors.

        Raises:
          CapabilityError: a step of another class.
          ConfigurationError: no variable, one that is no declared field, or one that would show the reference.
          UnsilencableModelError: a model that cannot be called in silence.
        """
        steps = chain.steps if type(chain) is RunnableSequence else [chain]
        if len(steps) < 2:
            raise _refused(name, steps)
        prompt, inner = _stock_prompt(name, steps[0]), as_model(steps[1])
        read: list[Callable[[Any], Any]] = []
        kinds: list[Any] = []
        assumed: list[str] = []
        rest: list[Any] = steps[2:]
        for step in rest:
            pure = getattr(step, "func", None) if type(step) is RunnableLambda else None
            if type(pure) is Pure:
                assumed.append(pure.name)
                read.append(pure.function)
                kinds.append(Same(pure.function))
            elif type(step) in _PARSERS:
                read.append(step.parse)
                kinds.append((type(step).__name__, _settings(step)))
            else:
                raise _refused(name, steps)
        fields = fields_shown(prompt, known=known, hidden=hidden, inputs=inputs, name=name)
        model, bound = unwrap(inner)
        silent = silence(inner)
        # [] takes the model's own away, under the name that its class sends.
        ends = [bound[name] for name in STOPS if bound.get(name) is not None]
        ends += filter(None, (getattr(model, name, None) for name in STOPS))
        stop = ends[0] if ends else ()
        policy = retry or RetryPolicy()
        if silent.is_chat and kinds and type(rest[0]) is RunnableLambda:
            msg = f"{name}: expected a parser behind a chat model, found a function, which the chain gives a message."
            raise CapabilityError(f"{msg} Here it would get the text: put StrOutputParser() between.")
        gives_text = not rest or type(rest[-1]) in {StrOutputParser, RunnableLambda}
        calls = CallPool(silent, policy, None, crew=_CREW)
        # What makes two chains the same for a kept result; it keeps the model alive, which is compared by identity.
        stops = (stop,) if isinstance(stop, str) and stop else tuple(stop)
        sent = (_settings(model, **quiet_settings(model)), _value(quiet_arguments(bound)), _value(stops))
        identity = (_digest(prompt), Same(model), tuple(sorted(fields.items())), *sent, policy, *kinds)
        return cls(prompt, calls, tuple(read), fields, stops, identity, tuple(assumed), gives_text)

    def probe(self) -> None:
        """Calls the model once with the template and public words, so that a wrong key or address costs nothing.

        The words are new each time: LangChain runs with them are runs of this call, also in a thread that is older.

        Raises:
          CapabilityError: the template shows too little of the words to recognize them, or cannot be filled.
          ModelCallError: the model could not be called.
          UnsilencableModelError: the call started LangChain runs.
        """
        answer_or_raise(self.calls.model.name, self.calls.probe(self._public_request()))

    async def aprobe(self) -> None:
        """Async twin of `probe`, which is another method of the model."""
        answer_or_raise(self.calls.model.name, await self.calls.aprobe(self._public_request()))

    def _public_request(self) -> Request:
        word = f"{SYSTEM_RANDOM.integer_below(10**_DIGITS):0{_DIGITS}}"
        try:
            prompt = self.prompt.format_prompt(**dict.fromkeys(self.fields, f"{word} is a public example"))
            found = "" if word in prompt.to_string() else "fewer"
        except (ValueError, LookupError):  # LangChain takes formats that text does not have
            found = "one that text cannot fill"
        if found:
            expected = f"expected a template that shows the first {_DIGITS} characters of a field"
            advice = "Leave format specifications such as {text:.5} out, and write {{ }} for braces in its examples."
            raise CapabilityError(f"{expected}, found {found}. {advice}")
        return self._request(OpaqueValue(prompt), explain="kind", watch=word)

    def to_dict(self) -> dict[str, Any]:
        """Returns what reports show of it."""
        return {"template": _digest(self.prompt), "model": self.calls.model.name}

    def answers(self, records: Sequence[OpaqueValue[Mapping[str, Any]]]) -> EffectGenerator[tuple[Answer | None, ...]]:
        """Answers private records (an effect generator): one `Answer` or None per record, in their order."""
        rendered = [read_silently(lambda box=box: OpaqueValue(self._prompt(box))) for box in records]  # type: ignore[misc]
        asked = [self._request(prompt) for prompt in rendered if prompt is not None]
        replies = iter((yield Call(partial(self.calls.many, asked), partial(self.calls.amany, asked))))
        return tuple(None if prompt is None else self.read(next(replies)) for prompt in rendered)

    def _prompt(self, box: OpaqueValue[Mapping[str, Any]]) -> Any:
        return self.prompt.format_prompt(**{name: box.reveal()[shown] for name, shown in self.fields.items()})

    def _request(self, prompt: OpaqueValue[Any], **probed: Any) -> Request:
        render: Any = (
            (lambda value: value.to_messages()) if self.calls.model.is_chat else (lambda value: value.to_string())
        )
        options = {"stop": list(self.stop)} if self.stop else {}
        return Request(cast("OpaqueValue[str]", prompt), render, options, **probed)

    def read(self, reply: Reply) -> Answer | None:
        """Returns the parsed answer of a private reply, hidden; None where the call or a parser failed."""
        return read_silently(lambda: self._parsed(reply))

    def _parsed(self, reply: Reply) -> Answer | None:
        found: Any = text_of(reply, self.stop)
        if not found.strip():
            return None
        for step in self.steps:
            found = step(found)
        return OpaqueValue(found)


def _stock_prompt(name: str, prompt: Any) -> Any:
    """Returns a template whose formatting is known to do nothing else; a released prompt as the stock one."""
    if type(prompt).__module__ == _RELEASED and hasattr(prompt, "to_stock"):
        prompt = prompt.to_stock()
    if not _is_plain(prompt):
        if not isinstance(prompt, BasePromptTemplate):
            raise _refused(name, [prompt])
        expected = "a template of f-strings and fixed messages, without functions, selectors and placeholders"
        raise CapabilityError(f"{name}: expected {expected}, found another {type(prompt).__name__}. {_ADVICE}")
    return prompt


def _is_plain(prompt: Any) -> bool:
    """Whether a template is stock, of f-strings, and calls no function when it formats."""
    partials = getattr(prompt, "partial_variables", None) or {}
    if any(not isinstance(value, str) for value in partials.values()) or getattr(prompt, "output_parser", None):
        return False
    if type(prompt) is PromptTemplate:
        return prompt.template_format == "f-string"
    if type(prompt) is FewShotPromptTemplate:
        is_list = prompt.example_selector is None and prompt.template_format == "f-string"
        return is_list and type(prompt.example_prompt) is PromptTemplate and _is_plain(prompt.example_prompt)
    if type(prompt) is not ChatPromptTemplate:
        return False
    parts: list[Any] = prompt.messages
    return all(
        (isinstance(part, BaseMessage) and type(part).__module__.startswith("langchain_core."))
        or (type(part) in _MESSAGES and type(part.prompt) is PromptTemplate and _is_plain(part.prompt))
        for part in parts
    )


def _refused(name: str, steps: Sequence[Any]) -> CapabilityError:
    found = " | ".join(type(step).__name__ for step in steps)
    return CapabilityError(f"{name}: expected {_SHAPE}, found {found}. {_ADVICE}")


def _digest(prompt: Any) -> str:
    """Returns the hash of all that a template shows: two templates of another text have another one.

    Raises:
      CapabilityError: a fixed message holds what is no JSON, and so cannot be compared.
    """
    try:
        shown = json.dumps(_content(prompt), sort_keys=True)
    except (TypeError, ValueError):
        raise _refused("template", [prompt]) from None
    return hashlib.sha256(shown.encode("utf-8", "surrogatepass")).hexdigest()


def _content(part: Any) -> list[Any]:
    """Returns a plain template, as `_is_plain` takes it, or a part of one, as JSON values.

    Each class is read field by field: the dump of a chat template leaves the text of its messages out.
    """
    kind, partials = type(part).__name__, getattr(part, "partial_variables", None)
    if isinstance(part, BaseMessage):
        return [kind, part.model_dump()]
    if type(part) is PromptTemplate:
        return [kind, part.template, partials]
    if type(part) is FewShotPromptTemplate:
        shown = _content(part.example_prompt)
        return [kind, part.prefix, part.examples, shown, part.suffix, part.example_separator, partials]
    if type(part) is ChatPromptTemplate:
        return [kind, [_content(message) for message in part.messages], partials]
    return [kind, _content(part.prompt), part.additional_kwargs]  # a message's template


def _settings(model: Any, **quiet: Any) -> tuple[tuple[str, Hashable], ...]:
    """Returns the values of a model's fields, which may change while the model stays the same object.

    Args:
      model: or a parser.
      **quiet: fields that have these values in private calls, whatever the model's own are.
    """
    shown = {name: getattr(model, name, None) for name in type(model).model_fields if name not in _LABELS} | quiet
    for own in ("__pydantic_private__", "__pydantic_extra__"):
        shown |= getattr(model, own, None) or {}
    return tuple((name, _value(value)) for name, value in shown.items())


def _value(value: Any, *, depth: int = 8) -> Hashable:
    """Returns what compares JSON values and arrays by their content, and everything else by identity.

    Never by repr: two classes of one name, two secrets and two long arrays print the same.
    """
    kind = type(value)
    if value is None or kind in {str, int, float, bool, bytes}:
        return kind.__name__, repr(value)
    if kind is np.ndarray and not value.dtype.hasobject:
        return kind.__name__, value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).digest()
    if depth and kind in {list, tuple}:
        return (kind.__name__, *(_value(one, depth=depth - 1) for one in value))
    if depth and kind is dict and all(type(key) is str for key in value):
        return (kind.__name__, *((key, _value(value[key], depth=depth - 1)) for key in sorted(value)))
    return Same(value)


ANSWER = "answer"
"""The variable of a judge's template that shows what the chain under test answered."""

Box = OpaqueValue[Mapping[str, Any]]


@dataclass(frozen=True, repr=False, eq=False)
class Question:
    """What is asked about each record: answers of the chains, judgements of them, and an outcome per evaluator.

    Attributes:
      chains: the chains under test.
      evaluators: of one answer, or of a pair where there are two chains and `is_paired`.
      judges: the silent judge of each evaluator, or None.
      is_paired: whether an outcome is of all answers together; else each chain has a column per evaluator, its score.

    Raises:
      CapabilityError: a parser makes an object of an answer that is compared as a text.
    """

    chains: tuple[SilentChain, ...]
    evaluators: tuple[BoundEvaluator, ...]
    judges: tuple[SilentChain | None, ...]
    is_paired: bool = False
    is_choice: bool = False

    def __post_init__(self) -> None:
        compared = self.chains if any(one.reads_text for one in self.evaluators) else ()
        if not all(one.gives_text for one in (*compared, *filter(None, self.judges))):
            expected = "expected a text where Exact or a Judge compares it, found a parser that makes another object"
            msg = f"{expected}. End the chain in StrOutputParser(), or in RunnableLambda(Pure(function))."
            raise CapabilityError(msg)

    @property
    def silent(self) -> tuple[SilentChain, ...]:
        """All chains that see records: those under test, and the judges."""
        return (*self.chains, *filter(None, self.judges))

    @property
    def identity(self) -> tuple[Hashable, ...]:
        """What makes it another question beside what a report shows: templates, models, settings and functions."""
        chains, judges = (tuple(one and one.identity for one in listed) for listed in (self.chains, self.judges))
        return chains, judges, tuple(one.identity for one in self.evaluators)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return len(self.chains) if self.is_choice else sum(map(len, self.widths))

    @property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """How many outcomes each table of each evaluator has."""
        return tuple(one.widths for one in self.evaluators)

    def probe(self, limit: int | None) -> EffectGenerator[None]:
        """Starts the threads, and calls every model once with public words: a wrong key or address costs nothing.

        Each call goes the way that the private ones will go, blocking or awaited; at most `limit` at once.

        Raises:
          ConfigurationError: the system starts no more threads.
          ModelCallError: a model could not be called.
        """
        for chain in self.silent:
            yield LimitConcurrency(Blocking(chain.calls.start), limit)
            yield LimitConcurrency(Call(chain.probe, chain.aprobe), limit)

    def ask(self, units: Sequence[OpaqueValue[Unit] | None]) -> OutcomeRequest:
        """Returns the effect that computes the rows of these units.

        Args:
          units: the records of each unit, private; None: they could not be read.
        """
        return OutcomeRequest(self, tuple(None if unit is None else _one_record(unit) for unit in units))

    @staticmethod
    def render(records: Sequence[Mapping[str, str]]) -> OpaqueValue[Unit]:
        """Returns what a row is asked: the records of its unit, hidden."""
        return OpaqueValue(tuple(map(dict, records)))


@dataclass(frozen=True, repr=False, eq=False)
class OutcomeRequest:
    """Computes the rows of one release: everything private runs below `run_guarded`, in boxes.

    A unit without records has a row that counts nowhere. What fails for a record is the worst score of that record.
    """

    question: Question
    records: tuple[Box | None, ...]

    def run(self) -> OpaqueRows:
        """Runs, blocking."""
        return Guarded(self._rows).run() or OpaqueRows(self._nothing())

    async def arun(self) -> OpaqueRows:
        """Runs, awaiting."""
        return await Guarded(self._rows).arun() or OpaqueRows(self._nothing())

    def _nothing(self) -> Any:
        fill = 0.0 if self.question.is_choice else -1.0
        return np.full((len(self.records), self.question.width), fill)

    def _rows(self) -> EffectGenerator[OpaqueRows]:
        there = [box for box in self.records if box is not None]
        answers: list[tuple[Answer | None, ...]] = []
        for chain in self.question.chains:
            of_one = yield from chain.answers(there)
            answers.append(of_one)
        judged: list[list[tuple[Answer | None, ...]]] = []
        for judge in self.question.judges:
            by_chain: list[tuple[Answer | None, ...]] = []
            for of_chain in answers:
                if judge is None:
                    by_chain.append((None,) * len(there))
                else:
                    by_chain.append((yield from judge.answers(list(map(_with_answer, there, of_chain)))))
            judged.append(by_chain)
        return OpaqueRows(self._spread(there, answers, judged))

    def _spread(self, there: Sequence[Box], answers: Any, judged: Any) -> Any:
        out = self._nothing()
        places = [place for place, box in enumerate(self.records) if box is not None]
        for number, (place, box) in enumerate(zip(places, there, strict=True)):
            of_chains = [one[number] for one in answers]
            marks = [[one[number] for one in by_chain] for by_chain in judged]
            out[place] = self._row(box, of_chains, marks)
        return out

    def _row(self, box: Box, answers: Sequence[Answer | None], marks: Sequence[Sequence[Answer | None]]) -> list[float]:
        question = self.question
        if question.is_choice:  # one evaluator, one column per chain
            (evaluator,), (own,) = question.evaluators, marks
            marks_of = [
                evaluator.scores[_cell(evaluator, box, answer, mark)] for answer, mark in zip(answers, own, strict=True)
            ]
            return _rounded(marks_of, min(evaluator.scores), max(evaluator.scores))
        found: list[float] = []
        for evaluator, own in zip(question.evaluators, marks, strict=True):
            if question.is_paired:
                cell = _cell(evaluator, box, OpaqueValue(_revealed(answers)), OpaqueValue(_revealed(own)))
            else:
                cell = _cell(evaluator, box, answers[0], own[0])
            found.extend(evaluator.places(cell))
        return found


_COIN = 1 << 53


def _rounded(marks: Sequence[float], least: float, most: float) -> list[float]:
    """Returns 1 for each mark with the chance of its share of the range, else 0; one coin for all marks of a record."""
    coin = SYSTEM_RANDOM.integer_below(_COIN)
    return [float(coin < int(_COIN * ((mark - least) / (most - least)))) for mark in marks]


def _revealed(boxes: Sequence[Answer | None]) -> tuple[Any, ...]:
    return tuple(None if box is None else box.reveal() for box in boxes)


def _cell(evaluator: BoundEvaluator, box: Box, answer: Answer | None, judged: Answer | None) -> int:
    """Returns the place of an outcome; that of the worst score if the evaluator raises."""
    shown = (None if each is None else each.reveal() for each in (answer, judged))
    return cell_of(evaluator, box.reveal(), *shown)


def _one_record(unit: OpaqueValue[Unit]) -> Box | None:
    """Returns one record of a unit, drawn by secret coins if it has several; None if it has none."""
    count = len(unit.reveal())
    return None if not count else OpaqueValue(dict(unit.reveal()[SYSTEM_RANDOM.integer_below(count)]))


def _with_answer(box: Box, answer: Answer | None) -> Box:
    """Returns what a judge is shown of a record; without a text its template cannot be filled, and it fails."""
    text = None if answer is None else read_silently(lambda: str(answer.reveal()))
    return box if text is None else OpaqueValue({**box.reveal(), ANSWER: text})
