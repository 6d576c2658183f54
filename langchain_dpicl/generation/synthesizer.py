"""DemonstrationSynthesizer: generates demonstrations token by token, here or on workers (Tang et al. 2023)."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Self, TypeAlias, TypeVar

from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl._opaque import Opaque
from langchain_dpicl.backends.base import GroupBackend, Token
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.backends.sync_async import (
    LEAST_BESIDE,
    Blocking,
    EffectGenerator,
    awaitable,
    calls_at_once,
    check_silent,
    run_sync,
)
from langchain_dpicl.budget.handler import BudgetLike, RunEvents, resolve_budget
from langchain_dpicl.distributed import (
    Executor,
    ExecutorLike,
    JobLease,
    JobResult,
    RemoteExecution,
    TurnLostError,
    Workplace,
)
from langchain_dpicl.exceptions import ConfigurationError, MemoError, PrivacyBudgetError, PrivacyBudgetExceededError
from langchain_dpicl.generation.decoding_loop import (
    BlockTickets,
    DecodingSpec,
    Opener,
    PartialText,
    WordTree,
    make_script,
    write_draft,
)
from langchain_dpicl.generation.grammars import Grammar
from langchain_dpicl.generation.plan import (
    GenerationPlan,
    TokenRule,
    deal_name,
    plan_generation,
    public_margin,
    template_name,
    warn_of_noise,
)
from langchain_dpicl.options import (
    LLM,
    Decoding,
    GenerationTask,
    LocalExecutor,
    LogitNoise,
    LogitNoiseName,
    Noise,
    NoiseName,
    Rows,
    Where,
    noise_of,
    option_of,
)
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.planning.share_plan import words_before_texts
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.extensions.private_streams import RollingRange
from langchain_dpicl.privacy.extensions.word_release import FIRST_WORDS_TEMPLATE, Weight
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.count_release import release_words
from langchain_dpicl.release.declare_share import (
    check_run,
    declare_share,
    range_of,
    runs_per_window,
    share_of_delta,
    stream_runs,
)
from langchain_dpicl.release.samples import DealtSample, open_deal
from langchain_dpicl.release.token_block import ReleaseBlock, open_block
from langchain_dpicl.released.counts import WordGroup
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from langchain_dpicl.reports.verify import first_word_problems, problems_in, public_words
from langchain_dpicl.runs.answer_memo import scope_of_plan
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.release_run import ReleaseRun, RunCall, RunItem, RunJournal, check_paid, report_of
from langchain_dpicl.stores import MemoKey, ReleaseMemo
from langchain_dpicl.stores.memos import query_of, scope_of, tenant_of

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")
_WAVES = 4
"""How many times over the texts written at the same time use all calls that may be in flight."""

DraftJob: TypeAlias = tuple[str | None, int]
"""Label and number of a demonstration."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """The job description for workers that generate demonstrations; public.

    A worker's `public` values and `engine` must be those of the driver; the script has no engine.
    """

    ledger_id: str
    component: str
    epsilon: float | None
    plan: GenerationPlan
    script: DecodingSpec
    grammar: Grammar | None
    public: Mapping[str, Any]
    engine: tuple[Any, ...]

    @classmethod
    def of(
        cls, script: DecodingSpec, plan: GenerationPlan, *, ledger_id: str, component: str, epsilon: float | None
    ) -> GenerationJob:
        """Builds the job description; the script loses its engine."""
        if plan.design.sampling == "disjoint":
            advice = "All demonstrations of a label share one secret partition, which stays in one process."
            raise fail("sampling", "'poisson' or 'fixed' with an executor", "disjoint", advice)
        # Raises for tokens that cannot be stored in the memo, before anything is spent.
        _token_out(script.backend.eos)
        bare = dataclasses.replace(script, backend=None, grammar=None)  # type: ignore[arg-type]
        grammar = None if script.grammar is None else script.grammar.grammar
        public = {**plan.to_dict(), **script.to_dict()}
        return cls(ledger_id, component, epsilon, plan, bare, grammar, public, _facts(script))

    @property
    def key(self) -> str:
        """Public name, with a digest of all fields, so that two jobs of one component differ."""
        return f"{self.ledger_id}/{self.component}/{query_of([repr(self)])}"

    def begin(self, place: Workplace) -> Callable[[DraftJob], JobResult]:
        """Declares the same share with the worker's own examples, and returns the function that runs one job."""
        num_jobs = len(self.plan.branches) * self.plan.shots_per_label
        private, budget, memo = place.paid(ledger_id=self.ledger_id, num_jobs=num_jobs)
        backend = as_backend(place.llm)
        grammar = None if self.grammar is None else self.grammar.bind(backend)
        script = dataclasses.replace(self.script, backend=backend, grammar=grammar)
        public = {**self.plan.to_dict(), **script.to_dict()}
        # The plan was calibrated for the driver's model: a worker with another one would release under a wrong price.
        changed = sorted(key for key in {**self.public, **public} if self.public.get(key) != public.get(key))
        if changed or _facts(script) != self.engine:
            raise fail("workplace", "the model that the plan was made with", f"differences in {changed or ['engine']}")
        share = declare_share(
            private,
            budget,
            self.plan,
            component=self.component,
            epsilon=self.epsilon,
            public=self.public,
            engines=[script],
        )
        scope = scope_of(scope_of_plan(budget, share, dataset_id=private.dataset_id, public=public))
        return _DemonstrationWriter(_Blocks(private, share, script, self.plan), memo, scope)


