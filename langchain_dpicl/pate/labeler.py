"""Labels public inputs by votes of prompts of private records, here or on workers (PromptPATE, Duan et al. 2023)."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeAlias

from langchain_core.documents import Document
from langchain_core.runnables import RunnableConfig

from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl._opaque import PerProcess, this_process
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.backends.sync_async import (
    AcquireGate,
    Blocking,
    EffectGenerator,
    FairSemaphore,
    ThreadedContext,
    awaitable,
    run_async,
    run_sync,
)
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.handler import BudgetLike, RunEvents, describe_tickets_left, resolve_budget
from langchain_dpicl.distributed import (
    ExecutorLike,
    JobLease,
    JobResult,
    RemoteExecution,
    TurnLostError,
    Workplace,
)
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, PrivacyBudgetExceededError
from langchain_dpicl.options import (
    LLM,
    ConfidentGNMax,
    FewShotTask,
    LabelAnswers,
    LocalExecutor,
    Noise,
    NoiseName,
    PublicInput,
    Rows,
    TemplateLike,
    Where,
    noise_of,
    option_of,
    refuse_unused,
)
from langchain_dpicl.pate.plan import LabellingPlan, default_design, kind_of_teachers, plan_labelling
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.planning.row_law import RowGuess, RowSource
from langchain_dpicl.planning.share_plan import Cost
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.extensions.confident_gnmax import ConfidentGNMaxMechanism
from langchain_dpicl.privacy.extensions.registry import ANSWER_TEMPLATE, LABEL_TEMPLATE, SAMPLE_TEMPLATE, TEST_TEMPLATE
from langchain_dpicl.privacy.extensions.registry import Teachers as TeacherKind
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum, VoteSum
from langchain_dpicl.privacy.mechanisms.release_plan import Mechanism, Release
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.rehearsal.choice import ChosenRows, chosen_rows
from langchain_dpicl.rehearsal.rehearsal import Rehearsal
from langchain_dpicl.release.curator import SecretSample, is_unanswered, open_sample
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.release.samples import Partition, open_partition, release_once
from langchain_dpicl.released.labelled_pool import LabelledPool, PoolEntry
from langchain_dpicl.runs.answer_memo import scope_of_plan
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.query_plan import mechanism_for, rejection
from langchain_dpicl.runs.release_run import ReleaseRun, RunCall, RunJournal, carrying, check_paid, new_bar, tick
from langchain_dpicl.stores import MemoKey, ReleaseMemo
from langchain_dpicl.stores.memos import query_of, scope_of, tenant_of
from langchain_dpicl.tasks import FewShotTemplate, Query, VotingTask, choice_engine, public_text, reader_of

Fields = dict[str, str]


@dataclass(frozen=True, slots=True)
class InputTemplate:
    """Templates of public inputs: as queries, and as demonstrations once they are labelled. Public."""

    wording: FewShotTemplate
    text_key: str
    label_key: str

    @classmethod
    def of(cls, private: PrivateExamples, wording: FewShotTemplate) -> InputTemplate:
        """Uses the field names of the private examples."""
        if private.label_key is None:
            advice = "Declare PrivateExamples(label_key=..., labels=...)."
            raise fail("private", "examples with a label field, which demonstrations show", None, advice)
        wording.check_shows(private.label_key)
        return cls(wording, private.text_key, private.label_key)

    @property
    def field_of(self) -> dict[str, str]:
        """The field that fills each variable of the query: the one of that name, or the text for `input`."""
        names = self.wording.input_variables
        if self.label_key in names:
            raise fail("suffix", "a template of the query without its label", f"{{{self.label_key}}}")
        known = set(self.wording.example_fields)
        return {
            name: self.text_key if name not in known and (name == "input" or len(names) == 1) else name
            for name in names
        }

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a public input: those of a demonstration without the label, and those of the query."""
        shown = (name for name in self.wording.example_fields if name != self.label_key)
        return tuple(dict.fromkeys((*shown, *self.field_of.values())))

    def fields_of(self, public_input: Any) -> Fields:
        """Returns the fields of a public input: text, a document, or a dict of fields (or of the query's variables).

        Other keys of a dict are left out.
        """
        names = self.fields
        if isinstance(public_input, Document) and len(names) == 1:
            public_input = public_input.page_content
        if isinstance(public_input, str) and len(names) == 1:
            return {names[0]: public_text("public_inputs", public_input)}
        if not isinstance(public_input, Mapping):
            expected = "text" if len(names) == 1 else f"a dict with {list(names)}"
            raise fail("public_inputs", expected, type(public_input).__name__)
        if self.label_key in public_input:
            advice = "Labelled examples are added with add_public_example, which is free."
            raise fail("public_inputs", f"inputs without {self.label_key!r}", sorted(map(str, public_input)), advice)
        variables = {field: name for name, field in self.field_of.items()}
        keys = {name: name if name in public_input else variables.get(name, name) for name in names}
        if missing := [name for name, key in keys.items() if key not in public_input]:
            raise fail("public_inputs", f"a dict with {list(names)}", f"{missing} missing")
        return {name: public_text(f"public_inputs[{name!r}]", public_input[key]) for name, key in keys.items()}

    def asked_of(self, public_input: Any) -> Fields:
        """Returns the fields of an input that the teachers label; a blank one would cost as much as any other."""
        fields = self.fields_of(public_input)
        if not any(text.strip() for text in self.query_of(fields)):
            raise fail("public_inputs", "inputs with text", "a blank one", "Nothing was charged.")
        return fields

    def query_of(self, fields: Mapping[str, str]) -> Query:
        """Returns the query that asks for the label of a public input."""
        return tuple(fields[field] for field in self.field_of.values())

    def waiting(self, inputs: Iterable[Any]) -> list[PoolEntry]:
        """Returns the distinct inputs as waiting entries: equal inputs are charged once."""
        if isinstance(inputs, str | Mapping) or not isinstance(inputs, Iterable):
            raise fail("public_inputs", "a list of inputs", type(inputs).__name__)
        every = [self.asked_of(public_input) for public_input in inputs]
        distinct = {key_of(fields): fields for fields in reversed(every)}  # of equal inputs the first is kept
        return [
            PoolEntry(fields=distinct[key], label=None, status="waiting") for key in dict.fromkeys(map(key_of, every))
        ]


