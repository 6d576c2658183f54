"""DemonstrationSynthesizer: generates demonstrations token by token, here or on workers (Tang et al. 2023)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from langchain_dpicl._construction import awaitable, tells_how_to_build
from langchain_dpicl._opaque import Opaque
from langchain_dpicl.backends.base import Token
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.backends.sync_async import EffectGenerator, run_sync
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
from langchain_dpicl.distributed.executor import (
    JobLease,
    JobResult,
    RemoteExecution,
    TurnLostError,
    Workplace,
    check_reached,
)
from langchain_dpicl.distributed.ray import ExecutorLike, as_executor
from langchain_dpicl.exceptions import MemoError, PrivacyBudgetError, PrivacyBudgetExceededError
from langchain_dpicl.generation.decoding_loop import (
    BlockTickets,
    DecodingSpec,
    Opener,
    PartialText,
    make_script,
    write_draft,
)
from langchain_dpicl.generation.grammars import Grammar
from langchain_dpicl.generation.plan import GenerationPlan, deal_name, plan_generation, template_name
from langchain_dpicl.generation.token_mechanisms import TokenRule, public_margin
from langchain_dpicl.options.base import LLM, option_of
from langchain_dpicl.options.rows import LogitNoise, LogitNoiseName, Noise, NoiseName, Rows, noise_of
from langchain_dpicl.options.tasks import Decoding, GenerationTask
from langchain_dpicl.planning.expected_utility import RowDesign
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.ledger.shares import Reservation, Share
from langchain_dpicl.release.curator import open_block
from langchain_dpicl.release.dealt_sample import DealtSample, open_deal
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.release.token_block import ReleaseBlock
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.generation_run import GenerationRun
from langchain_dpicl.runs.streamed_run import new_bar, tick
from langchain_dpicl.stores import MemoKey, ReleaseMemo
from langchain_dpicl.stores.memos import query_of, scope_of, tenant_of

DraftJob: TypeAlias = tuple[str | None, int]
"""Label and number of a demonstration."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """The job description for workers that generate demonstrations; public.

    Attributes:
      ledger_id: the driver's ledger.
      component: name of the share that pays.
      epsilon: the requested share.
      plan: what is released, and what it costs.
      script: the public parameters, without an engine.
      grammar: constrains the texts.
      public: plan and script as reports show them; a worker's must be equal.
      engine: the properties of the engine that the plan depends on.
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
        where = f"{self.ledger_id}/{self.component}"
        scope = scope_of({"work": "demonstration", "component": where, "dataset_id": private.dataset_id, **public})
        return _DemonstrationWriter(private, share, script, self.plan, memo, scope)