@dataclass(frozen=True, slots=True, repr=False)
class _Blocks:
    """Opens the blocks of drafts, each for one ticket."""

    private: PrivateExamples
    share: Share
    script: DecodingSpec
    plan: GenerationPlan

    def allot(self, draft: PartialText) -> bool:
        """Sets how many tickets each segment may still use; False: a segment that has not begun has none."""
        blocks = dict(self.plan.branches)[draft.label].blocks
        draft.tickets = {}
        for number, segment in enumerate(self.script.segments):
            tickets = []
            for length, count in blocks(segment.max_tokens):
                remaining = self.share.remaining(template_name(segment.name, length), label=draft.label)
                tickets.append(BlockTickets(length, max(0, min(count - draft.spent[number, length], remaining))))
            draft.tickets[number] = tickets
            begun = number < draft.segment or (number == draft.segment and bool(draft.tokens))
            if not begun and not any(one.owed > 0 for one in tickets):
                return False
        return True

    @contextmanager
    def reserve_one(
        self, draft: PartialText, length: int, name: str, known: dict[str, str], *, paid: Any
    ) -> Iterator[tuple[ReleaseBlock, Reservation]]:
        """Reserves one ticket for one block: of those that burnt, a kill costs it alone. `paid.tickets` counts it."""
        template = template_name(self.script.segments[draft.segment].name, length)
        ticket = self.share.reserve(template, label=draft.label)
        paid.tickets += 1
        try:
            with self.open(draft, length, ticket, name, known) as block:
                draft.spent[draft.segment, length] += 1
                yield block, ticket
        finally:
            paid.tickets -= ticket.give_back()

    def open(
        self, draft: PartialText, length: int, ticket: Reservation | None, name: str, known: dict[str, str]
    ) -> AbstractContextManager[ReleaseBlock]:
        """Opens a block for a reserved ticket."""
        if ticket is None:
            raise fail("ticket", "a reservation", ticket)
        branch = dict(self.plan.branches)[draft.label]
        return open_block(self.private, ticket, plan=branch, length=length, **self.shown(draft, name, known))

    def shown(self, draft: PartialText, name: str, known: dict[str, str]) -> dict[str, Any]:
        """Returns what a block is asked, and how its indices are chosen; public."""
        return {
            "backend": self.script.backend,
            "render": self.script.wording.renderer(name, known),
            "choose": self.script.decoder.choose,
            "prefix": tuple(draft.tokens),
        }


@dataclass(frozen=True, slots=True, repr=False)
class _DemonstrationWriter:
    """Generates one demonstration at a time, and stores every released token before its ticket is committed."""

    blocks: _Blocks
    memo: ReleaseMemo
    scope: str

    def __call__(self, job: DraftJob) -> JobResult:
        """Returns a demonstration from the memo, or completes it and stores it there."""
        label, number = job
        key = MemoKey(self.scope, tenant_of(""), query_of([label or "", str(label is None), str(number)]))
        turn = JobLease(self.memo, key)
        stored = _StoredDraft(PartialText(label, number), self.memo, key, turn)
        stored.read()
        if stored.draft.done:
            return JobResult("done", stored.draft.values)
        return turn.held(lambda: self._completed(stored), lambda: stored.tickets)

    def _completed(self, stored: _StoredDraft) -> JobResult:
        """Returns the demonstration in the memo, or completes it, under the lease."""
        stored.read()
        if not stored.draft.done and not self._written(stored):
            return JobResult("lost", tickets=stored.tickets)
        return JobResult("done", stored.draft.values, tickets=stored.tickets)

    def _written(self, stored: _StoredDraft) -> bool:
        """Completes the draft; False: no tickets remain for the missing tokens."""
        seen: list[int] = []
        while not stored.draft.done:
            if not self.blocks.allot(stored.draft):
                return False
            try:
                run_sync(write_draft(self.blocks.script, stored.draft, self._opener(stored), lambda: None))
            except PrivacyBudgetExceededError:
                owed = [block.owed for one in stored.draft.tickets.values() for block in one]
                if owed == seen:
                    raise
                seen = owed  # other workers took tickets meanwhile: retry with the remaining ones
            except TurnLostError:
                raise  # another worker owns the draft in the memo
            except BaseException:
                with suppress(MemoError):  # raise the first error; store the released tokens if possible
                    stored.write()
                raise
        stored.write()
        return True

    def _opener(self, stored: _StoredDraft) -> Opener:
        @contextmanager
        def opener(draft: PartialText, length: int, name: str, known: dict[str, str]) -> Iterator[Any]:
            stored.turn.check(stored.stored_text)
            with self.blocks.reserve_one(draft, length, name, known, paid=stored) as (block, _):
                yield block
                stored.write()  # before the commit

        return opener


@dataclass(slots=True, repr=False)
class _StoredDraft:
    """A draft and its state in the memo; released and public values only."""

    draft: PartialText
    memo: ReleaseMemo
    key: MemoKey
    turn: JobLease
    tickets: int = 0
    stored_text: str | None = None

    def read(self) -> None:
        self.stored_text = self.memo.recall(self.key)
        if self.stored_text is None:
            return
        state = json.loads(self.stored_text)
        draft = self.draft
        draft.values, draft.segment, draft.done = dict(state["values"]), state["segment"], state["done"]
        draft.tokens = [_token_in(one) for one in state["tokens"]]
        draft.spent = _spent_in(state["spent"])

    def write(self) -> None:
        """Stores the draft; raises TurnLostError if another worker changed it."""
        text = json.dumps(_state_of(self.draft))
        if text == self.stored_text:
            return
        self.memo.remember(self.key, text, instead_of=self.stored_text)
        # `remember` does not overwrite a value other than `instead_of`; the read shows who won.
        if self.memo.recall(self.key) != text:
            raise TurnLostError("memo: expected the draft that this worker stored, found one that another run changed.")
        self.stored_text = text


