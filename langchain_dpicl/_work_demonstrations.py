"""Generates demonstrations on workers, and stores each released token before its ticket is committed."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from langchain_dpicl.backends.base import Token
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.backends.walk import drive
from langchain_dpicl.declaring import declare_share
from langchain_dpicl.exceptions import MemoError, PrivacyBudgetExceededError
from langchain_dpicl.executors import Answer
from langchain_dpicl.grammars import Grammar
from langchain_dpicl.planning import GenerationPlan, template_name
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.shares import Share
from langchain_dpicl.release.curator import open_block
from langchain_dpicl.release.token_block import Block
from langchain_dpicl.stores import MemoKey, ReleaseMemo
from langchain_dpicl.stores.memos import query_of, scope_of, tenant_of
from langchain_dpicl.working import JobTurn, TurnLostError, Workplace
from langchain_dpicl.writing import Draft, Held, Opener, Script, write_draft

DraftJob: TypeAlias = tuple[str | None, int]
"""Label and number of a demonstration."""


@dataclass(frozen=True, slots=True)
class DemonstrationWork:
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
    script: Script
    grammar: Grammar | None
    public: Mapping[str, Any]
    engine: tuple[Any, ...]

    @classmethod
    def of(
        cls, script: Script, plan: GenerationPlan, *, ledger_id: str, component: str, epsilon: float | None
    ) -> DemonstrationWork:
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

    def begin(self, place: Workplace) -> Callable[[DraftJob], Answer]:
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
        return _Writer(private, share, script, self.plan, memo, scope)


@dataclass(frozen=True, slots=True, repr=False)
class _Writer:
    """Generates one demonstration at a time, and stores every released token before its ticket is committed."""

    private: PrivateExamples
    share: Share
    script: Script
    plan: GenerationPlan
    memo: ReleaseMemo
    scope: str

    def __call__(self, job: DraftJob) -> Answer:
        """Returns a demonstration from the memo, or completes it and stores it there."""
        label, number = job
        key = MemoKey(self.scope, tenant_of(""), query_of([label or "", str(label is None), str(number)]))
        turn = JobTurn(self.memo, key)
        stored = _Kept(Draft(label, number), self.memo, key, turn)
        stored.read()
        if not stored.draft.done:
            if not turn.take():
                return turn.busy()
            try:
                # Read again under the lease: another worker may have finished meanwhile.
                stored.read()
                if not stored.draft.done and not self._written(stored):
                    return Answer("lost", tickets=stored.charged)
            except TurnLostError:
                return turn.busy(tickets=stored.charged)
            except Exception as error:  # noqa: BLE001  reported by kind, with its cost
                return Answer.of_fault(error, tickets=stored.charged)
            finally:
                turn.leave()
        return Answer("done", stored.draft.values, tickets=stored.charged)

    def _written(self, stored: _Kept) -> bool:
        """Completes the draft; False: no tickets remain for the missing tokens."""
        seen: list[int] = []
        while not stored.draft.done:
            if not self._has_tickets(stored):
                return False
            try:
                drive(write_draft(self.script, stored.draft, self._opener(stored), lambda: None))
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

    def _opener(self, stored: _Kept) -> Opener:
        return lambda draft, length, ticket, name, known: self._open(stored, length, name, known)  # noqa: ARG005  its own

    def _has_tickets(self, stored: _Kept) -> bool:
        """Sets how many tickets each segment may still use; False: a segment that has not begun has none."""
        draft = stored.draft
        blocks = dict(self.plan.branches)[draft.label].blocks
        draft.tickets = {}
        for number, segment in enumerate(self.script.segments):
            tickets = []
            for length, count in blocks(segment.max_tokens):
                remaining = self.share.remaining(template_name(segment.name, length), label=draft.label)
                tickets.append(Held(length, max(0, min(count - stored.spent[number, length], remaining))))
            draft.tickets[number] = tickets
            begun = number < draft.segment or (number == draft.segment and bool(draft.tokens))
            if not begun and not any(one.owed > 0 for one in tickets):
                return False
        return True

    @contextmanager
    def _open(self, stored: _Kept, length: int, name: str, known: dict[str, str]) -> Iterator[Block]:
        """Reserves one ticket for one block, so that a killed worker loses at most one; stores the released tokens."""
        draft = stored.draft
        template = template_name(self.script.segments[draft.segment].name, length)
        stored.turn.check(stored.told)
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
                choose=self.script.decoding.choose,
                prefix=tuple(draft.tokens),
            ) as block:
                stored.spent[draft.segment, length] += 1
                yield block
                stored.write()  # before the commit
        finally:
            stored.charged -= ticket.give_back()


@dataclass(slots=True, repr=False)
class _Kept:
    """A draft and its state in the memo; released and public values only."""

    draft: Draft
    memo: ReleaseMemo
    key: MemoKey
    turn: JobTurn
    spent: Counter[tuple[int, int]] = dataclasses.field(default_factory=Counter)
    charged: int = 0
    told: str | None = None

    def read(self) -> None:
        """Loads the state of the draft from the memo."""
        self.told = self.memo.recall(self.key)
        if self.told is None:
            return
        state = json.loads(self.told)
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
        if text == self.told:
            return
        self.memo.remember(self.key, text, instead_of=self.told)
        # `remember` does not overwrite a value other than `instead_of`; the read shows who won.
        if self.memo.recall(self.key) != text:
            raise TurnLostError("memo: expected the draft that this worker stored, found one that another run changed.")
        self.told = text


def _facts(script: Script) -> tuple[Any, ...]:
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


__all__ = ["DemonstrationWork", "DraftJob"]