def key_of(fields: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns the key of an input: equal inputs have equal keys."""
    return tuple(sorted(fields.items()))


RecordRelease: TypeAlias = Callable[[Release, Reservation], None]
"""Stores a release, before its ticket is committed."""


class Teachers:
    """Teachers with a ticket per input: a fresh secret sample for each input, or the same partition.

    Formal guarantees:
      - One input is one ticket, or one release on a ticket's sample; it is reserved before any private record is read
        and stays charged once it has burnt.
    """

    def __init__(
        self, private: PrivateExamples, share: Share, *, plan: LabellingPlan, task: VotingTask, rows: LabelRows
    ) -> None:
        self.plan = plan
        self.task = task
        self.rows = rows
        self._private = private
        self._share = share
        self._partition: Partition | None = None

    @property
    def left(self) -> int:
        """Number of further inputs that the share pays for."""
        return self._share.remaining(LABEL_TEMPLATE)

    @property
    def used(self) -> int:
        """Number of inputs that the share has paid for, over all processes."""
        return self.plan.max_queries - self.left

    def ask(self, query: Query, events: RunEvents, keep: RecordRelease) -> EffectGenerator[None]:
        """Asks the teachers about one public input (a generator); calls `keep` before the ticket is committed."""
        ticket = self._share.reserve(LABEL_TEMPLATE)
        events.tickets += 1
        try:
            yield from release_once(
                self._private, ticket, keep=lambda released: keep(released, ticket), **self._how(query, ticket)
            )
        finally:
            events.tickets -= ticket.give_back()

    def _how(self, query: Query, ticket: Reservation) -> dict[str, Any]:
        if self.plan.teachers == "fixed" and self._partition is None:
            plan = self.plan.release
            # Opened once and kept: a partition that is drawn again would be another mechanism.
            self._partition = open_partition(self._private, plan=plan, ledger_id=ticket.ledger_id)
        return {"plan": self.plan.release, "partition": self._partition, **self._question(query)}

    def _question(self, query: Query) -> dict[str, Any]:
        render = self.task.wording.renderer(self.task.queries(query))
        return {"rows": self.rows.ask, "render": render, "width": self.rows.width}


class SingleSampleTeachers(Teachers):
    """Teachers from one secret sample for the whole run: one ticket, burnt by the first input."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._opened: tuple[SecretSample, Reservation] | None = None

    @property
    def left(self) -> int:
        """Number of further inputs that the share pays for."""
        if self._opened is not None:
            return min(self._opened[0].left, self._opened[0].answers_left)
        return self.plan.max_queries * self._share.remaining(SAMPLE_TEMPLATE)

    def ask(self, query: Query, events: RunEvents, keep: RecordRelease) -> EffectGenerator[None]:
        """Asks; see `Teachers.ask`. The ticket is committed after the first release."""
        sample, ticket = self._opened or self._open(events)
        keep((yield from sample.next_release(**self._question(query))), ticket)
        if ticket.uncommitted:
            ticket.commit()

    def _open(self, events: RunEvents) -> tuple[SecretSample, Reservation]:
        ticket = self._share.reserve(SAMPLE_TEMPLATE)
        events.tickets += 1
        plan = self.plan
        try:
            sample = open_sample(
                self._private, ticket, plan=plan.release, length=plan.max_queries, answers=plan.max_answers
            )
        finally:
            events.tickets -= ticket.give_back()
        self._opened = sample, ticket
        return self._opened


class TestedTeachers(Teachers):
    """Teachers of a partition whose tests and answers have separate tickets."""

    @property
    def used(self) -> int:
        """Number of inputs that the share has paid for, over all processes."""
        return self.plan.max_queries - self._share.remaining(TEST_TEMPLATE)

    @property
    def left(self) -> int:
        """Number of further inputs that the share pays for."""
        return min(self._share.remaining(TEST_TEMPLATE), self._share.remaining(ANSWER_TEMPLATE))

    def ask(self, query: Query, events: RunEvents, keep: RecordRelease) -> EffectGenerator[None]:
        """Asks; see `Teachers.ask`."""
        # Both tickets are reserved first: a test without a ticket for its answer could not be completed.
        answer = self._share.reserve(ANSWER_TEMPLATE)
        events.tickets += 1
        try:
            test = self._share.reserve(TEST_TEMPLATE)
        except BaseException:
            events.tickets -= answer.give_back()
            raise
        events.tickets += 1
        try:
            released = yield from release_once(
                self._private,
                test,
                answer=answer,
                keep=lambda released: keep(released, test),
                **self._how(query, test),
            )
        finally:
            if test.unburnt:  # no record was read: both are handed back
                events.tickets -= test.give_back() + answer.give_back()
        # A test that fails releases no answer, and the curator hands the answer's ticket back.
        events.tickets -= is_unanswered(released)


def teachers_of(
    private: PrivateExamples, share: Share, *, plan: LabellingPlan, task: VotingTask, rows: LabelRows
) -> Teachers:
    """Returns the teachers of a plan."""
    is_tested = isinstance(plan.release.mechanism, ConfidentGNMaxMechanism)
    kind: type[Teachers] = SingleSampleTeachers if plan.teachers == "one_sample" else Teachers
    if plan.teachers == "fixed" and is_tested:
        kind = TestedTeachers
    return kind(private, share, plan=plan, task=task, rows=rows)


InputJob: TypeAlias = tuple[tuple[str, str], ...]
"""The fields of a public input, sorted by name."""


@dataclass(frozen=True, slots=True)
class LabellingJob:
    """The job of labelling public inputs, built from the driver's plan; public.

    `reads` says whether votes are calibrated, and whether votes without a label count.
    """

    ledger_id: str
    component: str
    epsilon: float | None
    plan: LabellingPlan
    task: VotingTask
    inputs: InputTemplate
    public: Mapping[str, Any]
    reads: tuple[bool, bool]

    def __post_init__(self) -> None:
        if self.plan.teachers != "fresh":
            advice = "One secret sample, or one partition, stays in one process."
            raise fail("rows", "a new sample for each input with an executor", self.plan.teachers, advice)

    @property
    def key(self) -> str:
        """Public key of the whole job, so that a worker never confuses two jobs of one component."""
        return f"{self.ledger_id}/{self.component}/{query_of([repr(self)])}"

    def begin(self, place: Workplace) -> Callable[[InputJob], JobResult]:
        """Declares the same share from the worker's own examples, and returns the function that labels one input."""
        private, budget, memo = place.paid(ledger_id=self.ledger_id, num_jobs=self.plan.max_queries)
        engine = choice_engine(place.llm, self.task)
        calibrate, other = self.reads
        rows = LabelRows(engine, list(self.task.texts.values()), calibrate=calibrate, other=other)
        model = {"model": getattr(engine, "name", type(engine).__name__), "reads": rows.kind}
        changed = sorted(name for name in model if model[name] != self.public[name])
        if changed:
            raise fail("workplace", "the model that the plan was made with", f"differences in {changed}")
        share = declare_share(
            private,
            budget,
            self.plan,
            component=self.component,
            epsilon=self.epsilon,
            public=self.public,
            engines=[rows],
            terms=_terms_of(self.public),
        )
        scope = scope_of(scope_of_plan(budget, share, dataset_id=private.dataset_id, public=self.public))
        run = _MemoRun(
            private,
            share,
            [],
            plan=self.plan,
            task=self.task,
            rows=rows,
            inputs=self.inputs,
            engine=engine,
            budget=budget,
            public=self.public,
        )
        run.set_memo(memo, scope)
        return run.answer


@dataclass(slots=True, eq=False)
class PoolItem:
    """A public input of a run."""

    entry: PoolEntry
    busy: bool = False

    @property
    def done(self) -> bool:
        """Whether the input is labelled or rejected."""
        return self.entry.status != "waiting"


@tells_how_to_build()
class PromptPATELabeler(ReleaseRun[PoolEntry, LabelledPool]):
    """Labels public inputs by the votes of private teacher prompts, under differential privacy.

    Formal guarantees:
      - All labels, rejections and noisy votes together are (epsilon, delta)-DP for one unit of the private examples, at
        the share's epsilon and delta; epsilon is an upper bound and does not depend on the votes.
      - Every input's ticket burns before a private record is read for it; the public model is called first, so an
        outage costs nothing. The teachers are never asked again about an answered input.
      - Teachers are drawn at random, never selected by their accuracy.

    Build it with `from_private_examples`; `run` and `arun` label inputs until none waits or the share is spent, and
    continue after an interruption. Callbacks of their config, or of the LangChain run around them, receive
    `dpicl.charged` per input and `dpicl.refused`; see `budget.handler`.
    """

    _item_name: ClassVar[str] = "input"
    _unit: ClassVar[str] = "input"
    _title: ClassVar[str] = "private labels"
    plan: LabellingPlan

    def __init__(
        self,
        private: PrivateExamples,
        share: Share,
        entries: Sequence[PoolEntry],
        *,
        plan: LabellingPlan,
        task: VotingTask,
        rows: LabelRows,
        inputs: InputTemplate,
        engine: Any,
        budget: Budget,
        public: Mapping[str, Any],
        journal: RunJournal | None = None,
        executor: RemoteExecution | LocalExecutor | None = None,
        source: RowSource | None = None,
    ) -> None:
        items = {key_of(entry.fields): PoolItem(entry) for entry in entries}
        super().__init__(
            private, items.values(), plan=plan, budget=budget, share=share, journal=journal, executor=executor
        )
        self.task = task
        self.rows = rows
        self.inputs = inputs
        self.engine = engine
        self.source = source
        self._public = dict(public)
        self._teachers = teachers_of(private, share, plan=plan, task=task, rows=rows)
        self._known = items
        self._growing = PerProcess(threading.Lock)
        self._gates = PerProcess(lambda: FairSemaphore(1))
        self._holder: _Caller | None = None
        self._resume()
        # A checkpoint from elsewhere must not bring labels that this share has not paid for.
        check_paid(sum(item.done for item in self._items), used=self._teachers.used, what="labels")

    @classmethod
    @door("PromptPATELabeler")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: LLM,
        public_inputs: Sequence[PublicInput] = (),
        max_queries: int | None = None,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        task: FewShotTask | None = None,
        rows: Rows | Rehearsal | None = None,
        noise: Noise | ConfidentGNMax | NoiseName | None = None,
        answers: LabelAnswers | None = None,
        component: str | None = None,
        checkpoint: Where | None = None,
        executor: ExecutorLike = None,
    ) -> Self:
        """Plans the noise, declares the share and returns a labeler that has spent nothing so far.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here. They need a label field.
          llm: an engine, or a LangChain model. It receives the private prompts.
          public_inputs: texts, documents, or dicts of the fields that an example shows; repeated ones count once.
          max_queries: inputs that the share pays for; None: the number of distinct public inputs. Further inputs wait;
            further tickets are for `label`. Give it where a later run continues with other inputs.
          budget: a PrivacyBudgetCallbackHandler, a Budget, or a RunnableConfig whose callbacks hold one; None: looked
            up in the context.
          epsilon: this component's share of the budget (its noise is calibrated to it). If the noise is given, the
            whole share is charged all the same; without `epsilon` the price of the plan is charged.
          example_prompt: template of one record, short for `task=`.
          suffix: template of the public input, after the examples; the label is what follows. Short for `task=`.
          task: a `FewShotTask`: wording, labels and verbalizers; see there.
          rows: a `Rows`: how many teachers, of how many records; see there. Or a `Rehearsal`, which chooses teachers,
            noise and calibration. By default the shape that the engine declares, 20 teachers of 4 records, and each
            input gets a new secret sample, amplified. `redraw_every="run"` draws one sample for all inputs, amplified
            once; its prompts repeat, which suits prompt caches. `sampling="partition"` is the paper's: an exact
            disjoint partition, drawn once and kept, nothing amplified; `replace_one` only.
          noise: a `Noise`, its mechanism's name, or a `ConfidentGNMax`; see there. "gaussian" releases one noisy
            histogram per input, from which threshold and label both come; `ConfidentGNMax` is the paper's.
          answers: a `LabelAnswers`: how votes are read, and which share of the votes a label needs; see there. Other
            inputs are rejected. By default half of the share of uniformly random votes, so that inputs are rejected if
            most teachers give no vote, unless the noise alone is larger. `ConfidentGNMax` has a threshold of its own.
          component: name in the ledger; the same name and plan find the same share, with its remaining tickets.
          checkpoint: file that every released label is written to before its ticket is committed. If it exists, the run
            continues from it, with the same ledger, data set and options only; `result.save` writes the labels.
          executor: a `RayExecutor`, or "ray": inputs are labelled by workers, each with its own records, model and
            connection to the ledger; a rerun finds the releases of this `component`. Needs a new sample per input.
            A `LocalExecutor` or None: inputs are labelled in this process.

        Raises:
          ConfigurationError: a public fault; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, another budget, or one that does not suffice.
          ModelCallError: the model could not be reached.

        Source: Duan et al. (2023), Flocks of Stochastic Parrots; docs/prompt-pate.md explains the differences.
        """
        spender = resolve_budget(budget)
        reading = option_of("answers", answers, LabelAnswers)
        chosen = _checked_noise(noise, reading)
        words = VotingTask.of(private, FewShotTask.of(task, example_prompt, suffix), reading)
        inputs = InputTemplate.of(private, words.wording)
        entries = inputs.waiting(public_inputs)
        engine = choice_engine(llm, words)
        texts = list(words.texts.values())
        other = bool(reading.other_label) and LabelRows(engine, texts, calibrate=False).kind == "text votes"
        if other and reading.other_label in words.labels:
            raise fail("other_label", "a text that is none of the labels, or ''", reading.other_label)
        least = _least_share(reading, chosen, len(words.labels))
        terms: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": share_of_delta(spender, epsilon=epsilon, delta=chosen.delta),
            "adjacency": spender.adjacency,
            "max_queries": _query_count(max_queries, entries),
        }
        teachers, shape = _teachers(
            rows if isinstance(rows, Rehearsal) else option_of("rows", rows, Rows),
            private.public_size_of(None),
            engine=engine,
            wordings=words.wording.num_wordings,
            mechanism=_mechanism_of(chosen, reading),
            is_confident=isinstance(chosen, ConfidentGNMax),
            calibrate=reading.calibrate,
            **terms,
        )
        plan = _planned(
            private,
            words,
            shape,
            teachers=teachers,
            noise=chosen,
            abstain_below=least,
            width=len(words.labels) + other,
            **terms,
        )
        plan.design.check_wordings(words.wording.num_wordings)
        words, scorer, read = reader_of(engine, words, is_wanted=shape.calibrate, other=other)
        shape.check(words, read, plan)
        shown = {"text_key": inputs.text_key, "content_free_inputs": list(reading.content_free)}
        public = {**plan.to_dict(), **words.to_dict(), **read, **shown, "abstain_below": least, **shape.reported}
        public |= {"other_label": reading.other_label} if other else {}
        name, journal = RunJournal.of(checkpoint, component, "pate", budget=spender, private=private, plan=public)
        lines = journal.entries if journal is not None else ()
        answered = {key_of(PoolEntry.from_dict(line).fields) for line in lines}
        queries = [None if key_of(one.fields) in answered else inputs.query_of(one.fields) for one in entries]
        _check_room(engine, words, queries, max_queries=plan.max_queries)
        declared: dict[str, Any] = {"component": name, "epsilon": epsilon, "public": public}
        reads = (scorer.calibrates, scorer.counts_other)
        order: dict[str, Any] = {"plan": plan, "task": words, "inputs": inputs, "reads": reads, **declared}
        # Checked before the share is declared: a ledger that workers cannot reach must leave nothing behind.
        elsewhere = RemoteExecution.of(executor, spender, lambda _: LabellingJob(spender.ledger_id, **order))
        share = declare_share(private, spender, plan, engines=[scorer], terms=_terms_of(public), **declared)
        return cls(
            private,
            share,
            entries,
            plan=plan,
            task=words,
            rows=scorer,
            inputs=inputs,
            engine=engine,
            budget=spender,
            public=public,
            journal=journal,
            executor=elsewhere,
            source=shape.source,
        )

    afrom_private_examples = awaitable(from_private_examples)

    @property
    def queries_left(self) -> int:
        """Number of further inputs that can be paid for."""
        return self._teachers.left

    def expected(self) -> dict[str, Any]:
        """Returns the chances of a label and what they rest on: a rehearsal, or a guess."""
        names = len(self.task.labels)
        return self.plan.expected(self.source, calibrated=bool(self.task.content_free), labels=names)

    def cost(self, **tokens: int) -> Cost:
        """Returns the model calls and tokens of all queries, calibration included; `tokens` as for `plan.cost`."""
        return self.plan.cost(**{"calls_per_row": 1 + len(self.task.content_free), **tokens})

    def label(self, given: PublicInput) -> PoolEntry:
        """Labels one more public input, at the cost of one query; free if the input is answered already.

        Args:
          given: a text, a document, or a dict of the fields that an example shows; public.

        Raises:
          PrivacyBudgetExceededError: the share is spent.
          ModelCallError: the public model call failed; nothing was charged.
          ConfigurationError: the input lacks a field.
        """
        item, elsewhere = self._item_of(given), self._elsewhere
        if not item.done and elsewhere is not None:
            run_sync(self._serialised(lambda: self._label_remotely(elsewhere, item), _caller()))
        elif not item.done:
            with carrying(run=self), self._events(None) as events, self._session(events):
                run_sync(self._serialised(lambda: self._label(item, events), _caller()))
                self._answer(item)  # refuses here, where events show it
        return self._answer(item)

    async def alabel(self, given: PublicInput) -> PoolEntry:
        """Asynchronous version of `label`."""
        item, elsewhere, me = self._item_of(given), self._elsewhere, _caller()
        if not item.done and elsewhere is not None:
            await run_async(self._serialised(lambda: self._label_remotely(elsewhere, item), me))
        elif not item.done:
            with carrying(run=self):
                async with (
                    self._events(None) as events,
                    ThreadedContext(self._session(events), is_slow=self._is_slow),
                ):
                    await run_async(self._serialised(lambda: self._label(item, events), me), is_slow=self._is_slow)
                    self._answer(item)
        return self._answer(item)

    # -- the hooks of `ReleaseRun` -----------------------------------------------------------------------------------

    def _make(self, item: PoolItem, call: RunCall) -> EffectGenerator[None]:
        # The caller is known here: the steps of the generator may run in other threads.
        return self._serialised(lambda: self._label(item, call.events), _caller())

    def _examples(self, item: PoolItem) -> list[PoolEntry]:
        return [item.entry] if item.done else []

    def _value(self) -> LabelledPool:
        report = self.report
        return LabelledPool(
            tuple(item.entry for item in self._items),
            label_key=self.inputs.label_key,
            labels=self.task.labels,
            shown={label: texts[0].strip() for label, texts in self.task.texts.items()},
            report=report,
            plan={**self._public, **report["plan"]},  # its price as it was sealed
        )

    def _restore(self, entry: Mapping[str, Any]) -> None:
        known = PoolEntry.from_dict(entry)
        if known.status not in {"labelled", "rejected"} or known.label not in {None, *self.task.labels}:
            raise fail("checkpoint", "releases with labels of this task", f"status {known.status!r}")
        item = self._item_of(known.fields)
        item.entry = replace(known, fields=item.entry.fields)

    def _job(self, item: PoolItem) -> InputJob:
        return key_of(item.entry.fields)

    def _take(self, item: PoolItem, result: Any, call: RunCall) -> None:  # noqa: ARG002
        item.entry = PoolEntry.from_dict(result)
        self._record(item.entry.to_dict())

    def _without_tickets(self, missing: int) -> str:  # noqa: ARG002  inputs that cannot be paid for wait
        return "some inputs found no ticket, and tickets were handed back afterwards" if self.queries_left else ""

    def _open_items(self) -> Iterator[PoolItem]:
        """Yields the waiting inputs; here while the share pays, elsewhere all: a memo may hold their labels."""
        waiting = (item for item in list(self._items) if not item.done)
        return itertools.takewhile(lambda _: self._elsewhere is not None or self.queries_left > 0, waiting)

    def _steps_left(self) -> int:
        return min(self.queries_left, super()._steps_left())

    def _show(self, bar: Any) -> None:
        tick(bar)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _item_of(self, public_input: Any) -> PoolItem:
        """Returns the item of an input, which is appended if it is new."""
        fields = self.inputs.asked_of(public_input)
        with self._growing.here:
            if (key := key_of(fields)) not in self._known:
                self._known[key] = PoolItem(PoolEntry(fields=fields, label=None, status="waiting"))
                self._items.append(self._known[key])
            return self._known[key]

    def _answer(self, item: PoolItem) -> PoolEntry:
        """Returns the entry of an input that was asked about."""
        if item.done:
            return item.entry
        msg = (
            f"label: requested 1 query of {self.component!r}, remaining 0. Its {self.plan.max_queries} queries are "
            "spent; build another component for more."
        )
        raise PrivacyBudgetExceededError(msg, requested=1, remaining=0)

    def _label_remotely(self, elsewhere: RemoteExecution, item: PoolItem) -> EffectGenerator[None]:
        """Has a worker label one input (an effect generator), unless it is answered meanwhile."""
        if not item.done:
            yield Blocking(lambda: self._hand_out(elsewhere, item))

    def _hand_out(self, elsewhere: RemoteExecution, item: PoolItem) -> None:
        """Has a worker label one input; the memo then holds the label for every run."""
        waits, mine = self._holder, _caller()  # holders of the turn: async code waits for this in a thread
        self._holder = mine
        try:
            events = self._events(None)
            with carrying(run=self), self._session(events), new_bar(1, self._unit, self._title, progress=False) as bar:
                for _ in self._run_remotely(elsewhere, RunCall(events, bar, None), [item]):
                    pass
        finally:
            if self._holder == mine:  # a coroutine that was closed meanwhile gave its turn back
                self._holder = waits  # others use this thread from now on

    def _serialised(self, label: Callable[[], EffectGenerator[None]], me: _Caller) -> EffectGenerator[None]:
        """Labels one input under the lock of the run (a generator): concurrent calls label one input at a time."""
        gate, holder = self._gates.here, self._holder
        # All that a thread is asked within blocking code, which has no task, is asked inside it.
        is_inside = holder is not None and holder[:2] == me[:2] and holder[2] in {None, me[2]}
        if is_inside or not (yield AcquireGate(gate)):  # waiting would deadlock
            msg = "label: expected no call inside another one, nor a blocking call below a running event loop."
            raise ConfigurationError(f"{msg} Use alabel.")
        self._holder = me
        try:
            yield from label()
        finally:
            self._holder = None
            gate.__exit__(None, None, None)

    def _label(self, item: PoolItem, events: RunEvents) -> EffectGenerator[None]:
        """Labels one input (an effect generator), unless it is answered meanwhile or the share is spent."""
        if item.done or not self._teachers.left:
            return
        query = self.inputs.query_of(item.entry.fields)
        first, *others = self.task.wording.renderer(self.task.queries(query)).public()
        yield from self.rows.check_room([own for own, *_ in others])
        yield self.rows.request_public_rows([first], needs_text=True)

        def keep(released: Release, ticket: Reservation) -> None:
            item.entry = self._answered(item.entry, released)
            self._record(item.entry.to_dict(), ticket)

        self._check_turn()
        try:
            yield from self._teachers.ask(query, events, keep)
        except PrivacyBudgetExceededError:
            # Another run of the same share took the last ticket meanwhile, or there is another reason.
            if self._teachers.left:
                raise

    def _check_turn(self) -> None:
        """Called before a ticket is reserved."""

    def _answered(self, entry: PoolEntry, released: Release) -> PoolEntry:
        """Returns the entry with the label or rejection of a release (post-processing)."""
        labels = self.task.labels
        place, votes = released.index, None
        if released.values is not None:
            values = [float(value) for value in released.values]
            place = max(range(len(values)), key=values.__getitem__)
            names = (*labels, *([self._public["other_label"]] if len(values) > len(labels) else []))
            votes = dict(zip(names, values, strict=True))
            if self.plan.threshold is not None and values[place] < self.plan.threshold:
                place = None
        if place is None or place >= len(labels):
            return PoolEntry(fields=entry.fields, label=None, status="rejected", votes=votes)
        return PoolEntry(fields=entry.fields, label=labels[place], status="labelled", votes=votes)

    def __repr__(self) -> str:
        queries_left = describe_tickets_left(lambda: self.queries_left)
        return f"PromptPATELabeler(component={self.component!r}, queries_left={queries_left})"