@dataclass(frozen=True, slots=True, repr=False)
class _DemonstrationWriter:
    """Generates one demonstration at a time, and stores every released token before its ticket is committed."""

    private: PrivateExamples
    share: Share
    script: DecodingSpec
    plan: GenerationPlan
    memo: ReleaseMemo
    scope: str

    def __call__(self, job: DraftJob) -> JobResult:
        """Returns a demonstration from the memo, or completes it and stores it there."""
        label, number = job
        key = MemoKey(self.scope, tenant_of(""), query_of([label or "", str(label is None), str(number)]))
        turn = JobLease(self.memo, key)
        stored = _StoredDraft(PartialText(label, number), self.memo, key, turn)
        stored.read()
        if not stored.draft.done:
            if not turn.take():
                return turn.busy()
            try:
                # Read again under the lease: another worker may have finished meanwhile.
                stored.read()
                if not stored.draft.done and not self._written(stored):
                    return JobResult("lost", tickets=stored.charged)
            except TurnLostError:
                return turn.busy(tickets=stored.charged)
            except Exception as error:  # noqa: BLE001  reported by kind, with its cost
                return JobResult.of_fault(error, tickets=stored.charged)
            finally:
                turn.leave()
        return JobResult("done", stored.draft.values, tickets=stored.charged)

    def _written(self, stored: _StoredDraft) -> bool:
        """Completes the draft; False: no tickets remain for the missing tokens."""
        seen: list[int] = []
        while not stored.draft.done:
            if not self._has_tickets(stored):
                return False
            try:
                run_sync(write_draft(self.script, stored.draft, self._opener(stored), lambda: None))
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
        return lambda draft, length, ticket, name, known: self._open(stored, length, name, known)  # noqa: ARG005  its own

    def _has_tickets(self, stored: _StoredDraft) -> bool:
        """Sets how many tickets each segment may still use; False: a segment that has not begun has none."""
        draft = stored.draft
        blocks = dict(self.plan.branches)[draft.label].blocks
        draft.tickets = {}
        for number, segment in enumerate(self.script.segments):
            tickets = []
            for length, count in blocks(segment.max_tokens):
                remaining = self.share.remaining(template_name(segment.name, length), label=draft.label)
                tickets.append(BlockTickets(length, max(0, min(count - stored.spent[number, length], remaining))))
            draft.tickets[number] = tickets
            begun = number < draft.segment or (number == draft.segment and bool(draft.tokens))
            if not begun and not any(one.owed > 0 for one in tickets):
                return False
        return True

    @contextmanager
    def _open(self, stored: _StoredDraft, length: int, name: str, known: dict[str, str]) -> Iterator[ReleaseBlock]:
        """Reserves one ticket for one block, so that a killed worker loses at most one; stores the released tokens."""
        draft = stored.draft
        template = template_name(self.script.segments[draft.segment].name, length)
        stored.turn.check(stored.stored_text)
        ticket = self.share.reserve(template, label=draft.label)
        stored.charged += 1
        try:
            with open_block(
                self.private,
                ticket,
                plan=dict(self.plan.branches)[draft.label],
                length=length,
                backend=self.script.backend,
                render=self.script.wording.renderer(name, known),
                choose=self.script.decoder.choose,
                prefix=tuple(draft.tokens),
            ) as block:
                stored.spent[draft.segment, length] += 1
                yield block
                stored.write()  # before the commit
        finally:
            stored.charged -= ticket.give_back()


@dataclass(slots=True, repr=False)
class _StoredDraft:
    """A draft and its state in the memo; released and public values only."""

    draft: PartialText
    memo: ReleaseMemo
    key: MemoKey
    turn: JobLease
    spent: Counter[tuple[int, int]] = dataclasses.field(default_factory=Counter)
    charged: int = 0
    stored_text: str | None = None

    def read(self) -> None:
        """Loads the state of the draft from the memo."""
        self.stored_text = self.memo.recall(self.key)
        if self.stored_text is None:
            return
        state = json.loads(self.stored_text)
        draft = self.draft
        draft.values, draft.segment, draft.done = dict(state["values"]), state["segment"], state["done"]
        draft.tokens = [_token_in(one) for one in state["tokens"]]
        self.spent = Counter({(segment, length): count for segment, length, count in state["spent"]})

    def write(self) -> None:
        """Stores the draft; raises TurnLostError if another worker changed it."""
        draft = self.draft
        text = json.dumps(
            {
                "values": draft.values,
                "segment": draft.segment,
                "tokens": [_token_out(token) for token in draft.tokens],
                "spent": [[segment, length, count] for (segment, length), count in self.spent.items()],
                "done": draft.done,
            }
        )
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
    kind, value = pair
    return bytes.fromhex(value) if kind == "bytes" else value


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

    @contextlib.contextmanager
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
            self._dealt.pop(label).close()
            self._reserved[label].commit()


