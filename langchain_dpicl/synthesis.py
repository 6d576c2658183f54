"""DemonstrationSynthesizer: generates demonstrations token by token (Tang et al. 2023, Algorithm 1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from langchain_dpicl._constructing import tells_how_to_build
from langchain_dpicl._progress import new_bar, tick
from langchain_dpicl._work_demonstrations import DemonstrationWork, DraftJob
from langchain_dpicl.backends.resolve import as_backend
from langchain_dpicl.backends.walk import Walk
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.callbacks import resolve_budget
from langchain_dpicl.deals import Deals
from langchain_dpicl.declaring import declare_share, share_of_delta
from langchain_dpicl.decoding import Decoding
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.executors import Elsewhere
from langchain_dpicl.generating import Generation
from langchain_dpicl.grammars import Grammar
from langchain_dpicl.planning import GenerationPlan, Segment, plan_generation, template_name
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.shares import Reservation, Share
from langchain_dpicl.ray_executor import ExecutorLike, as_executor
from langchain_dpicl.release.curator import open_block
from langchain_dpicl.release.token_block import Block
from langchain_dpicl.row_design import RowDesign
from langchain_dpicl.run_events import RunEvents, tells_refusals
from langchain_dpicl.token_rules import LOGIT_MECHANISMS, TokenRule, public_margin
from langchain_dpicl.working import check_reached
from langchain_dpicl.writing import DEFAULT_STOP, Draft, Held, Script, check_texts, make_script, write_draft


@tells_how_to_build()
class DemonstrationSynthesizer(Generation[Draft]):
    """Generates differentially private demonstrations once; they can be used without limit.

    Formal guarantees:
      - Everything it returns or shows is a post-processing of indices released under `plan`, whose event is charged
        to the budget as the share of this component before the first private record is read.
      - Stopping (EOS, stop strings, length) looks at released tokens only.

    Build it with `from_private_examples`; `run` and `arun` generate, and continue after an interruption. Inside a
    LangChain run, observers receive `dpicl.charged` per demonstration and `dpicl.refused`; see `run_events`.
    """

    _noun = "synthesizer"

    def __init__(
        self,
        private: PrivateExamples,
        script: Script,
        *,
        budget: Budget,
        share: Share,
        plan: GenerationPlan,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        drafts = [Draft(label, number) for number in range(plan.shots_per_label) for label, _ in plan.branches]
        super().__init__(private, drafts, budget=budget, share=share, elsewhere=elsewhere)
        self._script = script
        self.plan = plan
        self._deals = Deals(private, share, plan) if plan.design.sampling == "disjoint" else None

    @classmethod
    @tells_refusals("DemonstrationSynthesizer")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: Any,
        budget: Any = None,
        config: Any = None,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        instruction: str | None = None,
        generation_prompt: Any = None,
        example_prompt: Any = None,
        open_label_key: str | None = None,
        open_labels: Sequence[str] | None = None,
        max_label_tokens: int = 10,
        shots_per_label: int = 1,
        max_tokens: int = 60,
        grammar: Grammar | None = None,
        mechanism: str = "gumbel",
        clip: float | None = None,
        blend_weight: float | None = None,
        center: str | None = None,
        free_tokens: float | None = None,
        private_tokens: int | None = None,
        rows: str | None = None,
        num_slots: int | None = None,
        shots_per_slot: int | None = None,
        sampling: str = "poisson",
        overfill: float | None = None,
        redraw_every: int | None = None,
        public_top_k: int | None = 100,
        stop: Sequence[str] | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float = 1.0,
        component: str | None = None,
        executor: ExecutorLike = None,
    ) -> DemonstrationSynthesizer:
        """Plans the noise, declares the share and returns a synthesizer; nothing is spent yet.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here.
          llm: an engine, an object that carries one, or a LangChain model with token log-probabilities. It SEES the
            private prompts.
          budget: a PrivacyBudgetCallbackHandler or Budget; otherwise looked up in `config`, then in the context.
          config: a RunnableConfig whose callbacks may hold the budget.
          epsilon: this component's share of the budget (its noise is calibrated to it).
          delta: the share's delta; by default in proportion to epsilon.
          noise_multiplier: noise in units of the sensitivity, instead of calibrating (its cost must fit `epsilon`).
          instruction: public task description, the first paragraph of every prompt.
          generation_prompt: template of one record, text field last (see `GenerationWording`).
          example_prompt: template that will show the demonstrations; checked here so that it fails before spending.
          open_label_key: field of a label that is open text (no declared labels): it is generated first, or drawn
            from `open_labels`, and never copied from a record.
          open_labels: public list to draw open labels from.
          max_label_tokens: cap of a generated open label, in tokens.
          shots_per_label: demonstrations per label; their costs compose.
          max_tokens: cap of a demonstration's text, in tokens.
          grammar: constrains the texts, for instance `Grammar.json_schema(...)`; tokens that it forces cost nothing.
          mechanism: "gumbel", "gaussian" or "permute_and_flip" on next-token probabilities; "recentered_clip",
            "difference_clip" or "clip_and_blend" on logits, from a model that shows its whole vocabulary.
          clip: largest magnitude of a clipped logit or difference (logit mechanisms); None: computed from temperature
            and noise. With `temperature` it determines the noise.
          blend_weight: share of the private rows in the score ("clip_and_blend"); 0.5 by default.
          center: "max" (default) or "none": what is subtracted from a row's logits ("clip_and_blend").
          free_tokens: share of the rows in (0, 1) below which, by a noisy test, the total variation between their mean
            and the public distribution makes a token public and free (logit mechanisms, `redraw_every=max_tokens`).
          private_tokens: with `free_tokens`, the maximum number of private tokens per sample; later tokens are public.
          rows: "units" (every sampled unit is a row of its own) or "slots" (k-shot prompts).
          num_slots: number of slots, or expected number of unit rows.
          shots_per_slot: records per slot; 1 for unit rows.
          sampling: "poisson", "disjoint" (one secret partition per label: each demonstration reads its own batch for
            all of its tokens), or "fixed" (balanced partition; `replace_one` without labels only).
          overfill: expected units per shot of a slot.
          redraw_every: tokens per secret sample (c); `max_tokens` for one sample per demonstration, the only value for
            "disjoint". None: 1 otherwise.
          public_top_k: candidates per token, taken from the public prompt (no more than the model reports; the plan
            shows how many); None: the whole vocabulary.
          stop: strings that end a field; by default a line break, or nothing with a grammar.
          temperature: of the released token's softmax (logit mechanisms; 1 by default); for "gaussian", sampling
            temperature on the noised vector, 0 (default) takes the largest.
          top_k: sample among this many noised candidates (mechanism "gaussian" only).
          top_p: nucleus sampling on the noised vector (mechanism "gaussian" only).
          component: name in the ledger; the same name and plan reopen the same share with its remaining tickets.
          executor: a `RayExecutor`, or "ray": workers generate the demonstrations, each with its own records, model
            and ledger connection; demonstrations that they released under this `component` are reused. None: this
            process.

        Raises:
          ConfigurationError: a public argument is invalid; nothing was charged and no private call was made.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.

        Source: Tang et al. (2023), Algorithm 1.
        """
        spender = resolve_budget(budget, config)
        label_key = _label_key(private, open_label_key, open_labels)
        segments: tuple[Segment, ...] = (Segment("text", max_tokens),)
        if open_label_key is not None and open_labels is None:
            # An open label is private text: it is generated before the text, at a cost of its own.
            segments = (Segment("label", max_label_tokens), *segments)
        clipping = {"clip": clip, "blend_weight": blend_weight, "center": center}
        tested = {"free_tokens": free_tokens, "private_tokens": private_tokens}
        rule, decoding = _rules(mechanism, temperature, {**clipping, **tested}, top_k=top_k, top_p=top_p)
        script = make_script(
            private,
            as_backend(llm),
            label_key=label_key,
            instruction=instruction,
            generation_prompt=generation_prompt,
            example_prompt=example_prompt,
            segments=segments,
            public_top_k=public_top_k,
            stop=stop if stop is not None else (DEFAULT_STOP if grammar is None else ()),
            decoding=decoding,
            open_labels=open_labels,
            needs_logits=rule.is_logit,
            grammar=grammar,
        )
        plan = plan_generation(
            public_sizes(private),
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=delta),
            adjacency=spender.adjacency,
            noise_multiplier=noise_multiplier,
            mechanism=rule,
            design=RowDesign.choose(
                rows=rows,
                num_slots=num_slots,
                shots_per_slot=shots_per_slot,
                sampling=sampling,
                overfill=overfill,
                smallest_size=min(public_sizes(private).values()),
            ),
            redraw_every=redraw_every,
            shots_per_label=shots_per_label,
            segments=segments,
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

    @property
    def demonstrations(self) -> list[dict[str, str]]:
        """The demonstrations released so far (public)."""
        return [self._example(draft) for draft in self._items if draft.done]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _give_back(self, draft: Draft, events: RunEvents) -> None:
        for block in (block for tickets in draft.tickets.values() for block in tickets):
            if block.reservation is not None and block.reservation.refundable and block.reservation.unburnt:
                back = block.reservation.give_back()
                # An unfinished draft reserves the returned tickets again in its next run; a finished one needs none.
                block.owed, block.reservation = (0 if draft.done else back), None
                events.tickets -= back

    def _make(self, draft: Draft, bar: Any, events: RunEvents) -> Walk[None]:
        self._reserve(draft, events)
        yield from write_draft(self._script, draft, self._open, lambda: tick(bar))
        if self._deals is not None and all(other.done for other in self._items if other.label == draft.label):
            # The partition of a label is secret and no longer needed.
            self._deals.finish(draft.label)

    def _job(self, draft: Draft) -> DraftJob:
        return draft.label, draft.number

    def _take(self, draft: Draft, values: dict[str, str], bar: Any) -> None:
        draft.values, draft.done = dict(values), True
        for _ in range(self._tokens_per_draft):
            tick(bar)

    def _reserve(self, draft: Draft, events: RunEvents) -> None:
        """Reserves every ticket that one demonstration still needs, before its first private call."""
        plan = dict(self.plan.branches)[draft.label]
        segments = self._script.segments
        if not draft.tickets:
            draft.tickets = {
                number: [Held(length, count) for length, count in plan.blocks(segment.max_tokens)]
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
        self, draft: Draft, length: int, ticket: Reservation | None, name: str, known: dict[str, str]
    ) -> AbstractContextManager[Block]:
        if self._deals is not None:
            return self._deals.open(
                draft.label,
                draft.number,
                draft.segment,
                backend=self._script.backend,
                render=self._script.wording.renderer(name, known),
                choose=self._script.decoding.choose,
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
            choose=self._script.decoding.choose,
            prefix=tuple(draft.tokens),
        )

    def _so_far(self) -> str:
        return f"{len(self.demonstrations)} of {len(self._items)} demonstrations are"

    def _examples(self, draft: Draft) -> list[dict[str, str]]:
        return [self._example(draft)]

    def _example(self, draft: Draft) -> dict[str, str]:
        known = self._script.known(draft)
        return {name: known[name] for name in sorted(self._script.wording.generated_fields)}

    def _shown_plan(self) -> dict[str, Any]:
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
    executor: ExecutorLike, budget: Budget, script: Script, plan: GenerationPlan, **paid: Any
) -> Elsewhere | None:
    """Returns the remote execution, or None without an executor."""
    workers = as_executor(executor)
    if workers is None:
        return None
    check_reached(budget, is_one_host=workers.is_one_host)
    work = DemonstrationWork.of(script, plan, ledger_id=budget.ledger_id, **paid)
    return Elsewhere(workers, work, is_ours=executor == "ray")


def public_sizes(private: PrivateExamples) -> dict[str | None, int]:
    """Returns the declared size of every branch."""
    return {label: private.public_size_of(label) for label in (private.labels or (None,))}


def _label_key(private: PrivateExamples, key: str | None, labels: Sequence[str] | None) -> str | None:
    if key is None:
        if labels is not None:
            raise fail("open_labels", "None without open_label_key", labels)
        return private.label_key
    if private.label_key is not None or key not in private.fields:
        msg = f"open_label_key: expected a declared field of examples without declared labels, found {key!r}."
        raise ConfigurationError(msg)
    if labels is not None and len(set(check_texts("open_labels", labels))) != len(labels):
        raise fail("open_labels", "distinct texts of a public list", type(labels).__name__)
    return key


def _rules(
    mechanism: str, temperature: float | None, options: dict[str, Any], *, top_k: int | None, top_p: float
) -> tuple[TokenRule, Decoding]:
    """Returns the token rule and the decoding; `temperature` goes to the one of them that the mechanism uses."""
    is_logit = mechanism in LOGIT_MECHANISMS
    rule = TokenRule(mechanism, temperature=temperature if is_logit else None, **options)
    decoding = Decoding(temperature=0.0 if is_logit else temperature or 0.0, top_k=top_k, top_p=top_p)
    if mechanism != "gaussian" and not decoding.is_default:
        advice = "That mechanism releases only an index; use mechanism='gaussian'."
        raise fail("temperature, top_k, top_p", f"their defaults with mechanism={mechanism!r}", decoding, advice)
    return rule, decoding
