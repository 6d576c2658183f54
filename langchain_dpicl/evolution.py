"""PrivateEvolution: plans and evolves texts by private nearest-neighbour votes (Lin et al. 2024; Xie et al. 2024)."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs
from numpy.typing import NDArray

from langchain_dpicl._calls import warn_caller
from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl._templates import Template
from langchain_dpicl.backends import PrivateProcess
from langchain_dpicl.backends.private_process.engines import ProcessEngine
from langchain_dpicl.backends.resolve import as_embeddings, as_model
from langchain_dpicl.backends.rows.neighbour_rows import Candidates, NearestRows, Texts
from langchain_dpicl.backends.sync_async import Effect, EffectGenerator, awaitable
from langchain_dpicl.budget.handler import BudgetLike, RunEvents, resolve_budget
from langchain_dpicl.distributed import Executor, ExecutorLike, JobResult, Workplace, as_executor, iterate_in_threads
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, NoisyPlanWarning
from langchain_dpicl.free_form import NO_STREAM, PublicModel, PublicRequest, distinct_texts
from langchain_dpicl.options import (
    LLM,
    Decoding,
    EmbeddingsLike,
    Evolution,
    GenerationTask,
    LocalExecutor,
    Noise,
    Where,
    noise_with,
    option_of,
    refuse_unused,
)
from langchain_dpicl.planning.expected_utility import noise_scale
from langchain_dpicl.planning.share_plan import Cost, SharePlan, num_branches, terms_shown, with_noise_for
from langchain_dpicl.privacy._validate import (
    Adjacency,
    check_adjacency,
    check_int,
    check_name,
    check_positive_delta,
    fail,
    is_finite,
)
from langchain_dpicl.privacy.extensions.normalized_sums import VoteVectorSum
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.bounded import MAX_WIDTH
from langchain_dpicl.privacy.mechanisms.release_plan import GaussianMechanism, PoissonUnits, Release, ReleasePlan
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release.curator import Record, release_once
from langchain_dpicl.release.declare_share import declare_share, share_of_delta
from langchain_dpicl.released.demonstrations import ReleasedDemonstrations
from langchain_dpicl.runs.door import door
from langchain_dpicl.runs.release_run import ReleaseRun, RunCall, RunJournal, check_paid, report_of
from langchain_dpicl.tasks import DEFAULT_STOP, GenerationTemplate, check_texts, generation_wording

MECHANISM = "private_evolution"
"""Name of private evolution among the generation mechanisms."""
logger = logging.getLogger(__name__)

ROUND_TEMPLATE = "round: one noisy histogram of votes"
"""The ticket template of one round."""


@dataclass(frozen=True, slots=True)
class EvolutionPlan(SharePlan):
    """The public plan of one private evolution: the release, its tickets and its cost.

    Attributes:
      release: plan of one histogram of votes; the same for every label.
      public_sizes: (label, declared units) pairs; one pair with label None without declared labels.
      rounds: histograms per label.
      shots_per_label: demonstrations per label.
      num_candidates: maximum number of candidates of the first round.
      num_survivors: candidates that survive a round.
      num_variations: variations of each survivor.
    """

    method: ClassVar[str] = "evolution"

    release: ReleasePlan
    public_sizes: tuple[tuple[str | None, int], ...]
    rounds: int
    shots_per_label: int
    num_candidates: int
    num_survivors: int
    num_variations: int

    @property
    def labels(self) -> tuple[str | None, ...]:
        """The declared labels, or (None,)."""
        return tuple(label for label, _ in self.public_sizes)

    @property
    def width(self) -> int:
        """Maximum number of candidates of a round."""
        return max(self.num_candidates, self.num_survivors * (1 + self.num_variations))

    @property
    def sizes(self) -> Mapping[str | None, int]:
        """Declared units by label."""
        return dict(self.public_sizes)

    @property
    def implementation_delta(self) -> float:
        """Declared gap between ideal and drawn noise, over the releases that one unit takes part in."""
        branches = num_branches(len(self.labels), self.release.adjacency)
        return branches * self.release.implementation_delta(self.rounds, width=self.width)

    def tickets(self) -> tuple[Ticket, ...]:
        """Returns the tickets of the share: one per round and label."""
        event = self.release.block_event(1)
        return tuple(
            Ticket(template=ROUND_TEMPLATE, event=event, label=label, max_count=self.rounds, refundable=True)
            for label in self.labels
        )

    def cost(self, *, record_tokens: int = 60, instruction_tokens: int = 30, writes_first: bool = True) -> Cost:
        """Returns the model calls from public caps; none is private. Given first candidates are not written."""
        check_int("record_tokens", record_tokens, low=1)
        check_int("instruction_tokens", instruction_tokens, low=0)
        first = len(self.labels) * self.num_candidates if writes_first else 0
        varied = len(self.labels) * (self.rounds - 1) * self.num_survivors * self.num_variations
        tokens_in = first * instruction_tokens + varied * (instruction_tokens + record_tokens)
        return Cost(0, first + varied, tokens_in, (first + varied) * record_tokens)

    @property
    def embedded(self) -> dict[str, int]:
        """Texts passed to the embeddings: each record once, and the maximum number of candidates."""
        # Survivors are embedded again in every round.
        later = (self.rounds - 1) * self.num_survivors * (1 + self.num_variations)
        return {
            "private": sum(size for _, size in self.public_sizes),
            "public": len(self.labels) * (self.num_candidates + later),
        }

    def expected(self) -> dict[str, float]:
        """Returns how the votes of the smallest declared label compare with the noise on each candidate.

        `share_to_be_seen` is the share of the label's units that must be nearest to one candidate for its votes to
        reach three standard deviations of the noise; above 1 they cannot.
        """
        smallest = min(size for _, size in self.public_sizes)
        scale = noise_scale(self.release)
        return {
            "units": float(smallest),
            "votes_per_candidate": smallest / self.width,
            "noise_scale": scale,
            "share_to_be_seen": 3.0 * scale / smallest,
        }

    def _numbers(self) -> dict[str, Any]:
        return {
            "mechanism": MECHANISM,
            "noise_scale": noise_scale(self.release),
            "rounds": self.rounds,
            "shots_per_label": self.shots_per_label,
            "num_candidates": self.num_candidates,
            "num_survivors": self.num_survivors,
            "num_variations": self.num_variations,
            "candidates": self.width,
            "labels": [
                {"label": label, "public_size": size, "sampling_rate": 1.0} for label, size in self.public_sizes
            ],
        }

    @classmethod
    def rebuild(cls, shown: Mapping[str, Any]) -> EvolutionPlan:
        """Returns the plan of the parameters shown, see `SharePlan.rebuild`."""
        names = ("rounds", "shots_per_label", "num_candidates", "num_survivors", "num_variations")
        sizes = {branch["label"]: branch["public_size"] for branch in shown["labels"]}
        return plan_evolution(sizes, **terms_shown(shown, *names))


def plan_evolution(
    public_sizes: Mapping[str | None, int],
    *,
    epsilon: float | None,
    delta: float,
    adjacency: Adjacency = "add_remove",
    noise_multiplier: float | None = None,
    rounds: int = 5,
    shots_per_label: int = 4,
    num_candidates: int | None = None,
    num_survivors: int = 10,
    num_variations: int = 3,
    partition: str = "private-examples",
) -> EvolutionPlan:
    """Calibrates the noise of all rounds to `epsilon`, or prices a given noise.

    Args:
      public_sizes: declared number of units per label ({None: n} where labels do not split).
      epsilon: target; the plan's epsilon is an upper bound at most this. None needs `noise_multiplier`.
      delta: the share's delta.
      adjacency: neighbouring relation.
      noise_multiplier: given noise; None calibrates.
      rounds: histograms of votes, per label.
      shots_per_label: demonstrations per label, taken from the last round's survivors.
      num_candidates: maximum number of candidates of the first round; None: that of later rounds.
      num_survivors: candidates that survive a round.
      num_variations: variations of each survivor; 0 only with one round, which then chooses among given candidates.
      partition: the data set's public id.

    Raises:
      ConfigurationError: a public parameter is out of range.

    >>> plan = plan_evolution({None: 12_000}, epsilon=1.0, delta=1e-6, rounds=10)
    >>> round(plan.noise_multiplier, 1), plan.cost().public_calls
    (13.4, 310)
    """
    check_adjacency(adjacency)
    check_positive_delta(delta)
    check_name("partition", partition)
    for name, value in (("rounds", rounds), ("shots_per_label", shots_per_label), ("num_survivors", num_survivors)):
        check_int(name, value, low=1)
    check_int("num_variations", num_variations, low=0 if rounds == 1 else 1)
    later = max(2, num_survivors * (1 + num_variations))
    usual = check_int("num_survivors * (1 + num_variations)", later, low=2, high=MAX_WIDTH)
    first = check_int("num_candidates", usual if num_candidates is None else num_candidates, low=2, high=MAX_WIDTH)
    if shots_per_label > num_survivors:
        advice = "Demonstrations are taken from the survivors of the last round."
        raise fail("shots_per_label", f"at most num_survivors={num_survivors}", shots_per_label, advice)
    for label, size in public_sizes.items():
        check_int("public_size" if label is None else f"public_size of {label!r}", size, low=1)
    release = ReleasePlan(
        sampler=PoissonUnits(sampling_rate=1.0),  # all units vote in every round: no amplification
        aggregation=VoteVectorSum(),
        mechanism=GaussianMechanism(1.0),
        adjacency=adjacency,
    )
    draft = EvolutionPlan(
        release=release,
        public_sizes=tuple(public_sizes.items()),
        rounds=rounds,
        shots_per_label=shots_per_label,
        num_candidates=first,
        num_survivors=num_survivors,
        num_variations=num_variations,
        partition=partition,
        epsilon=0.0,
        delta=delta,
    )
    return with_noise_for(draft, epsilon=epsilon, noise_multiplier=noise_multiplier)


_KNOWN = "public texts that the embeddings tell something about"
_TOO_FEW = (
    "Give the model a temperature above 0 and no response cache, or hints= for it to write differently each time, or "
    "public candidates= of your own, or other embeddings=. No ticket was taken for it."
)


@dataclass(frozen=True, slots=True)
class EvolutionTemplate:
    """The prompts for candidates and variations.

    Attributes:
      first: instruction and stub of a first candidate.
      variation: template of the prompt for a variation, with the text's field and, where there are labels, the label's.
      hints: public sentences, appended in turn to the instruction of each prompt.
    """

    first: GenerationTemplate
    variation: Template
    hints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names, known = set(self.variation.names), self.first.generated_fields
        if self.first.text_key not in names or not names <= known:
            expected = f"a template with {{{self.first.text_key}}}, and fields among {sorted(known)}"
            raise fail("variation_prompt", expected, self.variation.text)

    @classmethod
    def of(
        cls, task: GenerationTask, *, text_key: str, label_key: str | None, fields: Sequence[str]
    ) -> EvolutionTemplate:
        """Builds the templates, with defaults for those not given."""
        refuse_unused(task, {"instruction", "record_prompt", "variation_prompt", "hints"}, "PrivateEvolution")
        still = "" if label_key is None else f" It still has to fit its {label_key}."
        stub = GenerationTemplate.default_template(text_key, label_key)
        request = f"Rewrite the following {text_key}: say something similar in other words.{still} Write nothing else."
        varied = task.variation_prompt
        if varied is None:
            varied = f"{request}\n\n{stub}\n\nAnother {text_key}:"
        return cls(
            first=generation_wording(text_key, label_key, fields, task.instruction, task.record_prompt),
            variation=Template.of("variation_prompt", varied),
            hints=check_texts("hints", task.hints, least=0),
        )

    def first_prompts(self, label: str | None, count: int) -> list[str]:
        """Returns `count` prompts for first candidates of a label."""
        prompt = self.first.renderer(self.first.text_key, self._known(label))(())
        return [self._add_hint(prompt, hint) for hint in self._turns(count)]

    def variation_prompts(self, label: str | None, texts: Iterable[str], count: int) -> list[str]:
        """Returns the prompts for `count` variations of each text."""
        values = [{**self._known(label), self.first.text_key: text} for text in texts]
        prompts = [self.variation.fill(known) for known in values for _ in range(count)]
        turns = self._turns(len(prompts))
        return [self._add_hint(prompt, hint) for prompt, hint in zip(prompts, turns, strict=True)]

    def example(self, label: str | None, text: str) -> dict[str, str]:
        """Returns a text as a demonstration."""
        known = {**self._known(label), self.first.text_key: text}
        return {name: known[name] for name in sorted(known)}

    def to_dict(self) -> dict[str, Any]:
        """Returns the public wording as JSON values."""
        return {
            "instruction": self.first.instruction,
            "generation_prompt": self.first.template,
            "variation_prompt": self.variation.text,
            "hints": list(self.hints),
            "text_key": self.first.text_key,
            "label_key": self.first.label_key,
        }

    def _known(self, label: str | None) -> dict[str, str]:
        return {} if label is None or self.first.label_key is None else {self.first.label_key: label}

    def _turns(self, count: int) -> list[str]:
        return list(itertools.islice(itertools.cycle(self.hints), count)) if self.hints else [""] * count

    @staticmethod
    def _add_hint(prompt: str, hint: str) -> str:
        """Appends a hint to the first paragraph, which is the instruction."""
        # The instruction is the first paragraph of every prompt; see `GenerationTemplate`.
        instruction, gap, rest = prompt.partition("\n\n")
        return f"{instruction} {hint}{gap}{rest}" if hint else prompt


@dataclass(frozen=True, slots=True, repr=False)
class EvolutionWriter:
    """Calls the model with the config of a call, or else of the run; all prompts are public."""

    model: PublicModel
    wording: EvolutionTemplate
    given: Mapping[str | None, tuple[str, ...]] = field(default_factory=dict)
    config: RunnableConfig | None = None

    def first(
        self, label: str | None, count: int, config: RunnableConfig | None, *, least: int
    ) -> EffectGenerator[tuple[str, ...]]:
        """Returns distinct first candidates (an effect generator); `config` is the caller's."""
        texts = self.given.get(label)
        if texts is None:
            texts = yield self.model.request_each(self.wording.first_prompts(label, count), self._config(config))
        if len(texts) < least:
            raise fail("candidates", f"at least {least} distinct {_KNOWN}", len(texts), _TOO_FEW)
        return texts

    def vary(
        self, label: str | None, texts: Sequence[str], count: int, config: RunnableConfig | None
    ) -> EffectGenerator[tuple[str, ...]]:
        """Returns the survivors and then their variations, without duplicates (an effect generator)."""
        if not count:
            return tuple(texts)
        prompts = self.wording.variation_prompts(label, texts, count)
        variations = yield self.model.request_each(prompts, self._config(config))
        if not variations:
            raise ModelCallError(
                f"{self.model.name} wrote no variation with text before the first stop string. Check the model, or "
                "give Decoding(stop=...) if its texts begin with one. No ticket was taken for it"
            )
        return distinct_texts([*texts, *variations])

    def _config(self, given: RunnableConfig | None) -> RunnableConfig:
        return merge_configs(given or self.config or {}, {"tags": [NO_STREAM]})


