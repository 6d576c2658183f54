"""Builds what an audit attacks: plans, components over made-up records, and backends that copy one into its row."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from langchain_dpicl.backends.base import Rows as EngineRows
from langchain_dpicl.backends.base import Token, TokenSession, TrainingExample
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.backends.tuning.tasks import PromptTask
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.discovery import UnitCounter, ValueDiscovery, WordDiscovery
from langchain_dpicl.documents import DocumentsPlan, DocumentSynthesizer
from langchain_dpicl.evaluation.choose import Choosing
from langchain_dpicl.evaluation.evaluate import Evaluation
from langchain_dpicl.evolution import PrivateEvolution
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.free_form import DPFreeFormRunnable
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import (
    ConfidentGNMax,
    Decoding,
    EmbeddingAnswers,
    FewShotTask,
    GenerationTask,
    KeywordAnswers,
    LabelAnswers,
    LogitNoise,
    Noise,
    NoiseName,
    Rows,
    Sampling,
    Serving,
    Training,
    noise_of,
)
from langchain_dpicl.pate.labeler import PromptPATELabeler
from langchain_dpicl.planning.share_plan import SharePlan
from langchain_dpicl.privacy._validate import Adjacency, RowShape, check_delta, check_epsilon, fail
from langchain_dpicl.privacy.extensions.registry import Teachers
from langchain_dpicl.privacy.ledger.shares import Share
from langchain_dpicl.privacy.mechanisms.bounded import ProbabilitySum, VoteSum
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.reports.verify import shown_differences, shown_plan
from langchain_dpicl.retrieval import DPRetrievalVotingRunnable
from langchain_dpicl.soft_prompts.trainer import PromptDPSGD
from langchain_dpicl.voting import DPVotingRunnable

# They replace the model in every audit: no real model distinguishes records better.


MARK = "votes "
"""Stands before what a record says; a line break ends it."""
_RECORD = re.compile(rf"^{MARK}(.+)$", re.MULTILINE)


def records_of_prompt(prompt: str) -> list[str]:
    """Returns what the records of a prompt say, in their order; nothing for the public prompt."""
    return _RECORD.findall(prompt)


class Spied:
    """Counts private prompts, so that an audit sees who was in a sample.

    Attributes:
      present: prompts with records that were asked since somebody last emptied this, by the length of the text so far.
    """

    present: Mapping[int, int] = MappingProxyType({})

    def note(self, prompts: Sequence[str | None], place: int = 0) -> None:
        """Counts the prompts that hold records; `place` is how many tokens of their text there are."""
        self.add(sum(bool(prompt and records_of_prompt(prompt)) for prompt in prompts), place)

    def add(self, count: int, place: int = 0) -> None:
        """Adds so many prompts that hold records."""
        self.present = {**self.present, place: self.present.get(place, 0) + count}


@lru_cache(maxsize=256)
def parse_numbers(record: str) -> tuple[float, ...]:
    """Returns the numbers of a record such as "1,0"."""
    return tuple(float(number) for number in record.split(","))


class ReadVotes(Spied):
    """Scores labels: a record's text lists the probability of each label; all zeros: the row fails.

    A prompt without records votes for the last label.
    """

    name = "reads votes"

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> EngineRows:
        """Returns float64[prompts, choices]: log-probabilities."""
        self.note(prompts)
        records = [records_of_prompt(prompt) for prompt in prompts]
        rows = [_log_votes(one[0] if one else "", len(choices)) for one in records]
        return np.array(rows, dtype=np.float64).reshape(len(prompts), len(choices))

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> EngineRows:
        """Async version of `score_choices`."""
        return self.score_choices(prompts, choices)


@lru_cache(maxsize=256)
def _log_votes(record: str, width: int) -> tuple[float, ...]:
    shares = parse_numbers(record) if record else (0.0,) * (width - 1) + (1.0,)
    return tuple(math.log(share) if share > 0 else -math.inf for share in shares)


TOKENS = (" a", " b", " c")
"""What is written: the first two are fought for, the third stands by."""
_NEVER = -40.0
"""The logit of the end of the text, everywhere: it would be one more candidate."""


class ReadTokens(Spied, FakeBackend):
    """Writes text: the loudest record of a prompt lists the logit of each of `TOKENS`, and none of them ends the text.

    The public prompt has the logits `public`.
    """

    def __init__(self, public: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        self._public = tuple(public)
        super().__init__(self._distribution_of, vocabulary=TOKENS, name="reads tokens")

    def logits_of(self, prompt: str) -> tuple[float, ...]:
        """Returns the logits of `TOKENS` after a prompt; of several records the one with the largest number speaks."""
        records = [parse_numbers(one) for one in records_of_prompt(prompt)]
        return max(records, default=self._public)

    def open(self, prompts: Sequence[str], prefix: Sequence[Token]) -> TokenSession:
        """Starts a session."""
        self.note(prompts, len(prefix))
        return super().open(prompts, prefix)

    def _distribution_of(self, prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
        del prefix
        logits = np.array(self.logits_of(prompt))
        shares = np.exp(np.clip(logits - min(logits.max(), 700.0), -745.0, 0.0))
        return dict(zip(TOKENS, (shares / shares.sum()).tolist(), strict=True))


class ReadLogits(ReadTokens):
    """The same, for the logit mechanisms: shows the logits of its whole vocabulary, with the public prompt beside."""

    def open_full(self, prompts: Sequence[str | None], prefix: Sequence[Token], *, public: str, **_: Any) -> Any:
        """Starts a session."""
        self.note(prompts, len(prefix))
        return _LogitSession([self._logits(prompt) for prompt in prompts], self._logits(public))

    def _logits(self, prompt: str | None) -> list[float]:
        known = dict(zip((token.encode() for token in TOKENS), self.logits_of(prompt or ""), strict=True))
        return [known.get(token, _NEVER) if isinstance(token, bytes) else _NEVER for token in self.vocabulary()]


class _LogitSession:
    """A batch of prompts of `ReadLogits`."""

    def __init__(self, rows: list[list[float]], public: list[float]) -> None:
        self._rows, self._public = np.array(rows, dtype=np.float64).reshape(len(rows), len(public)), np.array(public)

    def public(self) -> NDArray[np.float64]:
        return self._public

    def logits(self, columns: NDArray[np.int64] | None = None) -> EngineRows:
        return self._rows if columns is None else self._rows[:, columns]

    async def apublic(self) -> NDArray[np.float64]:
        return self.public()

    async def alogits(self, columns: NDArray[np.int64] | None = None) -> EngineRows:
        return self.logits(columns)

    def push(self, token: Token) -> None:
        del token

    def close(self) -> None:
        self._rows = self._rows[:0]


class ReadAnswers(Spied):
    """Completes text: answers with what the first record says, and the public prompt with `public`."""

    name = "reads answers"

    def __init__(self, public: str = "no") -> None:
        self._public = public

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Returns an answer to each prompt."""
        del max_tokens, stop
        self.note(prompts)
        return [(records_of_prompt(prompt) or [self._public])[0] for prompt in prompts]

    async def acomplete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Async version of `complete`."""
        return self.complete(prompts, max_tokens=max_tokens, stop=stop)


class Opposite(Embeddings):
    """Embeds "yes" and "no" in opposite directions; "up" and "down" lean to "no", together by half a vote."""

    _PLACES: ClassVar[Mapping[str, tuple[float, float]]] = {
        "yes": (1.0, 0.0),
        "no": (-1.0, 0.0),
        "up": (-0.25, math.sqrt(1.0 - 0.0625)),
        "down": (-0.25, -math.sqrt(1.0 - 0.0625)),
    }

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Returns two numbers for each text."""
        return [list(self._PLACES.get(text, (0.0, 0.0))) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """Returns two numbers."""
        return self.embed_documents([text])[0]


class ReadGradients(Spied):
    """Gives gradients: an example's text is "axis:length"; one number for each axis is trained."""

    name = "reads gradients"
    method = "soft_prompt"
    task = PromptTask("causal_lm", "{text}\nIt was", ("good", "bad"), (" good", " bad"))
    tokenizer_fingerprint = "words"

    def __init__(self, width: int) -> None:
        self.width = width
        self.num_virtual_tokens, self.token_dim = 1, width

    def gradients(
        self,
        parameters: NDArray[np.float64],
        groups: Sequence[Sequence[TrainingExample] | None],
        *,
        add: Callable[[Any], None],
    ) -> None:
        """Hands over one row for each group."""
        del parameters
        texts = ["" if not group else group[0].text for group in groups]
        self.add(len(texts))
        rows = np.zeros((len(texts), self.width))
        for row, text in zip(rows, texts, strict=True):
            axis, length = text.split(":")
            row[int(axis)] = float(length)
        add(rows)

    async def agradients(
        self,
        parameters: NDArray[np.float64],
        groups: Sequence[Sequence[TrainingExample] | None],
        *,
        add: Callable[[Any], None],
    ) -> None:
        """Async version of `gradients`."""
        await asyncio.sleep(0)
        self.gradients(parameters, groups, add=add)

    def check(self, parameters: NDArray[np.float64]) -> None:
        """Works."""

    def losses(self, parameters: NDArray[np.float64], examples: Sequence[TrainingExample]) -> NDArray[np.float64]:
        """Returns zeros."""
        del parameters
        return np.zeros(len(examples))

    def initial(self, text: str | None = None) -> NDArray[np.float64]:
        """Returns zeros."""
        del text
        return np.zeros(self.width)

    def arrays(self, parameters: NDArray[np.float64]) -> dict[str, Any]:
        """Returns what would be saved."""
        return {"prompt_embeddings": parameters.reshape(1, self.width).astype(np.float32)}

    def peft_config(self) -> dict[str, Any]:
        """Returns what would be saved beside it."""
        return {
            "peft_type": "PROMPT_TUNING",
            "task_type": "CAUSAL_LM",
            "num_virtual_tokens": 1,
            "token_dim": self.width,
        }

    def weights_digest(self) -> str:
        """Returns a digest of nothing."""
        return "0" * 64


QUERY = "which one?"
NUM_UNPAID_INPUTS = 2
"""Inputs of a labelling beyond those that its share pays for: they have to wait."""

# What a game costs in all is of no interest: its events are compared one by one. No budget is in its way.
_EPSILON, _DELTA = 1e12, 1e-6
_LABELS = ("yes", "no")


def share_of(component: Any) -> Share:
    """Returns what a component may spend, with the tickets it has left."""
    share: Share = component.share if hasattr(component, "share") else component._share  # noqa: SLF001  to be audited
    return share


def _budget(adjacency: Any) -> Budget:
    return Budget(epsilon=_EPSILON, delta=_DELTA, adjacency=adjacency)


def _split_options(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], int, str]:
    """Returns the constructor's options, the declared size and the adjacency."""
    arguments = {**defaults, "num_slots": options.get("public_size", 1), **options}
    return arguments, arguments.pop("public_size", 1), arguments.pop("adjacency", "add_remove")


