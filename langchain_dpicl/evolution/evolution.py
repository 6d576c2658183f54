"""PrivateEvolution: evolves candidates by private votes, with checkpoints (Lin et al. 2024; Xie et al. 2024)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from langchain_core.runnables import RunnableConfig
from numpy.typing import NDArray

from langchain_dpicl._construction import awaitable, tells_how_to_build
from langchain_dpicl.backends.resolve import as_embeddings, as_model
from langchain_dpicl.backends.rows.neighbour_rows import Candidates, NearestRows, Texts
from langchain_dpicl.backends.sync_async import EffectGenerator
from langchain_dpicl.budget.events import RunEvents
from langchain_dpicl.budget.handler import BudgetLike, resolve_budget
from langchain_dpicl.distributed.ray import ExecutorLike
from langchain_dpicl.evolution.plan import ROUND_TEMPLATE, EvolutionPlan, plan_evolution
from langchain_dpicl.evolution.writing import EvolutionTemplate, EvolutionWriter, first_candidates, writing_model
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError
from langchain_dpicl.free_form.answers import PublicModel
from langchain_dpicl.options import Decoding, Evolution, GenerationTask, LocalExecutor, Noise
from langchain_dpicl.options.base import LLM, EmbeddingsLike, Where, option_of, refuse_unused
from langchain_dpicl.options.rows import noise_with
from langchain_dpicl.privacy._validate import fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.mechanisms.noise import Release
from langchain_dpicl.privacy.mechanisms.randomness import SYSTEM_RANDOM
from langchain_dpicl.release.curator import release_once
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.release.sample import Record
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.journal import RunJournal, check_paid
from langchain_dpicl.runs.release_run import ReleaseRun, RunCall
from langchain_dpicl.tasks.writing import DEFAULT_STOP


@dataclass(frozen=True, slots=True)
class SurvivalRule:
    """Which candidates survive a round; post-processing of the noisy votes, and free.

    Attributes:
      count: maximum number of survivors.
      least: minimum number of survivors: the best ones, whatever the threshold.
      selection: "rank" (the most votes) or "sample" (drawn without repetition, in proportion to their votes).
      threshold: minimum noisy votes of a survivor; None: no minimum.
    """

    count: int
    least: int
    selection: Literal["rank", "sample"] = "rank"
    threshold: float | None = None

    def of(self, votes: NDArray[np.float64]) -> list[int]:
        """Returns the indices of the survivors, most noisy votes first.

        >>> (
        ...     SurvivalRule(count=2, least=1).of(np.array([0.5, 3.0, 2.0])),
        ...     SurvivalRule(2, 1, threshold=2.5).of(np.array([0.5, 3.0])),
        ... )
        ([1, 2], [1])
        """
        ranked: list[int] = np.argsort(-votes, kind="stable").tolist()
        bar = -np.inf if self.threshold is None else self.threshold
        may = [place for place in ranked if votes[place] >= bar]
        if self.selection == "sample":
            may = self._drawn(votes, may)
        chosen = may[: self.count]
        chosen += [place for place in ranked[: self.least] if place not in chosen][: max(0, self.least - len(chosen))]
        return sorted(chosen, key=ranked.index)

    def _drawn(self, votes: NDArray[np.float64], may: list[int]) -> list[int]:
        """Returns indices in the order of a weighted draw without replacement (Gumbel top-k)."""
        weights = votes[may] if may else np.zeros(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            scores = np.where(weights > 0, np.log(weights), -np.inf) + SYSTEM_RANDOM.gumbel(len(may))
        return [may[place] for place in np.argsort(-scores, kind="stable") if np.isfinite(scores[place])]


@dataclass(slots=True, repr=False)
class Population:
    """The candidates of one label and its remaining tickets.

    Attributes:
      label: the declared label, or None.
      owed: rounds not yet reserved.
      reservation: the reserved rounds.
      texts: candidates of the next round; empty: not yet generated.
      survivors: of the last round, best first.
      votes: noisy votes of the survivors.
      history: noisy votes by candidate, of every released round.
      done: whether no round remains.
      busy: whether a run is working on it.
    """

    label: str | None
    owed: int
    reservation: Reservation | None = None
    texts: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()
    votes: tuple[float, ...] = ()
    history: list[dict[str, float]] = field(default_factory=list)
    done: bool = False
    busy: bool = field(default=False)

    @property
    def rounds(self) -> int:
        """Number of released histograms."""
        return len(self.history)

    @property
    def left(self) -> int:
        """Rounds that are paid for and not begun."""
        return self.owed + (self.reservation.unburnt if self.reservation is not None else 0)

    def take(self, released: Release, survival: SurvivalRule) -> None:
        """Stores the votes of a round and selects the survivors."""
        if released.values is None or len(released.values) != len(self.texts):
            raise ConfigurationError("round: expected one noisy number for each candidate, found something else.")
        places = survival.of(released.values)
        self.survivors = tuple(self.texts[place] for place in places)
        self.votes = tuple(float(released.values[place]) for place in places)
        self.history.append(dict(zip(self.texts, released.values.tolist(), strict=True)))
        self.texts = ()


def _round(each: Any) -> dict[str, float]:
    """Returns the finite votes by candidate; empty for anything else."""
    votes = each if isinstance(each, Mapping) else {}
    finite = {text: vote for text, vote in votes.items() if _number(vote) is not None}
    return {text: float(vote) for text, vote in finite.items()} if len(finite) == len(votes) else {}


def _number(value: Any) -> float | None:
    """Returns a finite number; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # such as an integer of 400 digits
        return None
    return number if math.isfinite(number) else None