class _MemoRun(PromptPATELabeler):
    """A run over the inputs of one worker; each release is in the memo before its ticket is committed."""

    _memo: ReleaseMemo
    _scope: str
    _at: tuple[MemoKey, JobLease] | None = None
    _paid: RunEvents | None = None

    def set_memo(self, memo: ReleaseMemo, scope: str) -> None:
        """Sets the memo and the scope of releases."""
        self._memo, self._scope = memo, scope

    def answer(self, job: InputJob) -> JobResult:
        """Returns the label in the memo, or releases one and stores it."""
        key = MemoKey(self._scope, tenant_of(""), query_of([part for pair in job for part in pair]))
        text = self._memo.recall(key)
        if text is not None:
            return JobResult("done", json.loads(text))
        turn, self._paid = JobLease(self._memo, key), None
        # One worker per input: two releases for one input would be charged twice.
        return turn.held(lambda: self._labelled(job, key, turn), self._charged)

    def _labelled(self, job: InputJob, key: MemoKey, turn: JobLease) -> JobResult:
        """Returns the label in the memo, or releases one, under the lease."""
        text = self._memo.recall(key)
        try:
            entry = self._ask_once(job, key, turn) if text is None else PoolEntry.from_dict(json.loads(text))
        except PrivacyBudgetExceededError as error:
            return JobResult.of_fault(error) if self.queries_left else JobResult("lost")
        return JobResult("done", entry.to_dict(), tickets=self._charged())

    def _charged(self) -> int:
        return 0 if self._paid is None else self._paid.tickets

    def _events(self, config: RunnableConfig | None) -> RunEvents:
        self._paid = super()._events(config)
        return self._paid

    def _ask_once(self, job: InputJob, key: MemoKey, turn: JobLease) -> PoolEntry:
        """Releases a label, unless an earlier call did, and stores it in the memo."""
        item = self._item_of(dict(job))
        self._at = key, turn
        try:
            if item.done:  # released before, when the memo could not be written
                self._record(item.entry.to_dict())
            return self.label(dict(job))
        finally:
            self._at = None

    def _check_turn(self) -> None:
        if self._at is not None:
            self._at[1].check(None)

    def _record(self, entry: Mapping[str, Any], *tickets: Reservation, arrays: bytes | None = None) -> None:  # noqa: ARG002  the memo is the worker's journal
        if self._at is None:
            return
        key, text = self._at[0], json.dumps(entry)
        self._memo.remember(key, text)
        # The memo keeps the first of two releases; the loser must not commit its own.
        if self._memo.recall(key) != text:
            raise TurnLostError("memo: expected no label for this input, found one that another run released.")