def first_candidates(
    candidates: Mapping[str, tuple[str, ...]] | tuple[str, ...] | None, labels: Sequence[str | None]
) -> dict[str | None, tuple[str, ...]]:
    """Returns public first candidates by label; a single list is used for every label."""
    if candidates is None:
        return {}
    if not isinstance(candidates, Mapping):
        return dict.fromkeys(labels, distinct_texts(candidates))
    if set(candidates) != set(labels):
        raise ConfigurationError("candidates: expected a list of public texts, or one for each declared label.")
    return {label: distinct_texts(texts) for label, texts in candidates.items()}


PROMPTS_PER_JOB = 8
"""Prompts of one job."""

PromptsJob: TypeAlias = tuple[int, tuple[str, ...]]
"""Index of the job, and its prompts."""


@dataclass(frozen=True, slots=True)
class PublicTextJob:
    """The job description for workers that answer public prompts."""

    name: str
    max_tokens: int
    stop: tuple[str, ...]

    @property
    def key(self) -> str:
        """Public name, from all fields."""
        return f"texts/{self.name}/{self.max_tokens}/{self.stop!r}"

    def begin(self, place: Workplace) -> Callable[[PromptsJob], JobResult]:
        """Returns the function that answers the prompts of one job."""
        model = PublicModel(place.llm, max_tokens=self.max_tokens, stop=self.stop)
        if model.name != self.name:
            raise fail("workplace", f"the model of the driver, {self.name}", model.name)

        def write(job: PromptsJob) -> JobResult:
            return JobResult("done", list(model.request_each(job[1], {}).run()))

        return write