@tells_how_to_build()
class PrivateEvolution(ReleaseRun[dict[str, str], ReleasedDemonstrations]):
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
      >>> from langchain_dpicl.options import Evolution
      >>> private = PrivateExamples(["my card was declined"] * 300, public_size=300)
      >>> evolution = PrivateEvolution.from_private_examples(
      ...     private,
      ...     llm=EmbeddedLLM(),
      ...     budget=Budget(epsilon=2.0, delta=1e-5),
      ...     epsilon=2.0,
      ...     shots_per_label=1,
      ...     evolution=Evolution(
      ...         rounds=1, num_variations=0, candidates=("a card payment was declined", "a boat on the sea")
      ...     ),
      ... )
      >>> evolution.run(progress=False).examples
      ({'text': 'a card payment was declined'},)
    """

    _unit = "round"
    _title = "private evolution"
    plan: EvolutionPlan

    def __init__(
        self,
        private: PrivateExamples,
        writer: EvolutionWriter,
        nearest: NearestRows,
        *,
        plan: EvolutionPlan,
        survival: SurvivalRule,
        **run: Any,
    ) -> None:
        populations = [Population(label, owed=plan.rounds) for label in plan.labels]
        super().__init__(private, populations, plan=plan, **run)
        self._writer = writer
        self._nearest = nearest
        self.survival = survival
        self._resume()
        if self._journal is not None:
            for population in populations:
                # The ledger may have charged more rounds than the file holds; the smaller number is safe.
                remaining = self.share.remaining(ROUND_TEMPLATE, label=population.label)
                check_paid(population.rounds, used=plan.rounds - remaining, what="rounds")
                population.owed = min(population.owed, remaining)
                population.done = not population.owed and population.rounds > 0

    @classmethod
    @door("PrivateEvolution")
    def from_private_examples(
        cls,
        private: PrivateExamples,
        *,
        llm: LLM,
        embeddings: EmbeddingsLike | None = None,
        budget: BudgetLike | None = None,
        epsilon: float | None = None,
        instruction: str | None = None,
        task: GenerationTask | None = None,
        shots_per_label: int = 4,
        max_tokens: int = 60,
        evolution: Evolution | None = None,
        noise: Noise | None = None,
        decoding: Decoding | None = None,
        component: str | None = None,
        checkpoint: Where | None = None,
        executor: ExecutorLike = None,
    ) -> Self:
        """Plans the noise, declares the share and returns an evolution; nothing is spent yet.

        Args:
          private: the examples; bound to the budget's ledger here.
          llm: writes the candidates: a LangChain chat or completion model (or Runnable from a prompt to text), called
            with its own settings and callbacks, or an engine. It sees public and released texts only.
          embeddings: LangChain embeddings; they SEE the private texts. None: `LocalEmbeddings`, without network.
          budget: a PrivacyBudgetCallbackHandler or Budget, or a RunnableConfig whose callbacks hold one, with which the
            model is then called; None: looked up in the context.
          epsilon: this component's share of the budget (its noise is calibrated to it).
          instruction: public task description, the first paragraph of the prompts for first candidates.
          task: a `GenerationTask`: the prompts for records and variations, and hints; see there.
          shots_per_label: demonstrations per label: those with the most votes in the last round.
          max_tokens: maximum number of tokens of a text from an engine; a LangChain model has its own limit.
          evolution: an `Evolution`: rounds, candidates and how they survive; see there.
          noise: a `Noise` ("gaussian"): its multiplier and delta; see there.
          decoding: a `Decoding`, of which `stop` is used: strings that end a text; None: a line break.
          component: name in the ledger; the same name and plan reopen the same share with its remaining tickets.
          checkpoint: file that stores every released histogram before its ticket is committed. If it exists, the run
            continues from it, also in another process, with the same durable ledger.
          executor: a `RayExecutor`, or "ray": workers write the candidates, which is public work. Votes, noise and
            ledger stay in this process. None or a `LocalExecutor`: this process writes the candidates.

        Raises:
          ConfigurationError: a public argument is invalid; nothing was charged and no private call was made.
          CapabilityError: `llm` cannot write text, or `embeddings` are not embeddings.
          UnsilencableModelError: the embeddings cannot be called without logging or tracing.
          PrivacyBudgetError: no budget, a different budget, or too small a budget.
          ModelCallError: the embeddings could not be reached.

        Source: Lin et al. (2024), Differentially Private Synthetic Data via Foundation Model APIs 1: Images; Xie et al.
          (2024), the same 2: Text.
        """
        spender = resolve_budget(budget)
        labels: tuple[str | None, ...] = private.labels or (None,)
        wording = EvolutionTemplate.of(
            GenerationTask.of(task, instruction),
            text_key=private.text_key,
            label_key=private.label_key,
            fields=private.fields,
        )
        search, loud = option_of("evolution", evolution, Evolution), noise_with(noise, "gaussian")
        text = option_of("decoding", decoding, Decoding)
        refuse_unused(text, {"stop"}, "PrivateEvolution")
        given = first_candidates(search.candidates, labels)
        plan = plan_evolution(
            {label: private.public_size_of(label) for label in labels},
            epsilon=epsilon,
            delta=share_of_delta(spender, epsilon=epsilon, delta=loud.delta),
            adjacency=spender.adjacency,
            noise_multiplier=loud.multiplier,
            rounds=search.rounds,
            shots_per_label=shots_per_label,
            num_candidates=_most(given, search.num_candidates) if given else search.num_candidates,
            num_survivors=search.num_survivors,
            num_variations=search.num_variations,
            partition=private.dataset_id,
        )
        survival = SurvivalRule(search.num_survivors, shots_per_label, search.selection, search.threshold)
        model = writing_model(
            as_model(llm), executor, max_tokens=max_tokens, stop=DEFAULT_STOP if text.stop is None else text.stop
        )
        nearest = NearestRows(as_embeddings(embeddings), neighbours=search.neighbours)
        public = {**plan.to_dict(), **_report_fields(wording, nearest, survival, model)}
        found = component if component is not None else RunJournal.component_in(checkpoint)
        name = spender.fresh_name("evolution") if found is None else found
        terms = {"component": name, "ledger_id": spender.ledger_id, "dataset_id": private.dataset_id, "plan": public}
        journal = RunJournal.open(checkpoint, **terms)
        share = declare_share(private, spender, plan, component=name, epsilon=epsilon, public=public, engines=[nearest])
        writer = EvolutionWriter(model, wording, given, budget if isinstance(budget, Mapping) else None)
        handles: dict[str, Any] = {"budget": spender, "share": share, "journal": journal}
        handles["executor"] = executor if isinstance(executor, LocalExecutor) else None
        return cls(private, writer, nearest, plan=plan, survival=survival, **handles)

    afrom_private_examples = awaitable(from_private_examples)

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

    def _events(self, config: RunnableConfig | None) -> RunEvents:
        return super()._events(config or self._writer.config)

    def _give_back(self, item: Population, events: RunEvents) -> None:
        if item.reservation is not None and item.reservation.unburnt:
            back = item.reservation.give_back()
            item.owed += back
            events.tickets -= back
        item.reservation = None

    def _make(self, item: Population, call: RunCall) -> EffectGenerator[None]:
        """Runs the remaining rounds of one label (an effect generator)."""
        while item.left:
            yield from self._prepare(item, call.config)
            # Candidates are written and embedded before the ticket is reserved: a public failure costs nothing.
            candidates = yield self._nearest.request_public(item.texts)
            self._reserve(item, call.events)
            yield from self._vote(item, candidates)
            call.tick()
        # Every ticket burnt without a release: there is nothing to return.
        if not item.rounds:
            raise ModelCallError("every round of a label failed after its ticket burnt; declare another component")
        item.done = True
        # The private vectors of a label are not needed for the next one.
        self._nearest.forget()

    def _prepare(self, population: Population, config: RunnableConfig | None) -> EffectGenerator[None]:
        """Generates the candidates of the next round; survivors of the last round are among them."""
        if population.texts:
            return
        if population.survivors:
            count = self.plan.num_variations
            texts = yield from self._writer.vary(population.label, population.survivors, count, config)
        else:
            # A vote among fewer than two candidates would release nothing useful.
            least = max(2, self.plan.shots_per_label)
            texts = yield from self._writer.first(population.label, self.plan.num_candidates, config, least=least)
        population.texts = texts[: self.plan.width]

    def _reserve(self, population: Population, events: RunEvents) -> None:
        """Reserves the label's remaining rounds; with a journal one at a time, to bound the loss of a kill."""
        if population.reservation is None or not population.reservation.unburnt:
            count = population.owed if self._journal is None else 1
            population.reservation = self.share.reserve(ROUND_TEMPLATE, label=population.label, count=count)
            events.tickets += count
            population.owed -= count

    def _vote(self, population: Population, candidates: Candidates) -> EffectGenerator[None]:
        """Releases one noisy histogram and stores the survivors before the ticket is committed (a generator)."""
        ticket = population.reservation
        if ticket is None:
            raise fail("ticket", "a reservation", None)
        yield from release_once(
            self._private,
            ticket,
            plan=self.plan.release,
            rows=lambda units: self._nearest.ask(units, candidates),
            render=_UnitTexts(self._private.text_key),
            width=len(candidates),
            keep=lambda released: self._keep(population, released, ticket),
        )

    def _keep(self, population: Population, released: Release, ticket: Reservation) -> None:
        population.take(released, self.survival)
        self._record(
            {"label": population.label, "survivors": population.survivors, "votes": population.history[-1]}, ticket
        )

    def _restore(self, entry: Mapping[str, Any]) -> None:
        """Restores one round, after checking that a run of this plan can have it."""
        population = next((item for item in self._items if item.label == entry.get("label")), None)
        votes = _round(entry.get("votes"))
        survivors: Any = entry.get("survivors")
        if population is None or not population.owed or not 0 < len(votes) <= self.plan.width:
            advice = "Take another file."
            raise fail("checkpoint", "rounds of this run, with finite votes for its candidates", "others", advice)
        of_round = isinstance(survivors, list) and all(isinstance(text, str) and text in votes for text in survivors)
        if not of_round or not 0 < len(set(survivors)) == len(survivors) <= self.survival.count:
            raise fail("checkpoint", f"at most {self.survival.count} survivors of their round", "others")
        population.survivors, population.votes = tuple(survivors), tuple(votes[text] for text in survivors)
        population.history.append(votes)
        population.owed -= 1

    def _rest(self) -> None:
        self._writer.model.rest()

    def _so_far(self) -> str:
        rounds = sum(population.rounds for population in self._items)
        return f"{rounds} of {self.plan.rounds * len(self.plan.labels)} rounds are"

    def _steps_left(self) -> int:
        return sum(item.left for item in self._open_items())

    def _examples(self, item: Population) -> list[dict[str, str]]:
        best = item.survivors[: self.plan.shots_per_label]
        return [self._writer.wording.example(item.label, text) for text in best]

    def _value(self) -> ReleasedDemonstrations:
        added = _report_fields(self._writer.wording, self._nearest, self.survival, self._writer.model)
        return ReleasedDemonstrations(tuple(self.demonstrations), self.report, {**self.plan.to_dict(), **added})

    def __repr__(self) -> str:
        return f"PrivateEvolution(component={self.share.component!r}, plan={self.plan!r})"


@dataclasses.dataclass(frozen=True, slots=True)
class _UnitTexts:
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


def _report_fields(
    wording: EvolutionTemplate, nearest: NearestRows, survival: SurvivalRule, model: PublicModel
) -> dict[str, Any]:
    """Returns the fields of reports beside the plan's."""
    return {
        **wording.to_dict(),
        "model": model.name,
        "embeddings": nearest.embeddings.name,
        "neighbours": nearest.neighbours,
        "selection": survival.selection,
        "threshold": survival.threshold,
    }