_Caller: TypeAlias = tuple[tuple[int, int], int, int | None]


def _caller() -> _Caller:
    """Returns the calling process, thread and asyncio task, which detects a call inside another one."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        task = None
    return this_process(), threading.get_ident(), None if task is None else id(task)


def _checked_noise(noise: object, answers: LabelAnswers) -> Noise | ConfidentGNMax:
    """Returns the noise; refuses answers that labelling does not give."""
    used = ("votes", "calibrate", "content_free", "abstain_below", "scores", "other_label")
    refuse_unused(answers, used, "PromptPATELabeler")
    chosen = noise_of(noise, Noise, ConfidentGNMax)
    kind = chosen.mechanism if isinstance(chosen, Noise) else "ConfidentGNMax"
    if answers.scores and kind not in {None, "gaussian"}:
        raise fail("noise", "'gaussian' with LabelAnswers(scores=True): the others release only labels", kind)
    return chosen


def _teachers(
    rows: Rows | Rehearsal, public_size: int, *, engine: Any, mechanism: Any, is_confident: bool, **terms: Any
) -> tuple[TeacherKind, ChosenRows]:
    """Returns how teachers are drawn, and their shape; `terms` are as of `chosen_rows`."""
    if is_confident and isinstance(rows, Rehearsal):
        advice = "Its threshold and noise are numbers of votes: give rows=Rows(...), and the numbers for these rows."
        raise fail("rows", "Rows(...) with ConfidentGNMax", Rehearsal, advice)
    if isinstance(rows, Rehearsal):
        return "fresh", chosen_rows(rows, public_size, engine=engine, mechanism=mechanism, **terms)
    kind = kind_of_teachers(rows)
    if kind == "fixed" and rows.slots is None and rows.shots == 1:
        usual = default_design(kind, public_size)
        noise = mechanism or mechanism_for(usual)
        return kind, ChosenRows(usual, noise, terms["calibrate"], RowGuess())
    shape = rows.replace(redraw_every=None)
    if is_confident:  # its threshold is a number of votes, whatever an engine declares
        asked = RowDesign.of(shape, smallest_size=public_size)
        usual = asked or RowDesign.choose(smallest_size=public_size)
        return kind, ChosenRows(usual, mechanism or mechanism_for(usual), terms["calibrate"], RowGuess())
    return kind, chosen_rows(shape, public_size, engine=engine, mechanism=mechanism, **terms)


def _mechanism_of(noise: Noise | ConfidentGNMax, answers: LabelAnswers) -> NoiseName | None:
    """Returns the mechanism's name; None: the usual one of the rows, or Confident-GNMax."""
    if isinstance(noise, ConfidentGNMax):
        return None
    return noise.mechanism or ("gaussian" if answers.scores else None)