class WorkerModel(PublicModel):
    """A model whose public prompts are answered by workers; the driver's callbacks are not called."""

    def __init__(
        self, llm: Any, executor: Executor, *, max_tokens: int, stop: Sequence[str], is_ours: bool = False
    ) -> None:
        super().__init__(llm, max_tokens=max_tokens, stop=stop)
        self._executor = executor
        self._work = PublicTextJob(self.name, max_tokens, tuple(stop))
        self._is_ours = is_ours
        self._found: dict[PromptsJob, list[str]] = {}

    def rest(self) -> None:
        """Stops the workers, if this run started them."""
        if self._is_ours:
            self._executor.rest()

    def request_each(self, prompts: Sequence[str | PromptValue], config: RunnableConfig) -> Effect:  # noqa: ARG002
        """Returns the request to answer each of these public prompts once; see `PublicModel`."""
        texts = [text if isinstance(text, str) else text.to_string() for text in prompts]
        parts = [tuple(texts[at : at + PROMPTS_PER_JOB]) for at in range(0, len(texts), PROMPTS_PER_JOB)]

        jobs = list(enumerate(parts))

        def ask() -> tuple[str, ...]:
            for _ in self._answered(jobs):
                pass
            return self._told(jobs)

        async def aask() -> tuple[str, ...]:
            async with aclosing(iterate_in_threads(self._answered(jobs))) as answered:
                async for _ in answered:
                    pass
            return self._told(jobs)

        return PublicRequest(self.name, ask, aask)

    def _answered(self, jobs: list[PromptsJob]) -> Generator[PromptsJob | None]:
        """Sends the unanswered prompts to workers; keeps the answers when other jobs fail."""
        self._found = {job: texts for job, texts in self._found.items() if job in jobs}
        # The first fault is raised at the end, so that other jobs' answers are kept for the next attempt.
        fault: ModelCallError | None = None
        for one in self._executor.spread(self._work, [job for job in jobs if job not in self._found]):
            if one is None:
                yield None
                continue
            job, answer = one
            if answer.kind == "done":
                self._found[job] = list(answer.result)
                yield job
            elif fault is None:
                error = answer.as_error()
                fault = error if isinstance(error, ModelCallError) else ModelCallError(str(error))
        if fault is not None:
            raise fault

    def _told(self, jobs: list[PromptsJob]) -> tuple[str, ...]:
        """Returns and forgets the answers, so that the same prompts are answered anew next time."""
        answers, self._found = self._found, {}
        return distinct_texts(text for job in jobs for text in answers[job])