def _facts(script: DecodingSpec) -> tuple[Any, ...]:
    """Returns the properties of an engine that a plan depends on."""
    backend = script.backend
    return type(backend).__name__, backend.max_top_k, _token_out(backend.eos), script.is_fused, script.candidates


def _token_out(token: Token) -> Any:
    """Returns a token as a JSON value."""
    if isinstance(token, bytes):
        return ["bytes", token.hex()]
    if isinstance(token, str | int) and not isinstance(token, bool):
        return ["text" if isinstance(token, str) else "number", token]
    raise fail("llm", "an engine whose tokens are bytes, text or numbers", type(token).__name__)


def _token_in(pair: Any) -> Token:
    """Returns the token that `_token_out` wrote; raises ValueError or TypeError for anything else."""
    kind, value = pair
    token: Token = bytes.fromhex(value) if kind == "bytes" else value
    if _token_out(token) != [kind, value]:
        raise ValueError(kind)
    return token


def _state_of(draft: PartialText) -> dict[str, Any]:
    """Returns what was released of a draft as JSON values."""
    return {
        "values": dict(draft.values),
        "segment": draft.segment,
        "tokens": [_token_out(token) for token in draft.tokens],
        "spent": [[segment, length, count] for (segment, length), count in draft.spent.items()],
        "done": draft.done,
    }


def _spent_in(triples: Any) -> Counter[tuple[int, int]]:
    """Returns the spent tickets by segment and length."""
    return Counter({(segment, length): check_int("spent", count, low=1) for segment, length, count in triples})


class DisjointBatches(Opaque):
    """The deals of a generation on disjoint batches: demonstration b of a label reads batch b of the label's deal.

    Formal guarantees:
      - A label's units are dealt once, when its first demonstration begins, after its one ticket burnt; no batch
        releases more than the ticket paid for, over all attempts and resumed runs together.
      - The ticket is committed when the last demonstration of the label is written; it stays spent whatever happens.
      - No field of a demonstration releases more than its own cap, also where another field left some over.
    """

    def __init__(self, private: PrivateExamples, share: Share, plan: GenerationPlan) -> None:
        self._private = private
        self._share = share
        self._plan = plan
        self._reserved: dict[str | None, Reservation] = {}
        self._dealt: dict[str | None, DealtSample] = {}
        self._fields_left: dict[tuple[str | None, int, int], int] = {}

    def reserve(self, label: str | None) -> int:
        """Reserves a label's ticket unless it is; returns how many tickets that took."""
        if label in self._reserved:
            return 0
        self._reserved[label] = self._share.reserve(deal_name(self._plan.shots_per_label), label=label, count=1)
        return 1

    def is_gone(self, label: str | None) -> bool:
        """Whether a label's one ticket was taken by a process that ended, and the deal with it."""
        return label not in self._reserved and not self._share.remaining(
            deal_name(self._plan.shots_per_label), label=label
        )

    def left(self, label: str | None, number: int, segment: int) -> int:
        """Returns how many releases of one field of a demonstration are still paid for; public.

        None are where a stop struck between burning the ticket and dealing: a deal that is paid for once is not dealt
        twice.
        """
        cap = self._fields_left.get((label, number, segment), self._plan.segments[segment].max_tokens)
        if label in self._dealt:
            return min(cap, self._dealt[label].num_left(number))
        reservation = self._reserved.get(label)
        return cap if reservation is None or reservation.unburnt else 0

    @contextmanager
    def open(self, label: str | None, number: int, segment: int, **options: Any) -> Iterator[ReleaseBlock]:
        """Opens a block for what is left of one field of a label's demonstration; see `DealtSample.batch`."""
        if label not in self._reserved:
            raise PrivacyBudgetError("deal: expected a reserved ticket, found none. Call run() of the synthesizer.")
        if label not in self._dealt:
            length = sum(part.max_tokens for part in self._plan.segments)
            self._dealt[label] = open_deal(
                self._private, self._reserved[label], plan=dict(self._plan.branches)[label], length=length
            )
        left = self.left(label, number, segment)
        if left <= 0:
            raise PrivacyBudgetError("deal: expected a release still paid for, found none left. Declare a component.")
        with self._dealt[label].batch(number, length=left, **options) as block:
            try:
                yield block
            finally:
                self._fields_left[label, number, segment] = block.left

    def finish(self, label: str | None) -> None:
        """Commits a label's ticket once all its demonstrations are written, and forgets the deal."""
        if label in self._dealt:
            self._dealt[label].close()
            if self._reserved[label].uncommitted:  # Ctrl-C may come between the commit and the `del`
                self._reserved[label].commit()
            del self._dealt[label]


@dataclass(slots=True)
class FirstWords(RunItem):
    """The words of one label, or of all units, that are released before its texts.

    Attributes:
      label: the label; None: all units.
      words: what was released; none where the ticket was lost; None: not released yet.
    """

    label: str | None
    words: tuple[Weight, ...] | None = None