def _least_share(answers: LabelAnswers, noise: Noise | ConfidentGNMax, num_labels: int) -> float | None:
    """Returns the share of the expected votes that a label needs; None: any number is enough."""
    below, is_confident = answers.abstain_below, isinstance(noise, ConfidentGNMax)
    if isinstance(below, float) and is_confident:
        raise fail("abstain_below", "None with ConfidentGNMax, which has a threshold of its own", below)
    if below is None or below == "auto":
        return None if is_confident else 0.5 / num_labels
    return None if below == "never" else below


def _planned(
    private: PrivateExamples,
    task: VotingTask,
    chosen: ChosenRows,
    *,
    teachers: TeacherKind,
    noise: Noise | ConfidentGNMax,
    abstain_below: float | None,
    width: int,
    **terms: Any,
) -> LabellingPlan:
    """Plans the labels; `terms` are epsilon, delta, adjacency and max_queries."""
    size, shape = private.public_size_of(None), chosen.design
    mechanism: Mechanism | str = chosen.mechanism
    given: dict[str, Any] = {"noise_multiplier": getattr(noise, "multiplier", None), "max_answers": None}
    if isinstance(noise, ConfidentGNMax):
        mechanism = ConfidentGNMaxMechanism.of_votes(
            threshold=noise.threshold,
            sigma_threshold=noise.test_stddev,
            sigma_votes=noise.vote_stddev,
            row_shape=shape.rows,
            adjacency=terms["adjacency"],
        )
        given = {"noise_multiplier": None, "max_answers": noise.max_answers}
    rejects = rejection(abstain_below, shape, public_size=size, mechanism=mechanism)
    return plan_labelling(
        size,
        teachers=teachers,
        aggregation=ProbabilitySum() if task.votes == "soft" else VoteSum(),
        mechanism=mechanism,
        design=shape,
        width=width + len(rejects["constants"]),
        partition=private.dataset_id,
        **given,
        **rejects,
        **terms,
    )