def writing_model(llm: Any, executor: Any, *, max_tokens: int, stop: Sequence[str]) -> PublicModel:
    """Returns the model that writes public texts: on workers, if there is an executor.

    Raises:
      ConfigurationError: it is a private process, whose calls do not vary.
    """
    if isinstance(llm, PrivateProcess | ProcessEngine):
        advice = "It sees public text alone and needs no process of its own."
        raise fail("llm", "the model itself", type(llm).__name__, advice)
    workers = as_executor(executor)
    if not isinstance(workers, Executor):
        return PublicModel(llm, max_tokens=max_tokens, stop=stop)
    return WorkerModel(llm, workers, max_tokens=max_tokens, stop=stop, is_ours=executor == "ray")


@dataclass(frozen=True, slots=True)
class SurvivalRule:
    """Which candidates survive a round; post-processing of the noisy votes, and free.

    Attributes:
      count: maximum number of survivors.
      least: minimum number of survivors: the best ones, whatever the threshold.
      threshold: minimum noisy votes of a survivor; None: no minimum.
    """

    count: int
    least: int
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
        may = len(votes) if self.threshold is None else int((votes >= self.threshold).sum())
        return ranked[: max(self.least, min(self.count, may))]


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
    are_votes = isinstance(each, Mapping) and all(map(is_finite, each.values()))
    return {text: float(vote) for text, vote in each.items()} if are_votes else {}


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
        self._has_told = False
        self._resume()
        has_paid = bool(self._journal and self._journal.entries)
        is_spent = not has_paid and all(map(self._has_no_ticket, populations))
        for population in populations:
            remaining = self.share.remaining(ROUND_TEMPLATE, label=population.label)
            if is_spent or (self._journal is None and not remaining):
                continue  # the ledger refuses its rounds and says why
            check_paid(population.rounds, used=plan.rounds - remaining, what="rounds")
            # The ledger may have charged more rounds than are here; the smaller number is safe.
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
            with its own settings and callbacks, or an engine, whose texts of one prompt differ only with `hints`. It
            sees public and released texts only.
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
            num_candidates=most_candidates(given, search.num_candidates),
            num_survivors=search.num_survivors,
            num_variations=search.num_variations,
            partition=private.dataset_id,
        )
        check_enough(plan, given)
        _warn_of_noise(plan)
        survival = SurvivalRule(search.num_survivors, shots_per_label, search.threshold)
        model = writing_model(
            as_model(llm), executor, max_tokens=max_tokens, stop=DEFAULT_STOP if text.stop is None else text.stop
        )
        nearest = NearestRows(as_embeddings(embeddings), neighbours=search.neighbours)
        if given:
            _check_given(nearest, given)
        public = {**plan.to_dict(), **_report_fields(wording, nearest, survival, model)}
        name, journal = RunJournal.of(checkpoint, component, "evolution", budget=spender, private=private, plan=public)
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

    @property
    def report(self) -> dict[str, Any]:
        """The privacy report (public), with the number of rounds of all labels: made, and planned; reads the ledger."""
        shown = {"step": self._num_rounds, "steps": self._num_planned}
        return report_of(self._budget, self.share, self.plan, **shown)

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _num_rounds(self) -> int:
        return sum(population.rounds for population in self._items)

    @property
    def _num_planned(self) -> int:
        return self.plan.rounds * len(self.plan.labels)

    def _events(self, config: RunnableConfig | None) -> RunEvents:
        return super()._events(config or self._writer.config)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a demonstration, that of the text first."""
        text_key, label_key = self._private.text_key, self._private.label_key
        return (text_key,) if label_key is None else (text_key, label_key)

    def _open_items(self) -> Iterator[Population]:
        """Yields the labels in their order; last those without a ticket, which end a run."""
        return iter(sorted(super()._open_items(), key=self._has_no_ticket))

    def _has_no_ticket(self, item: Population) -> bool:
        return not self.share.remaining(ROUND_TEMPLATE, label=item.label)

    def _give_back(self, item: Population, events: RunEvents) -> None:
        if item.reservation is not None and item.reservation.unburnt:
            back = item.reservation.give_back()
            item.owed += back
            events.tickets -= back
        item.reservation = None

    def _make(self, item: Population, call: RunCall) -> EffectGenerator[None]:
        """Runs the remaining rounds of one label (an effect generator)."""
        if item.owed and self._has_no_ticket(item):
            self._reserve(item, call.events)  # refused, before a model is asked
        while item.left:
            yield from self._prepare(item, call.config)
            # Candidates are written and embedded before the ticket is reserved: a public failure costs nothing.
            candidates = yield from self._embed(item)
            self._reserve(item, call.events)
            yield from self._vote(item, candidates)
            call.tick()
        # Every ticket burnt without a release: there is nothing to return.
        if not item.rounds:
            said = "each round of a label failed after its ticket burnt, or its ticket was used by another run"
            raise ModelCallError(f"{said}; declare another component")
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
            count = self.plan.num_candidates
            texts = yield from self._writer.first(population.label, count, config, least=_least_candidates(self.plan))
        population.texts = texts[: self.plan.width]

    def _embed(self, population: Population) -> EffectGenerator[Candidates]:
        """Embeds the candidates and drops those without a direction (an effect generator)."""
        embedded: Candidates = yield self._nearest.request_public(population.texts)
        candidates = embedded.with_direction()
        survivors, least = population.survivors, 1 if population.survivors else _least_candidates(self.plan)
        # Variations that repeat survivors are voted for; where all others were dropped, survivors alone would be.
        if survivors and len(embedded) > len(survivors) and set(candidates.texts) <= set(survivors):
            population.texts = ()
            raise ModelCallError(
                f"{self._writer.model.name} wrote no new text that the embeddings tell something about. Check the "
                "model, or give other embeddings=. No ticket was taken for it"
            )
        population.texts = candidates.texts if len(candidates) >= least else ()
        if not population.texts:
            raise fail("candidates", f"at least {least} distinct {_KNOWN}", len(candidates), _TOO_FEW)
        return candidates

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
        with self._committing(ticket, lambda: population.rounds):
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

    @property
    def _is_slow(self) -> bool:
        return super()._is_slow or isinstance(self._writer.model, WorkerModel)  # their end takes seconds

    def _rest(self) -> None:
        self._writer.model.rest()

    def _so_far(self) -> str:
        return f"{self._num_rounds} of {self._num_planned} rounds are"

    def _check_end(self) -> None:
        """Says once what a finished run lacks: rounds, and votes that stand out of their noise."""
        if not self.is_finished or self._has_told:
            return
        self._has_told = True  # logged: a warning that is made an error would lose what is paid for
        if missing := self._num_planned - self._num_rounds:
            said = "%s: %d of %d rounds are left out: their tickets were lost, or used by another run."
            logger.warning(said, self.component, missing, self._num_planned)
        if unseen := [item.label for item in self._items if item.votes and not self._stands_out(item)]:
            whose = "" if unseen == [None] else f" of {', '.join(map(repr, unseen))}"
            advice = "Use more records, a larger epsilon, or embeddings that know the language of the records."
            logger.warning(
                "%s: in the last round no candidate%s stood out of the noise. %s", self.component, whose, advice
            )

    def _stands_out(self, item: Population) -> bool:
        """Whether its best votes are above what the largest of as many noises reaches once in twenty times."""
        reach = NormalDist().inv_cdf(1.0 - 0.05 / len(item.history[-1]))
        return max(item.votes) > reach * noise_scale(self.plan.release)

    def _steps_left(self) -> int:
        return sum(item.left for item in self._open_items())

    def _examples(self, item: Population) -> list[dict[str, str]]:
        best = item.survivors[: self.plan.shots_per_label]
        return [self._writer.wording.example(item.label, text) for text in best]

    def _value(self) -> ReleasedDemonstrations:
        added = _report_fields(self._writer.wording, self._nearest, self.survival, self._writer.model)
        report = self.report
        return ReleasedDemonstrations(tuple(self.demonstrations), report, {**report["plan"], **added})

    def __repr__(self) -> str:
        return f"PrivateEvolution(component={self.share.component!r}, plan={self.plan!r})"


@dataclasses.dataclass(frozen=True, slots=True)
class _UnitTexts:
    """Returns the texts of a unit; picklable, unlike a closure."""

    text_key: str

    def __call__(self, records: Sequence[Record]) -> Texts:
        return tuple([record[self.text_key] for record in records])


def most_candidates(by_label: Mapping[str | None, tuple[str, ...]], declared: int | None) -> int | None:
    """Returns the largest number of given candidates, or the declared one if none are given; refuses more than it."""
    if not by_label:
        return declared
    most = max(map(len, by_label.values()))
    if declared is not None and declared < most:
        raise fail("num_candidates", f"at least the {most} given candidates, or None", declared)
    return most


def check_enough(plan: EvolutionPlan, by_label: Mapping[str | None, tuple[str, ...]]) -> None:
    """Refuses fewer first candidates of a label than its first vote needs, given ones or a cap of written ones."""
    least = _least_candidates(plan)
    if (fewest := min([plan.num_candidates, *map(len, by_label.values())])) < least:
        raise fail("candidates", f"at least {least} distinct public texts of each label, for its first vote", fewest)


def _least_candidates(plan: EvolutionPlan) -> int:
    """Least number of first candidates: a vote among fewer than two would release nothing useful."""
    return max(2, plan.shots_per_label)


def _warn_of_noise(plan: EvolutionPlan) -> None:
    """Warns the program, before it pays, if not even all units of a label give one candidate votes to be seen by."""
    signal = plan.expected()
    if signal["share_to_be_seen"] > 1.0:
        whose = "" if plan.labels == (None,) else " of the smallest label"
        votes, units = math.ceil(3.0 * signal["noise_scale"]), int(signal["units"])
        said = f"three deviations of it are {votes:,} votes, and only {units:,} units{whose} are declared"
        advice = "Raise epsilon, ask for fewer rounds, or use more records."
        warn_caller(NoisyPlanWarning(f"Noise decides which candidates survive: {said}. {advice}"))


def _check_given(nearest: NearestRows, by_label: Mapping[str | None, tuple[str, ...]]) -> None:
    """Refuses given candidates without a direction, whose nearness to a text says nothing."""
    embedded = nearest.request_public(distinct_texts(itertools.chain.from_iterable(by_label.values()))).run()
    unknown = set(embedded.texts) - set(embedded.with_direction().texts)
    if unknown:
        raise fail("candidates", _KNOWN, min(unknown), "Leave it out, or give other embeddings=.")


def _report_fields(
    wording: EvolutionTemplate, nearest: NearestRows, survival: SurvivalRule, model: PublicModel
) -> dict[str, Any]:
    """Returns the fields of reports beside the plan's."""
    return {
        **wording.to_dict(),
        "model": model.name,
        "embeddings": nearest.embeddings.name,
        "neighbours": nearest.neighbours,
        "threshold": survival.threshold,
    }