def rows_and_noise(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns `rows=` and `noise=`, whose words (those of a plan's report) it takes out of a game's options."""
    count, multiplier = arguments.pop("num_slots"), arguments.pop("noise_multiplier")
    noise = Noise(arguments.pop("mechanism", None), multiplier=multiplier)
    fill, is_units = arguments.pop("overfill"), arguments.pop("rows") == "units"
    slots = {"shots": arguments.pop("shots_per_slot", 1), "sampling": arguments.pop("sampling", "poisson")}
    # Slots of a fixed number of records take no fill.
    slots["fill"] = fill if slots["sampling"] == "poisson" else None
    return {"rows": Rows(units=count) if is_units else Rows(slots=count, **slots), "noise": noise}


def voter_of(units: Sequence[str], *, engine: Any = None, **options: Any) -> DPVotingRunnable:
    """Builds a voter over units that vote as their texts say (`ReadVotes`); every query is charged."""
    usual = {"labels": _LABELS, "rows": "slots", "overfill": 1.0, "noise_multiplier": 0.5, "memo_size": 0}
    # Named, so that a game stays what its name says where a component's own choice changes.
    usual["mechanism"] = "gaussian" if options.get("with_scores") else "gumbel"
    arguments, size, adjacency = _split_options(options, {**usual, "max_queries": 1_000})
    answers: dict[str, Any] = {name: arguments.pop(name) for name in ("votes", "abstain_below") if name in arguments}
    answers["scores"] = arguments.pop("with_scores", False)
    return DPVotingRunnable.from_private_examples(
        PrivateExamples(units, public_size=size),
        llm=ReadVotes() if engine is None else engine,
        budget=_budget(adjacency),
        epsilon=_EPSILON / 2,
        task=FewShotTask(MARK + "{text}", "{input}", labels=arguments.pop("labels")),
        answers=LabelAnswers(calibrate=False, **answers),
        serving=Serving(memo_size=arguments.pop("memo_size")),
        **rows_and_noise(arguments),
        **arguments,
    )


def helper_of(units: Sequence[str], *, engine: Any = None, **options: Any) -> DPFreeFormRunnable:
    """Builds a free-form component over units that answer what their texts say, "yes" or "no"; see `ReadAnswers`."""
    usual: dict[str, Any] = {"rows": "slots", "overfill": 1.0, "noise_multiplier": 0.5, "memo_size": 0}
    arguments, size, adjacency = _split_options(options, {**usual, "max_queries": 1_000, "aggregation": "embedding"})
    is_embedded = arguments.pop("aggregation") == "embedding"
    by_vectors = EmbeddingAnswers(embeddings=Opposite(), candidates=_LABELS)
    by_words = KeywordAnswers(keywords=_LABELS, num_keywords=1)
    return DPFreeFormRunnable.from_private_examples(
        PrivateExamples(units, public_size=size),
        llm=ReadAnswers() if engine is None else engine,
        budget=_budget(adjacency),
        epsilon=_EPSILON / 2,
        example_prompt=MARK + "{text}",
        suffix="{input}",
        answers=by_vectors if is_embedded else by_words,
        serving=Serving(memo_size=arguments.pop("memo_size")),
        **rows_and_noise(arguments),
        **arguments,
    )


def labeler_of(
    units: Sequence[str],
    paid: int,
    *,
    engine: Any = None,
    public_size: int = 1,
    adjacency: Adjacency = "add_remove",
    labels: Sequence[str] = _LABELS,
    teachers: Teachers = "fresh",
    rows: RowShape = "slots",
    num_slots: int | None = None,
    shots_per_slot: int = 1,
    sampling: Sampling = "poisson",
    mechanism: NoiseName = "gumbel",
    noise_multiplier: float = 0.5,
    confident: tuple[float, float, float] | None = None,
    max_answers: int | None = None,
    abstain_below: float | None = None,
) -> PromptPATELabeler:
    """Builds a labeler over units that vote as their texts say, with more inputs than its share pays for."""
    slots = public_size if num_slots is None else num_slots
    shape = Rows(units=slots)
    if teachers == "fixed":
        shape = Rows(slots=slots, shots=shots_per_slot, sampling="partition")
    elif rows == "slots":
        fill = 1.0 if sampling == "poisson" else None
        shape = Rows(slots=slots, shots=shots_per_slot, sampling=sampling, fill=fill)
    noise: Noise | ConfidentGNMax = Noise(mechanism, multiplier=noise_multiplier)
    if confident is not None:
        noise = ConfidentGNMax(*confident, max_answers=max_answers)
    records = [{"text": unit, "answer": labels[-1]} for unit in units]
    return PromptPATELabeler.from_private_examples(
        PrivateExamples(records, label_key="answer", labels=labels, public_size=public_size),
        llm=ReadVotes() if engine is None else engine,
        budget=_budget(adjacency),
        epsilon=_EPSILON / 2,
        public_inputs=[f"which one, {place}?" for place in range(paid + NUM_UNPAID_INPUTS)],
        max_queries=paid,
        example_prompt=MARK + "{text}\n\n{answer}",
        suffix="{input}",
        rows=shape.replace(redraw_every="run") if teachers == "one_sample" else shape,
        noise=noise,
        answers=LabelAnswers(calibrate=False, abstain_below="never" if abstain_below is None else abstain_below),
    )


def synthesizer_of(
    units: Sequence[str],
    texts: int,
    *,
    public: Sequence[float] = (0.0,) * len(TOKENS),
    engine: Any = None,
    max_tokens: int = 1,
    redraw_every: int | None = None,
    **options: Any,
) -> DemonstrationSynthesizer:
    """Builds a generation of texts, of one token each, over units whose texts are logits (`ReadTokens`)."""
    usual: dict[str, Any] = {"rows": "slots", "overfill": 1.0, "noise_multiplier": 0.5}
    arguments, size, adjacency = _split_options(options, {**usual, "mechanism": "gumbel"})
    noise = noise_of(arguments.pop("mechanism"), Noise, LogitNoise)
    reader = ReadLogits if isinstance(noise, LogitNoise) else ReadTokens
    given = rows_and_noise(arguments)
    return DemonstrationSynthesizer.from_private_examples(
        PrivateExamples(units, public_size=size),
        llm=reader(public) if engine is None else engine,
        budget=_budget(adjacency),
        epsilon=_EPSILON / 2,
        task=GenerationTask(record_prompt=MARK + "{text}"),
        shots_per_label=texts,
        max_tokens=max_tokens,
        rows=given["rows"].replace(redraw_every=redraw_every),
        noise=noise.replace(multiplier=given["noise"].multiplier, **arguments),
        decoding=Decoding(candidates="all"),
    )


def training_of(
    units: Sequence[str],
    *,
    engine: ReadGradients,
    training: Training,
    noise: Noise | None = None,
    epsilon: float = _EPSILON / 2,
    public_size: int = 1,
    adjacency: Adjacency = "add_remove",
) -> PromptDPSGD:
    """Builds a training on the gradients that units ask for; see `plain_steps`."""
    labels = engine.task.labels
    records = [{"text": unit, "label": labels[0]} for unit in units]
    return PromptDPSGD.from_private_examples(
        PrivateExamples(records, label_key="label", labels=labels, public_size=public_size),
        llm=engine,
        training=training,
        budget=_budget(adjacency),
        epsilon=epsilon,
        noise=Noise(multiplier=0.5) if noise is None else noise,
    )


def plain_steps(steps: int, *, expected_batch_size: int = 1, l2_clip_norm: float = 0.1) -> Training:
    """Returns a training with plain steps of size 1: weights show averages."""
    return Training(
        expected_batch_size=expected_batch_size,
        steps=steps,
        l2_clip_norm=l2_clip_norm,
        learning_rate=1.0,
        optimizer="sgd",
    )


# The package's own planner rebuilds it at the stated noise, so that epsilon is computed again. Of a component only plan
# and ledger are read, never its records.


_CLASSES: tuple[type, ...] = (
    DPVotingRunnable,
    DPFreeFormRunnable,
    PromptPATELabeler,
    DemonstrationSynthesizer,
    PrivateEvolution,
    PromptDPSGD,
    UnitCounter,
    ValueDiscovery,
    WordDiscovery,
    DocumentSynthesizer,
    DPRetrievalVotingRunnable,
    Evaluation,
    Choosing,
)
COMPONENTS = tuple(kind.__name__ for kind in _CLASSES)
"""The components that can be audited as objects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is audited.

    Attributes:
      name: for the report.
      method: which component runs it: "voting", "free_form", "pate", "dpsgd", or what its plan calls it.
      plan: what runs, with the epsilon that it costs by this package's accounting, computed now.
      epsilon: what is claimed.
      delta: at which it is claimed.
      options: public options of the component that change what leaves: `with_scores`, `abstain_below`,
        `aggregation`.
      component: the object, if there is one; its ledger is read.
    """

    name: str
    method: str
    plan: SharePlan
    epsilon: float
    delta: float
    options: Mapping[str, Any] = field(default_factory=dict)
    component: Any = field(default=None, repr=False)

    @property
    def texts(self) -> Subject:
        """The texts of synthetic documents, which are a generation like any other; of other subjects the same one."""
        if not isinstance(self.plan, DocumentsPlan) or self.plan.generation is None:
            return self
        plan = self.plan.generation
        return dataclasses.replace(self, method="generation", plan=plan, epsilon=plan.epsilon, component=None)

    @classmethod
    def of(cls, given: Any, *, name: str | None = None) -> Subject:
        """Returns the subject of a component, a plan, or the JSON of a plan.

        Args:
          given: a component, a plan, or the JSON of `dpicl plan --json` as a mapping.
          name: for the report; None: what it calls itself.

        Raises:
          ConfigurationError: it is none of them, of a class derived of a component's, or a field is missing.
        """
        if isinstance(given, Subject):
            return given
        if isinstance(given, Mapping):
            return _of_json(given, name=name)
        for kind in _CLASSES:
            if type(given) is kind:
                return _of_component(given, name=name or kind.__name__)
            if isinstance(given, kind):
                advice = f"The checks play {kind.__name__} itself: what your class overrides would run unaudited."
                raise fail("audit", f"a {kind.__name__}, no class derived of it", type(given).__name__, advice)
        if isinstance(given, SharePlan):
            method = _method_of(given)
            shown = name or f"a plan of {method}"
            return cls(name=shown, method=method, plan=given, epsilon=given.epsilon, delta=given.delta)
        expected = f"a component ({', '.join(COMPONENTS)}), a plan, or the JSON of `dpicl plan --json`"
        raise fail("audit", expected, type(given).__name__, "A prompt template or selector: audit what made it.")


def _of_component(given: Any, *, name: str) -> Subject:
    """Reads what is public of a component: its plan, its share of the budget, and what leaves it."""
    method = _method_of(given.plan)
    options: dict[str, Any] = {}
    if method == "voting":
        options = {"with_scores": given.answers.scores, "abstain_below": given.abstain_below}
    if method == "free_form":
        options = {"aggregation": given.maker.space.kind}
    share = share_of(given)
    epsilon = given.plan.epsilon if share.epsilon is None else share.epsilon
    delta = given.plan.delta if share.delta is None else share.delta
    return Subject(
        name=name, method=method, plan=given.plan, epsilon=epsilon, delta=delta, options=options, component=given
    )


def _of_json(given: Mapping[str, Any], *, name: str | None) -> Subject:
    plan, problem = given.get("plan", given), ""
    if not isinstance(plan, Mapping):
        raise fail("audit", "a plan: the JSON of `dpicl plan --json`", type(plan).__name__)
    try:
        epsilon, delta = check_epsilon(plan["epsilon"]), check_delta(plan["delta"])
        made = shown_plan(plan)
    except KeyError as error:
        problem = f"with the field {error.args[0]!r}, found none"
    except (TypeError, AttributeError):
        problem = "as `dpicl plan --json` writes it, found fields of another kind"
    else:
        # What a plan claims to cost is what an audit tests.
        others = list(shown_differences(plan, made.to_dict(), lambda _found, _made: False))
        problem = f"whose numbers go together, found one that {others[0]}" if others else ""
    if problem:
        raise ConfigurationError(f"audit: expected a plan {problem}.")
    if (method := _method_of(made)) == "free_form":
        advice = "Give the component instead of its plan."
        raise fail("aggregation", "votes or probabilities", made.release.aggregation.name, advice)
    options: dict[str, Any] = {}
    if method in {"voting", "pate"} and made.release.constants:
        options["abstain_below"] = 0.5
    return Subject(
        name=name or f"a plan of {method}", method=method, plan=made, epsilon=epsilon, delta=delta, options=options
    )


def _method_of(plan: Any) -> str:
    if plan.method == "queries":
        return "voting" if isinstance(plan.release.aggregation, VoteSum | ProbabilitySum) else "free_form"
    return str({"labels": "pate", "training": "dpsgd"}.get(plan.method, plan.method))