@tells_how_to_build()
class DemonstrationSynthesizer(GenerationRun[PartialText]):
    """Generates differentially private demonstrations once; they can be used without limit.

    Formal guarantees:
      - Everything it returns or shows is a post-processing of indices released under `plan`, whose event is charged
        to the budget as the share of this component before the first private record is read.
      - Stopping (EOS, stop strings, length) looks at released tokens only.

    Build it with `from_private_examples`; `run` and `arun` generate, and continue after an interruption. Inside a
    LangChain run, observers receive `dpicl.charged` per demonstration and `dpicl.refused`; see `budget.events`.
    """

    _noun = "synthesizer"
    plan: GenerationPlan

    def __init__(
        self,
        private: PrivateExamples,
        script: DecodingSpec,
        *,
        budget: Budget,
        share: Share,
        plan: GenerationPlan,
        elsewhere: RemoteExecution | None = None,
    ) -> None:
        drafts = [PartialText(label, number) for number in range(plan.shots_per_label) for label, _ in plan.branches]
        super().__init__(private, drafts, budget=budget, share=share, elsewhere=elsewhere)
        self._script = script
        self.plan = plan
        self._deals = DisjointBatches(private, share, plan) if plan.design.sampling == "disjoint" else None

    @classmethod
    @door("DemonstrationSynthesizer")
    def from_private_examples(
        cls,
        private: PrivateExamples,
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
        executor: ExecutorLike = None,
    ) -> Self:
        """Plans the noise, declares the share and returns a synthesizer; nothing is spent yet.

        Args:
          private: the examples; bound to the budget's ledger here.
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
          decoding: a `Decoding`: candidates, stops, sampling, grammar.
          component: name in the ledger; the same name and plan reopen the same share with its remaining tickets.
          executor: a `RayExecutor`, or "ray": workers generate the demonstrations, each with its own records, model
            and ledger connection; demonstrations that they released under this `component` are reused. None: this
            process.

        Raises:
          ConfigurationError: a public argument is invalid; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.

        Source: Tang et al. (2023), Algorithm 1.
        """
        spender = resolve_budget(budget)
        mechanism = noise_of(noise, Noise, LogitNoise)
        shape, writing = option_of("rows", rows, Rows), option_of("decoding", decoding, Decoding)
        wording = GenerationTask.of(task, instruction)
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
            shots_per_label=shots_per_label,
            segments=script.segments,
            candidates=script.candidates,
            partition=private.dataset_id,
        )
        # The margin follows from the calibrated clip, which is known only now.
        script = dataclasses.replace(script, margin=public_margin(plan.release))
        name = component if component is not None else spender.fresh_name("few-shot")
        # Checked before the share is declared: a ledger that workers cannot reach must leave nothing behind.
        elsewhere = _elsewhere(executor, spender, script, plan, component=name, epsilon=epsilon)
        share = declare_share(
            private,
            spender,
            plan,
            component=name,
            epsilon=epsilon,
            public={**plan.to_dict(), **script.to_dict()},
            engines=[script],
        )
        return cls(private, script, budget=spender, share=share, plan=plan, elsewhere=elsewhere)

    afrom_private_examples = awaitable(from_private_examples)

    @property
    def demonstrations(self) -> list[dict[str, str]]:
        """The demonstrations released so far (public)."""
        return [self._example(draft) for draft in self._items if draft.done]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _give_back(self, draft: PartialText, events: RunEvents) -> None:
        for block in (block for tickets in draft.tickets.values() for block in tickets):
            if block.reservation is not None and block.reservation.refundable and block.reservation.unburnt:
                back = block.reservation.give_back()
                # An unfinished draft reserves the returned tickets again in its next run; a finished one needs none.
                block.owed, block.reservation = (0 if draft.done else back), None
                events.tickets -= back

    def _make(self, draft: PartialText, bar: Any, events: RunEvents) -> EffectGenerator[None]:
        self._reserve(draft, events)
        yield from write_draft(self._script, draft, self._open, lambda: tick(bar))
        if self._deals is not None and all(other.done for other in self._items if other.label == draft.label):
            # The partition of a label is secret and no longer needed.
            self._deals.finish(draft.label)

    def _job(self, draft: PartialText) -> DraftJob:
        return draft.label, draft.number

    def _take(self, draft: PartialText, values: dict[str, str], bar: Any) -> None:
        draft.values, draft.done = dict(values), True
        for _ in range(self._tokens_per_draft):
            tick(bar)

    def _reserve(self, draft: PartialText, events: RunEvents) -> None:
        """Reserves every ticket that one demonstration still needs, before its first private call."""
        plan = dict(self.plan.branches)[draft.label]
        segments = self._script.segments
        if not draft.tickets:
            draft.tickets = {
                number: [BlockTickets(length, count) for length, count in plan.blocks(segment.max_tokens)]
                for number, segment in enumerate(segments)
            }
        if self._deals is not None:
            events.tickets += self._deals.reserve(draft.label)
            for number, tickets in draft.tickets.items():
                # One ticket pays for all demonstrations of a label; `owed` only says whether blocks remain.
                tickets[0].owed = int(self._deals.left(draft.label, draft.number, number) > 0)
            return
        for number, tickets in draft.tickets.items():
            for block in tickets:
                if block.owed and block.reservation is None:
                    template = template_name(segments[number].name, block.length)
                    block.reservation = self._share.reserve(template, label=draft.label, count=block.owed)
                    events.tickets += block.owed
                    block.owed = 0

    def _open(
        self, draft: PartialText, length: int, ticket: Reservation | None, name: str, known: dict[str, str]
    ) -> AbstractContextManager[ReleaseBlock]:
        if self._deals is not None:
            return self._deals.open(
                draft.label,
                draft.number,
                draft.segment,
                backend=self._script.backend,
                render=self._script.wording.renderer(name, known),
                choose=self._script.decoder.choose,
                prefix=tuple(draft.tokens),
            )
        if ticket is None:
            raise fail("ticket", "a reservation", ticket)
        return open_block(
            self._private,
            ticket,
            plan=dict(self.plan.branches)[draft.label],
            length=length,
            backend=self._script.backend,
            render=self._script.wording.renderer(name, known),
            choose=self._script.decoder.choose,
            prefix=tuple(draft.tokens),
        )

    def _so_far(self) -> str:
        return f"{len(self.demonstrations)} of {len(self._items)} demonstrations are"

    def _examples(self, draft: PartialText) -> list[dict[str, str]]:
        return [self._example(draft)]

    def _example(self, draft: PartialText) -> dict[str, str]:
        known = self._script.known(draft)
        return {name: known[name] for name in sorted(self._script.wording.generated_fields)}

    def _plan_for_report(self) -> dict[str, Any]:
        return {**self.plan.to_dict(), **self._script.to_dict()}

    @property
    def _tokens_per_draft(self) -> int:
        return sum(segment.max_tokens for segment in self._script.segments)

    def _bar(self, progress: bool | None) -> Any:
        return new_bar(self._tokens_per_draft * len(self._items), "token", "private generation", progress=progress)

    def _show(self, bar: Any) -> None:
        with suppress(OSError, ValueError):
            bar.set_postfix_str(f"{len(self.demonstrations)}/{len(self._items)} demonstrations")

    def __repr__(self) -> str:
        return f"DemonstrationSynthesizer(component={self._share.component!r}, plan={self.plan!r})"


def _elsewhere(
    executor: ExecutorLike, budget: Budget, script: DecodingSpec, plan: GenerationPlan, **paid: Any
) -> RemoteExecution | None:
    """Returns the remote execution, or None without an executor."""
    workers = as_executor(executor)
    if workers is None:
        return None
    check_reached(budget, is_one_host=workers.is_one_host)
    work = GenerationJob.of(script, plan, ledger_id=budget.ledger_id, **paid)
    return RemoteExecution(workers, work, is_ours=executor == "ray")


def public_sizes(private: PrivateExamples) -> dict[str | None, int]:
    """Returns the declared size of every branch."""
    return {label: private.public_size_of(label) for label in (private.labels or (None,))}