class DraftRun(ReleaseRun[Item, Result]):
    """A run that writes texts token by token, behind words that it may release; a subclass says how they are shown.

    With a journal, tickets are reserved block by block, and a text whose tickets were lost with a killed process is
    left out. Without script and plan of texts it has no text: a subclass has other items.
    """

    _script: DecodingSpec
    _blocks: _Blocks

    _unit = "token"
    _title = "private generation"

    def __init__(
        self,
        private: PrivateExamples,
        script: DecodingSpec | None,
        *,
        generation: GenerationPlan | None,
        share: Share,
        first: Iterable[Any] = (),
        **run: Any,
    ) -> None:
        super().__init__(private, first, share=share, **run)
        self._deals = None
        if script is not None and generation is not None:
            self._script, self._blocks = script, _Blocks(private, share, script, generation)
            if generation.design.sampling == "disjoint":
                self._deals = DisjointBatches(private, share, generation)
        self._drafts: dict[tuple[str | None, int], PartialText] = {}
        self._kept: dict[tuple[str | None, int], dict[str, Any]] = {}
        self._tried: set[tuple[str, str | None]] = set()  # tickets of words that this run asked for
        self._has_told = False

    def _groups(self, at_once: int | None) -> Iterator[list[Any]]:
        """Yields groups of texts that are written at the same time."""
        items = self._open_items()
        for item in items:
            more = self._texts_at_once(at_once) - 1 if isinstance(item, PartialText) else 0
            yield [item, *islice(items, more)]

    def _texts_at_once(self, limit: int | None) -> int:
        """Returns how many texts ask for so many rows that the calls in flight are all in use, nearly all the time.

        On a local engine, as many as share a batch: their number of rows is public where they have places.
        """
        if self._journal is not None:  # a killed process may lose the ticket of one block, and so of one text
            return 1
        backend, plan = self._script.backend, self._blocks.plan
        if self._script.is_fused and isinstance(backend, GroupBackend) and plan.release.row_shape == "slots":
            return max(1, min(backend.rows_at_once // (plan.design.num_slots + 1), limit or sys.maxsize))
        most = min(calls_at_once(backend), limit or sys.maxsize)
        if most < LEAST_BESIDE:
            return 1
        cost = self._blocks.plan.cost()
        calls = (cost.private_calls + cost.public_calls) / max(1, cost.public_calls)
        return max(1, math.ceil(_WAVES * most / calls))

    def _begin(self, labels: Container[str | None]) -> None:
        """Adds the planned texts of these labels to the items."""
        plan = self._blocks.plan
        drafts = [
            PartialText(label, number)
            for number in range(plan.shots_per_label)
            for label, _ in plan.branches
            if label in labels
        ]
        self._drafts = {(draft.label, draft.number): draft for draft in drafts}
        self._items[:] = [item for item in self._items if not isinstance(item, PartialText)] + drafts

    def _written(self) -> list[PartialText]:
        """Returns the complete texts; not those whose tickets were lost."""
        return [draft for draft in self._drafts.values() if self._is_written(draft)]

    def _is_written(self, draft: PartialText) -> bool:
        return draft.done and self._script.wording.text_key in draft.values

    def _make(self, item: Any, call: RunCall) -> EffectGenerator[None]:
        check_silent(self._script.backend)
        opener = self._opener_of(item, call.events)
        if opener is None:
            item.done = True
        else:
            try:
                yield from write_draft(self._script, item, opener, call.tick)
            except BaseException:
                with suppress(OSError, ConfigurationError):  # raise the first error; the journal keeps the line
                    self._keep(item)
                raise
        self._keep(item)
        self._finish(item.label)

    def _finish(self, label: str | None) -> None:
        """Ends the deal of a label whose texts are complete: its partition is secret and no longer needed."""
        if self._deals is not None and all(one.done for one in self._drafts.values() if one.label == label):
            self._deals.finish(label)

    def _settle(self) -> None:
        super()._settle()
        for label in {draft.label for draft in self._drafts.values()}:
            if not any(one.busy for one in self._drafts.values() if one.label == label):
                self._finish(label)  # whose last line could not be written

    def _opener_of(self, draft: PartialText, events: RunEvents) -> Opener | None:
        """Counts the tickets that a text still needs, and returns what reserves them and opens its blocks.

        With a journal one block is reserved at a time; None: the tickets were lost with a killed process.

        Raises:
          PrivacyBudgetExceededError: no text has a ticket left, and the journal holds nothing that they paid for.
        """
        blocks, deals = self._blocks, self._deals

        def is_gone(one: PartialText) -> bool:
            return deals.is_gone(one.label) if deals is not None else not blocks.allot(one)

        if self._journal is not None:
            if is_gone(draft):
                # Words that were lost leave a line too.
                has_paid = any(entry.get("words", True) for entry in self._journal.entries)
                has_paid = has_paid or any(one.spent for one in self._drafts.values())
                if not has_paid and all(map(is_gone, self._drafts.values())):
                    raise self._used("the tickets of its texts")
                return None
            if deals is None:
                return partial(self._open_one, events)
        if not draft.tickets:
            branch = dict(blocks.plan.branches)[draft.label]
            draft.tickets = {
                number: [BlockTickets(length, count) for length, count in branch.blocks(segment.max_tokens)]
                for number, segment in enumerate(self._script.segments)
            }
        if deals is not None:
            for number, tickets in draft.tickets.items():
                # One ticket pays for all demonstrations of a label; `owed` only says whether blocks remain.
                tickets[0].owed = int(deals.left(draft.label, draft.number, number) > 0)
            if deals.is_gone(draft.label):
                events.tickets += deals.reserve(draft.label)  # raises the refusal, before anything is asked
            return partial(self._open_dealt, deals, events)
        self._reserve(draft, events, is_look=True)
        return partial(self._open_planned, events)

    # All three reserve behind the first public answer: an outage before it must not cost the tickets that cannot be
    # given back, which are the run of a stream, blocks of several tokens, and a deal.

    def _open_planned(
        self, events: RunEvents, draft: PartialText, length: int, *shown: Any
    ) -> AbstractContextManager[ReleaseBlock]:
        self._reserve(draft, events)
        ticket = next(block.reservation for block in draft.tickets[draft.segment] if block.length == length)
        return self._blocks.open(draft, length, ticket, *shown)

    def _reserve(self, draft: PartialText, events: RunEvents, *, is_look: bool = False) -> None:
        """Reserves what a text still needs; with `is_look` only what is not there, which raises the refusal."""
        for number, tickets in draft.tickets.items():
            for block in tickets:
                template = template_name(self._script.segments[number].name, block.length)
                if not block.owed or block.reservation is not None:
                    continue
                if not is_look or self.share.remaining(template, label=draft.label) < block.owed:
                    block.reservation = self.share.reserve(template, label=draft.label, count=block.owed)
                    events.tickets += block.owed
                    block.owed = 0

    @contextmanager
    def _open_one(
        self, events: RunEvents, draft: PartialText, length: int, name: str, known: dict[str, str]
    ) -> Iterator[ReleaseBlock]:
        with self._blocks.reserve_one(draft, length, name, known, paid=events) as (block, ticket):
            yield block
            self._keep(draft, ticket)

    def _open_dealt(
        self, deals: DisjointBatches, events: RunEvents, draft: PartialText, length: int, *shown: Any
    ) -> AbstractContextManager[ReleaseBlock]:
        events.tickets += deals.reserve(draft.label)
        draft.spent[draft.segment, length] += 1
        return deals.open(draft.label, draft.number, draft.segment, **self._blocks.shown(draft, *shown))

    def _keep(self, draft: PartialText, *tickets: Reservation) -> None:
        """Writes into the journal what was released of a text since its last line."""
        key, state = (draft.label, draft.number), _state_of(draft)
        before = self._kept.get(key, _state_of(PartialText(None)))
        if self._journal is None or state == before:
            return
        at = len(before["tokens"]) if before["segment"] == state["segment"] else 0
        line = {"label": draft.label, "number": draft.number, **state, "tokens": state["tokens"][at:], "at": at}
        try:
            self._record(line, *tickets)
        finally:
            if self._journal.holds(line):  # also where it waits for the next `flush`; Ctrl-C may have come before
                self._kept[key] = state

    def _resume(self) -> None:
        super()._resume()
        if self._journal is not None:
            # A checkpoint from elsewhere must not bring tokens that this share has not paid for.
            for label in {draft.label for draft in self._drafts.values()}:
                check_paid(self._burnt_for(label), used=self._reserved_for(label), what="tickets")

    def _burnt_for(self, label: str | None) -> int:
        """Returns how many tickets the texts of a label name as theirs."""
        drafts = [draft for draft in self._drafts.values() if draft.label == label]
        if self._deals is not None:  # one for all; texts of a grammar's own tokens alone need none, nor drawn labels
            pays = self._script.grammar is None
            drawn = {self._script.wording.label_key} if self._script.open_labels else set()
            return int(any(draft.spent or (pays and (draft.tokens or draft.values.keys() - drawn)) for draft in drafts))
        return sum(draft.spent.total() for draft in drafts)

    def _reserved_for(self, label: str | None) -> int:
        """Returns how many tickets of a label the ledger has charged."""
        tickets = (ticket for ticket in self._blocks.plan.text_tickets() if ticket.label == label)
        return sum(ticket.max_count - self.share.remaining(ticket.template, label=label) for ticket in tickets)

    def _restore(self, entry: Mapping[str, Any]) -> None:
        is_known = False
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            draft = self._drafts[entry["label"], entry["number"]]
            self._fill(draft, entry)
            self._kept[draft.label, draft.number] = _state_of(draft)
            is_known = True
        if not is_known:
            raise ConfigurationError("checkpoint: expected texts of this run, found something else. Take another file.")

    def _fill(self, draft: PartialText, entry: Mapping[str, Any]) -> None:
        """Restores one text, after checking that a run of this plan can have this state."""
        wording = self._script.wording
        segment = check_int("segment", entry["segment"], low=draft.segment, high=len(self._script.segments))
        tokens = draft.tokens if segment == draft.segment else []
        at = check_int("at", entry["at"], low=0, high=len(tokens))
        values = {name: value for name, value in entry["values"].items() if isinstance(value, str)}
        is_whole = segment < len(self._script.segments) or wording.text_key in values
        if len(values) < len(entry["values"]) or not values.keys() <= wording.generated_fields or not is_whole:
            raise ValueError(segment)
        draft.tokens = tokens[:at] + [_token_in(one) for one in entry["tokens"]]
        draft.values, draft.segment, draft.spent = values, segment, _spent_in(entry["spent"])
        draft.done = entry["done"] is True

    def _words_once(
        self, item: Any, template: str, label: str | None, events: RunEvents, **how: Any
    ) -> tuple[Weight, ...]:
        """Returns the words, or pairs, that the one ticket of a label pays for; the ticket is `item.ticket`.

        A ticket that this run, or the one of its checkpoint, lost left nothing, and there is no other; one that another
        run used left words that are not here. `how` is of `release_words`.
        """
        if not self.share.remaining(template, label=label):
            if (template, label) not in self._tried and (self._journal is None or self._journal.is_new):
                raise self._used("the ticket of its words")
            item.ticket = None
            whose = "" if label is None else f" ({label})"
            said = "%s: the %s%s are left out: their ticket was lost, or used by another run."
            logger.warning(said, self.component, template, whose)  # an error would lose what is paid for
            return ()
        self._tried.add((template, label))  # first: the ticket may be charged though its answer is lost
        try:
            item.ticket = ticket = self.share.reserve(template, label=label)
        except PrivacyBudgetExceededError:  # refused, so that another run used it
            self._tried.discard((template, label))
            raise
        events.tickets += 1
        return release_words(self._private, ticket, **how)

    def _used(self, what: str) -> PrivacyBudgetExceededError:
        """Returns the refusal of a share whose tickets paid for what is not here."""
        msg = f"{self.component!r}: expected {what}, found none: used by another run, or lost."
        advice = "Go on with that run (`error.run`), or with its checkpoint; or take another component name."
        return PrivacyBudgetExceededError(f"{msg} {advice}", requested=1, remaining=0)

    def _record_once(self, entry: Mapping[str, Any], ticket: Reservation | None = None) -> None:
        """Writes a release into the journal unless it stands there: an earlier call may have been stopped before."""
        if self._journal is not None and not self._journal.holds(entry):
            self._record(entry, *(() if ticket is None else (ticket,)))

    def _check_used(self, template: str, label: str | None) -> None:
        """Refuses words of a checkpoint whose ticket is left, which proves that this ledger paid for none."""
        if self.share.remaining(template, label=label):
            raise fail("checkpoint", "words of a release that was made", "a ledger on which none was")

    def _give_back(self, item: Any, events: RunEvents) -> None:
        if not isinstance(item, PartialText):
            super()._give_back(item, events)
            return
        for block in (block for tickets in item.tickets.values() for block in tickets):
            if block.reservation is not None and block.reservation.refundable and block.reservation.unburnt:
                back = block.reservation.give_back()
                # An unfinished draft reserves the returned tickets again in its next run; a finished one needs none.
                block.owed, block.reservation = (0 if item.done else back), None
                events.tickets -= back

    @property
    def _tokens_per_draft(self) -> int:
        return sum(segment.max_tokens for segment in self._script.segments)

    @property
    def _num_texts(self) -> int:
        """Planned texts; of the released topics, once they are."""
        plan = self._blocks.plan
        return len(self._drafts) or plan.shots_per_label * len(plan.branches)

    def _steps_left(self) -> int:
        return self._tokens_per_draft * (self._num_texts - sum(draft.done for draft in self._drafts.values()))

    def _so_far(self) -> str:
        return f"{len(self._written())} of {self._num_texts} {self._item_name}s are"

    def _check_end(self, *, has_more: bool = False) -> None:
        """Says once how many texts of a finished run are left out; raises if all are, and nothing else was asked for.

        Raises:
          PrivacyBudgetExceededError: no text is left; `remaining` counts the tickets of texts that the share has.
        """
        texts = len(self._drafts)
        missing = texts - len(self._written()) if self.is_finished else 0
        if missing and missing == texts and not has_more:
            tickets = self._blocks.plan.text_tickets()
            remaining = sum(self.share.remaining(ticket.template, label=ticket.label) for ticket in tickets)
            msg = (
                f"{self.component!r}: requested {missing} {self._item_name}s, found none; remaining tickets: "
                f"{remaining}. Each is empty, or its tickets were lost, or used by another run. What this run released "
                "is in `result`, with its report. If they are empty, change the instruction, the stop strings or the "
                "model; declare another component for more."
            )
            raise PrivacyBudgetExceededError(msg, requested=missing, remaining=remaining)
        if missing and not self._has_told:  # a warning that is made an error would lose what is paid for
            self._has_told = True
            said = "%s: %d of %d %ss are left out: each is empty, or its tickets were lost, or used by another run."
            logger.warning(said, self.component, missing, texts, self._item_name)

    def _show(self, bar: Any) -> None:
        with suppress(OSError, ValueError):
            bar.set_postfix_str(f"{len(self._written())}/{self._num_texts} {self._item_name}s")


@tells_how_to_build()
class DemonstrationSynthesizer(DraftRun[dict[str, str], ReleasedDemonstrations]):
    """Generates differentially private demonstrations once; they can be used without limit.

    Formal guarantees:
      - Everything it returns or shows is a post-processing of indices released under `plan`, whose event is charged
        to the budget as the share of this component before the first private record is read.
      - Stopping (EOS, stop strings, length) looks at released tokens only.
      - Words that open the vocabulary of a label's texts (`Decoding(released_words=True)`) are released before them,
        for a ticket of the same share.

    Build it with `from_private_examples`; `run` and `arun` generate, and continue after an interruption.
    Callbacks of their config, or of the LangChain run around them, receive `dpicl.charged` per demonstration and
    `dpicl.refused`; see `budget.handler`.
    """

    _item_name = "demonstration"
    plan: GenerationPlan

    def __init__(
        self,
        private: PrivateExamples,
        script: DecodingSpec,
        *,
        plan: GenerationPlan,
        share: Share,
        one_run: GenerationPlan | None = None,
        **run: Any,
    ) -> None:
        labels = [label for label, _ in plan.branches]
        self._trees: dict[str | None, WordTree] = {}
        if plan.words is not None:
            script = dataclasses.replace(script, trees=self._trees)  # filled in as the words of labels are released
        generation = plan if one_run is None else one_run
        first = [] if plan.words is None else list(map(FirstWords, labels))
        super().__init__(private, script, plan=plan, generation=generation, share=share, first=first, **run)
        self._first = {item.label: item for item in first}
        self._begin(labels)
        self._resume()

    @classmethod
    @door("DemonstrationSynthesizer", streams=True)
    def from_private_examples(
        cls,
        private: PrivateExamples | RollingRange,
        *,
        llm: LLM,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        instruction: str | None = None,
        task: GenerationTask | None = None,
        shots_per_label: int = 1,
        max_tokens: int = 60,
        rows: Rows | None = None,
        noise: Noise | LogitNoise | NoiseName | LogitNoiseName | None = None,
        decoding: Decoding | None = None,
        component: str | None = None,
        checkpoint: Where | None = None,
        executor: ExecutorLike = None,
    ) -> Self:
        """Plans the noise, declares the share and returns a synthesizer; nothing is spent yet.

        Args:
          private: the examples; bound to the budget's ledger here. Or a range of a stream: of `stream.rolling(...)`
            this is the run of now; the next one is made by calling again, with the same `component`.
          llm: an engine, an object that carries one, or a LangChain model with token log-probabilities. It SEES the
            private prompts.
          budget: a PrivacyBudgetCallbackHandler, a Budget or a RunnableConfig that holds one; None: the context's.
          epsilon: this component's share of the budget (its noise is calibrated to it).
          instruction: public task description, the first paragraph of every prompt.
          task: a `GenerationTask`: the wording of prompts, and open labels.
          shots_per_label: demonstrations per label; their costs compose.
          max_tokens: cap of a demonstration's text, in tokens.
          rows: a `Rows`: how many prompts a token reads, of how many records, and how often they are drawn anew.
          noise: a `Noise` on next-token probabilities, a `LogitNoise`, or the name of a mechanism; None: "gumbel".
          decoding: a `Decoding`: candidates, stops, sampling, grammar, and whether words of each label are released
            before its texts, which may then hold them.
          component: name in the ledger; the same name and plan reopen the same share with its remaining tickets.
          checkpoint: file that stores words and the tokens of every block before their tickets are committed. If it
            exists, the run continues from it, also in another process, with the same durable ledger. Texts are then
            written one by one, on a local model too. A kill costs one block at most, and tickets that the process held
            for later ones; `most_held=1` of the budget switches that off.
          executor: a `RayExecutor`, or "ray": workers generate the demonstrations, each with its own records, model
            and ledger connection; demonstrations that they released under this `component` are reused. None or a
            `LocalExecutor`: this process.

        Raises:
          ConfigurationError: a public argument is invalid; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.

        Source: Tang et al. (2023), Algorithm 1.
        """
        spender = resolve_budget(budget)
        per_window, source = runs_per_window(private, spender), private
        private = range_of(private)
        mechanism = noise_of(noise, Noise, LogitNoise)
        shape, writing = option_of("rows", rows, Rows), option_of("decoding", decoding, Decoding)
        wording = GenerationTask.of(task, instruction)
        if per_window is not None:
            elsewhere_too = None if isinstance(executor, LocalExecutor) else executor
            check_run(component, shape.sampling, checkpoint=checkpoint, executor=elsewhere_too)
        has_words = writing.released_words is True
        if has_words and per_window is not None:
            advice = "Release them once, from records outside the stream, and give the ReleasedWords."
            raise fail("Decoding.released_words", "None or a ReleasedWords on a stream", True, advice)
        script = make_script(
            private, as_backend(llm), task=wording, max_tokens=max_tokens, noise=mechanism, decoding=writing
        )
        sizes = public_sizes(private)
        smallest = min(sizes.values())
        plan = plan_generation(
            sizes,
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=mechanism.delta),
            adjacency=spender.adjacency,
            noise_multiplier=mechanism.multiplier,
            mechanism=TokenRule.of(mechanism, writing.temperature),
            design=RowDesign.of(shape, smallest_size=smallest) or RowDesign.choose(smallest_size=smallest),
            redraw_every=shape.redraw_every,
            shots_per_label=check_int("shots_per_label", shots_per_label, low=1) * (per_window or 1),
            segments=script.segments,
            candidates=script.candidates,
            partition=private.dataset_id,
            words=words_before_texts(private.text_key) if has_words else None,
        )
        warn_of_noise(plan)
        # The margin follows from the calibrated clip, which is known only now.
        script = dataclasses.replace(script, margin=public_margin(plan.release))
        public = {**plan.to_dict(), **script.to_dict()}
        one_run = dataclasses.replace(plan, shots_per_label=shots_per_label)
        how: dict[str, Any] = {"per_window": per_window, "parts": one_run.tickets()}
        runs = stream_runs(source, private.blocks, spender, component=str(component), **how)
        name, journal = RunJournal.of(checkpoint, component, "few-shot", budget=spender, private=private, plan=public)
        job = partial(_job, script=script, plan=plan, ledger_id=spender.ledger_id, component=name, epsilon=epsilon)
        # Checked before the share is declared: a ledger that workers cannot reach must leave nothing behind.
        elsewhere = RemoteExecution.of(executor, spender, job)
        paid: dict[str, Any] = {"component": name, "epsilon": epsilon, "runs": runs}
        share = declare_share(private, spender, plan, public=public, engines=[script], **paid)
        where: dict[str, Any] = {"budget": spender, "journal": journal, "executor": elsewhere}
        return cls(private, script, plan=plan, one_run=one_run, share=share, **where)

    afrom_private_examples = awaitable(from_private_examples)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a demonstration, that of the text first."""
        wording = self._script.wording
        return (wording.text_key,) if wording.label_key is None else (wording.text_key, wording.label_key)

    @property
    def demonstrations(self) -> list[dict[str, str]]:
        """The demonstrations released so far (public)."""
        return [self._example(draft) for draft in self._written()]

    @property
    def words(self) -> tuple[WordGroup, ...]:
        """The words of each label that were released before its texts; read them before you send texts on (public)."""
        return tuple(WordGroup(item.label, item.words) for item in self._first.values() if item.words is not None)

    @property
    def report(self) -> dict[str, Any]:
        """The privacy report (public), and released words; reads the ledger."""
        if self.plan.words is None:
            return super().report
        words = [group.to_dict() for group in self.words]
        return report_of(self._budget, self.share, self.plan, released_words=words)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _make(self, item: Any, call: RunCall) -> EffectGenerator[None]:
        if isinstance(item, PartialText):
            yield from super()._make(item, call)
        else:
            check_silent(self._script.backend)  # words are paid for the texts
            yield Blocking(lambda: self._find_words(item, call.events))

    def _find_words(self, item: FirstWords, events: RunEvents) -> None:
        """Releases the words of a label, once, which are then candidates of its texts."""
        if item.words is None:  # otherwise an earlier call released them and could not store them
            how: dict[str, Any] = {"plan": self.plan.words, "known": public_words()}
            item.words = self._words_once(item, FIRST_WORDS_TEMPLATE, item.label, events, **how)
        self._record_once({"words_of": item.label, "words": item.words}, item.ticket)
        commit_unless_done(item.ticket)
        self._open_words(item)

    def _open_words(self, item: FirstWords) -> None:
        self._trees[item.label] = WordTree.of((word for word, _ in item.words or ()), self._script.backend)
        item.done = True

    def _restore(self, entry: Mapping[str, Any]) -> None:
        if "words_of" in entry:
            self._restore_words(entry)
            return
        super()._restore(entry)
        if self._first and not self._first[entry["label"]].done:
            raise fail("checkpoint", "the words of a label before its texts", "texts alone")

    def _restore_words(self, entry: Mapping[str, Any]) -> None:
        """Restores the words of a label; refuses those that its paid release cannot have released."""
        label, words = entry["words_of"], weights_in(entry.get("words"))
        item = self._first.get(label) if isinstance(label, str | None) else None
        if item is None or item.done or self.plan.words is None:
            raise fail("checkpoint", "words of a label of this run, each once", "others")
        if problems_in(first_word_problems([(label, words, ())], self.plan), "words"):
            raise fail("checkpoint", "words that the plan can release", "others")
        self._check_used(FIRST_WORDS_TEMPLATE, label)
        item.words = words
        self._open_words(item)

    def _job(self, item: PartialText) -> DraftJob:
        return item.label, item.number

    def _take(self, item: PartialText, result: dict[str, str], call: RunCall) -> None:
        is_written = self._script.wording.text_key in result
        item.values, item.tokens, item.done = dict(result), [], True
        item.segment = len(self._script.segments) if is_written else 0
        self._keep(item)
        for _ in range(self._tokens_per_draft):
            call.tick()

    def _examples(self, item: Any) -> list[dict[str, str]]:
        return [self._example(item)] if isinstance(item, PartialText) and self._is_written(item) else []

    def _example(self, draft: PartialText) -> dict[str, str]:
        known = self._script.known(draft)
        return {name: known[name] for name in sorted(self._script.wording.generated_fields)}

    def _value(self) -> ReleasedDemonstrations:
        report = self.report
        shown = {**report["plan"], **self._script.to_dict()}
        return ReleasedDemonstrations(tuple(self.demonstrations), report, shown)


def _job(workers: Executor, *, script: DecodingSpec, plan: GenerationPlan, **paid: Any) -> GenerationJob:
    if plan.words is not None:
        advice = "All texts of a label have the words that one process released. Or give a ReleasedWords."
        raise fail("executor", "None or a LocalExecutor with released_words=True", type(workers).__name__, advice)
    return GenerationJob.of(script, plan, **paid)


def commit_unless_done(ticket: Reservation | None) -> None:
    """Commits a burnt ticket whose result is stored; nothing where it is committed, or none burnt."""
    if ticket is not None and ticket.uncommitted:
        ticket.commit()


def weights_in(found: Any) -> tuple[Weight, ...]:
    """Returns the pairs of a text and a number that a checkpoint holds."""
    pairs: list[Any] = found if isinstance(found, list) else [None]
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise fail("checkpoint", "texts with a number each", "others")
    if not all(type(pair[1]) in {int, float} for pair in pairs):
        raise fail("checkpoint", "numbers beside topics and words", "others")
    return tuple((pair[0], pair[1]) for pair in pairs)


def public_sizes(private: PrivateExamples) -> dict[str | None, int]:
    """Returns the declared size of every branch."""
    return {label: private.public_size_of(label) for label in (private.labels or (None,))}