def _check_room(engine: Any, task: VotingTask, queries: Iterable[Query | None], *, max_queries: int) -> None:
    """Refuses inputs that the engine would cut, before anything is charged: a run would stop at each of them.

    Those that are answered are None.
    """
    check = getattr(engine, "check_public", None)
    if check is None:
        return
    for number, query in enumerate(queries, start=1):
        if query is None:
            continue
        try:
            for prompts in task.wording.renderer([query]).public():
                check(prompts[0])
        except ModelCallError as error:
            said = f"public_inputs: number {number} of the distinct ones: {str(error).rstrip('. ')}"
            advice = f"Or leave it out, and give max_queries={max_queries} to keep a share that was begun with it."
            raise ModelCallError(f"{said}. {advice}") from error


def _terms_of(public: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what every run of the share must show: the whole plan of its pool, with what others may leave out."""
    return {"other_label": None, "rehearsal": None, "wordings": None, **public}


def _query_count(max_queries: int | None, entries: Sequence[PoolEntry]) -> int:
    """Returns how many inputs the share pays for: as given, or one for each input."""
    if max_queries is not None:
        return check_int("max_queries", max_queries, low=1)
    if not entries:
        raise fail("public_inputs", "at least one input, or max_queries= for later inputs", [])
    return len(entries)
