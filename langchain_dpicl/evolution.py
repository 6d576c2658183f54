"""PrivateEvolution: evolves demonstrations by private votes (Lin et al. 2024; Xie et al. 2024)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableConfig

from langchain_dpicl._candidates import PublicModel
from langchain_dpicl._constructing import tells_how_to_build
from langchain_dpicl._evolution_checkpoint import Checkpoint
from langchain_dpicl._evolution_population import Population, Selection, Survival
from langchain_dpicl._evolution_writing import EvolutionWording, EvolutionWriter, given_candidates
from langchain_dpicl._progress import new_bar, tick
from langchain_dpicl._work_texts import writing_model
from langchain_dpicl.backends.embeddings import SilentEmbeddings
from langchain_dpicl.backends.nearest import Candidates, NearestRows, Texts
from langchain_dpicl.backends.nearest_embeddings import LocalEmbeddings
from langchain_dpicl.backends.walk import Walk
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.callbacks import resolve_budget
from langchain_dpicl.declaring import declare_share, share_of_delta
from langchain_dpicl.evolution_planning import ROUND_TEMPLATE, EvolutionPlan, plan_evolution
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.generating import Generation
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.examples import PrivateExamples
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.privacy.shares import Share
from langchain_dpicl.ray_executor import ExecutorLike
from langchain_dpicl.release.curator import release_once
from langchain_dpicl.release.sample import Record
from langchain_dpicl.run_events import RunEvents, tells_refusals
from langchain_dpicl.writing import DEFAULT_STOP, check_example_prompt


@tells_how_to_build()
class PrivateEvolution(Generation[Population]):
    """Evolves differentially private demonstrations without showing any private text to the model that writes them.

    The model writes candidates from a public instruction. Every private unit votes, on this machine, for the candidates
    nearest to its texts in an embedding space; the sum of the votes is released with Gaussian noise. The candidates
    with the most noisy votes survive, the model varies them, and the next round begins.

    Formal guarantees:
      - Everything it returns or shows is a post-processing of noisy histograms released under `plan`, whose event is
        charged to the budget as the share of this component before the first private record is read or embedded.
      - The model receives public and released texts only. Private texts are passed to the embeddings only, without
        callbacks, and their vectors stay in memory until their label is complete.
      - A unit has one vector of votes, of L2 length 1 or 0, in every round, whatever its number of records.

    Build it with `from_private_examples`; `run` and `arun` evolve, and continue after an interruption.

    Example:
      >>> from langchain_dpicl import Budget, EmbeddedLLM, PrivateExamples
      >>> private = PrivateExamples(["my card was declined"] * 300, public_size=300)
      >>> evolution = PrivateEvolution.from_private_examples(
      ...     private,
      ...     llm=EmbeddedLLM(),
      ...     candidates=["a card payment was declined", "a boat on the sea"],
      ...     budget=Budget(epsilon=2.0, delta=1e-5),
      ...     epsilon=2.0,
      ...     rounds=1,
      ...     num_variations=0,
      ...     shots_per_label=1,
      ... )
      >>> evolution.run(progress=False).examples
      ({'text': 'a card payment was declined'},)
    """

    _noun = "evolution"

    def __init__(
        self,
        private: PrivateExamples,
        writer: EvolutionWriter,
        nearest: NearestRows,
        *,
        budget: Budget,
        share: Share,
        plan: EvolutionPlan,
        survival: Survival,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        populations = [Population(label, owed=plan.rounds) for label in plan.labels]
        super().__init__(private, populations, budget=budget, share=share)
        self._writer = writer
        self._nearest = nearest
        self.plan = plan
        self.survival = survival
        self._checkpoint = checkpoint
        if checkpoint is not None:
            checkpoint.restore(self._items, share)

    @classmethod
    @tells_refusals("PrivateEvolution")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: Any,
        embeddings: Embeddings | SilentEmbeddings | None = None,
        budget: Any = None,
        config: RunnableConfig | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        instruction: str | None = None,
        generation_prompt: Any = None,
        variation_prompt: Any = None,
        hints: Sequence[str] = (),
        candidates: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        example_prompt: Any = None,
        shots_per_label: int = 4,
        rounds: int = 5,
        num_candidates: int | None = None,
        num_survivors: int = 10,
        num_variations: int = 3,
        neighbours: int = 1,
        selection: Selection = "rank",
        threshold: float | None = None,
        max_tokens: int = 60,
        stop: Sequence[str] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        component: str | None = None,
        executor: ExecutorLike = None,
    ) -> PrivateEvolution:
        """Plans the noise, declares the share and returns an evolution; nothing is spent yet.

        All parameters are public and must not be chosen by looking at the records.

        Args:
          private: the examples; bound to the budget's ledger here.
          llm: writes the candidates: a LangChain chat or completion model (or Runnable from a prompt to text), called
            with its own settings and callbacks, or an engine. It sees public and released texts only.
          embeddings: LangChain embeddings; they SEE the private texts. By default `LocalEmbeddings`, without network.
          budget: a PrivacyBudgetCallbackHandler or Budget; otherwise looked up in `config`, then in the context.
          config: a RunnableConfig whose callbacks may hold the budget; the model is called with it.
          epsilon: this component's share of the budget (its noise is calibrated to it).
          delta: the share's delta; by default in proportion to epsilon.
          noise_multiplier: noise in units of the sensitivity, instead of calibrating (its cost must fit `epsilon`).
          instruction: public task description, the first paragraph of the prompts for first candidates.
          generation_prompt: template of one record, text field last; the model continues it.
          variation_prompt: template of the prompt for a variation of a text, with the text's field and the label's.
          hints: public sentences ("Write it as an angry customer."), appended in turn to the instruction of each
            prompt.
          candidates: public first candidates, instead of generated ones: a list, or one list per label.
          example_prompt: template that will show the demonstrations; checked here so that it fails before spending.
          shots_per_label: demonstrations per label: those with the most votes in the last round.
          rounds: noisy histograms per label; their costs compose.
          num_candidates: number of first candidates; by default that of later rounds.
          num_survivors: candidates that survive a round.
          num_variations: variations of each survivor; 0 with one round only chooses among the candidates.
          neighbours: candidates that a text votes for.
          selection: "rank" (survivors have the most noisy votes) or "sample" (drawn in proportion to them).
          threshold: minimum noisy votes of a survivor; the `shots_per_label` best always survive.
          max_tokens: maximum number of tokens of a text from an engine; a LangChain model has its own limit.
          stop: strings that end a text; by default a line break.
          checkpoint: file that stores every released histogram before its ticket is committed. If it exists, the run
            continues from it, also in another process, with the same durable ledger.
          component: name in the ledger; the same name and plan reopen the same share with its remaining tickets.
          executor: a `RayExecutor`, or "ray": workers write the candidates, which is public work. Votes, noise and
            ledger stay in this process. None: this process writes the candidates.

        Raises:
          ConfigurationError: a public argument is invalid; nothing was charged and no private call was made.
          CapabilityError: `llm` cannot write text, or `embeddings` are not embeddings.
          UnsilencableModelError: the embeddings cannot be called without logging or tracing.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.
          ModelCallError: the embeddings could not be reached.

        Source: Lin et al. (2024), Differentially Private Synthetic Data via Foundation Model APIs 1: Images; Xie et al.
          (2024), the same 2: Text.
        """
        spender = resolve_budget(budget, config)
        if not isinstance(private, PrivateExamples):
            raise fail("private", "PrivateExamples", type(private).__name__)
        labels: tuple[str | None, ...] = private.labels or (None,)
        wording = EvolutionWording.of(
            text_key=private.text_key,
            label_key=private.label_key,
            fields=private.fields,
            instruction=instruction,
            generation_prompt=generation_prompt,
            variation_prompt=variation_prompt,
            hints=hints,
        )
        check_example_prompt(example_prompt, wording.first)
        by_label = given_candidates(candidates, labels)
        if by_label:
            num_candidates = _most(by_label, num_candidates)
        plan = plan_evolution(
            {label: private.public_size_of(label) for label in labels},
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=delta),
            adjacency=spender.adjacency,
            noise_multiplier=noise_multiplier,
            rounds=rounds,
            shots_per_label=shots_per_label,
            num_candidates=num_candidates,
            num_survivors=num_survivors,
            num_variations=num_variations,
            partition=private.dataset_id,
        )
        survival = Survival(num_survivors, shots_per_label, selection, threshold)
        model = writing_model(llm, executor, max_tokens=max_tokens, stop=DEFAULT_STOP if stop is None else stop)
        check_int("neighbours", neighbours, low=1)
        nearest = NearestRows(LocalEmbeddings() if embeddings is None else embeddings, neighbours=neighbours)
        public = {**plan.to_dict(), **_shown(wording, nearest, survival, model)}
        name = component if component is not None else spender.fresh_name("evolution")
        terms = {"ledger_id": spender.ledger_id, "dataset_id": private.dataset_id, "component": name, "public": public}
        store = None if checkpoint is None else Checkpoint(checkpoint, terms)
        share = declare_share(private, spender, plan, component=name, epsilon=epsilon, public=public, engines=[nearest])
        handles: dict[str, Any] = {"budget": spender, "share": share, "plan": plan}
        writer = EvolutionWriter(model, wording, by_label, config)
        return cls(private, writer, nearest, survival=survival, checkpoint=store, **handles)

    @property
    def demonstrations(self) -> list[dict[str, str]]:
        """The demonstrations so far, from the last round of each label (public)."""
        return [example for population in self._items for example in self._examples(population)]

    @property
    def votes(self) -> dict[str | None, tuple[float, ...]]:
        """The noisy votes of the last survivors of each label, most first (public)."""
        return {population.label: population.votes for population in self._items}

    @property
    def history(self) -> dict[str | None, tuple[dict[str, float], ...]]:
        """The noisy votes by candidate, of every round of each label (public)."""
        return {population.label: tuple(map(dict, population.history)) for population in self._items}

    # -- inside ----------------------------------------------------------------------------------------------------

    def _events(self) -> RunEvents:
        return RunEvents(type(self).__name__, budget=self._budget, share=self._share, config=self._writer.config)

    def _give_back(self, population: Population, events: RunEvents) -> None:
        if population.reservation is not None and population.reservation.unburnt:
            back = population.reservation.give_back()
            population.owed += back
            events.tickets -= back
        population.reservation = None

    def _make(self, population: Population, bar: Any, events: RunEvents) -> Walk[None]:
        """Runs the remaining rounds of one label (a walk)."""
        while population.left:
            yield from self._prepare(population)
            # Candidates are written and embedded before the ticket is reserved: a public failure costs nothing.
            candidates = yield self._nearest.ask_public(population.texts)
            self._reserve(population, events)
            yield from self._vote(population, candidates)
            tick(bar)
        # Every ticket burnt without a release: there is nothing to return.
        if not population.rounds:
            raise ModelCallError("every round of a label failed after its ticket burnt; declare another component")
        population.done = True
        # The private vectors of a label are not needed for the next one.
        self._nearest.forget()

    def _prepare(self, population: Population) -> Walk[None]:
        """Generates the candidates of the next round; survivors of the last round are among them."""
        if population.texts:
            return
        if population.survivors:
            texts = yield from self._writer.varied(population.label, population.survivors, self.plan.num_variations)
        else:
            # A vote among fewer than two candidates would release nothing useful.
            least = max(2, self.plan.shots_per_label)
            texts = yield from self._writer.first(population.label, self.plan.num_candidates, least=least)
        population.texts = texts[: self.plan.width]

    def _reserve(self, population: Population, events: RunEvents) -> None:
        """Reserves the label's remaining rounds; with a checkpoint one at a time, to bound the loss of a kill."""
        if population.reservation is None or not population.reservation.unburnt:
            count = population.owed if self._checkpoint is None else 1
            population.reservation = self._share.reserve(ROUND_TEMPLATE, label=population.label, count=count)
            events.tickets += count
            population.owed -= count

    def _vote(self, population: Population, candidates: Candidates) -> Walk[None]:
        """Releases one noisy histogram and stores the survivors before the ticket is committed (a walk)."""
        if population.reservation is None:
            raise fail("ticket", "a reservation", None)
        yield from release_once(
            self._private,
            population.reservation,
            plan=self.plan.release,
            rows=lambda units: self._nearest.ask(units, candidates),
            render=_TextsOf(self._private.text_key),
            width=len(candidates),
            keep=lambda released: self._keep(population, released),
        )

    def _keep(self, population: Population, released: Release) -> None:
        population.take(released, self.survival)
        if self._checkpoint is not None:
            self._checkpoint.save(self._items)

    def _rest(self) -> None:
        self._writer.model.rest()

    def _so_far(self) -> str:
        rounds = sum(population.rounds for population in self._items)
        return f"{rounds} of {self.plan.rounds * len(self.plan.labels)} rounds are"

    def _examples(self, population: Population) -> list[dict[str, str]]:
        best = population.survivors[: self.plan.shots_per_label]
        return [self._writer.wording.example(population.label, text) for text in best]

    def _shown_plan(self) -> dict[str, Any]:
        return {**self.plan.to_dict(), **_shown(self._writer.wording, self._nearest, self.survival, self._writer.model)}

    def _bar(self, progress: bool | None) -> Any:
        return new_bar(sum(item.left for item in self._open_items()), "round", "private evolution", progress=progress)

    def __repr__(self) -> str:
        return f"PrivateEvolution(component={self._share.component!r}, plan={self.plan!r})"


@dataclasses.dataclass(frozen=True, slots=True)
class _TextsOf:
    """Returns the texts of a unit; picklable, unlike a closure."""

    text_key: str

    def __call__(self, records: Sequence[Record]) -> Texts:
        return tuple([record[self.text_key] for record in records])


def _most(by_label: Mapping[str | None, tuple[str, ...]], declared: int | None) -> int:
    """Returns the largest number of given candidates; refuses more than declared."""
    most = max(map(len, by_label.values()))
    if declared is not None and declared < most:
        raise fail("num_candidates", f"at least the {most} given candidates, or None", declared)
    return most


def _shown(wording: EvolutionWording, nearest: NearestRows, survival: Survival, model: PublicModel) -> dict[str, Any]:
    """Returns the fields of reports beside the plan's."""
    return {
        **wording.to_dict(),
        "model": model.name,
        "embeddings": nearest.embeddings.name,
        "neighbours": nearest.neighbours,
        "selection": survival.selection,
        "threshold": survival.threshold,
    }
