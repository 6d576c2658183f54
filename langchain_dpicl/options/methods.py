"""Options of single methods: topics, evolution, the student of PATE, soft prompts and their training, executors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias

from langchain_dpicl.options.base import (
    Count,
    CountOrZero,
    Live,
    ModelLike,
    NotNegative,
    Option,
    Positive,
    Probability,
    Texts,
)
from langchain_dpicl.privacy._validate import fail


@dataclass(frozen=True, slots=True, repr=False)
class Topics(Option):
    """How topics of private documents are found, and which words leave of each.

    Args:
      vocabulary: public keywords that may become topics, found by a noisy histogram; None: words of the documents that
        many units write, found as `WordDiscovery` finds them.
      num_topics: most topics.
      keywords_per_unit: most keywords that a unit counts for, or words that it casts for topics; None: 10, or 16 words.
      epsilon_share: part of epsilon that the topics may cost alone, in (0, 1); None: a fifth, and of topics that are
        words beside words of topics, the noise of these.
      min_units: noisy count that a keyword needs; None: so high that 95 % of runs find no keyword that no unit holds.
      words: most words of its topic that a unit casts; 0: no words leave. None: 8 where no texts leave, else 0.
      pairs: whether pairs of released words that are neighbours leave too.
      review: a function that gets all released words, after they were released and before a text is written or a
        document made, and returns those to leave out. It costs nothing, and can add none. Topics that are words come
        first, in a call of their own, before the ledger and the report name them.
    """

    vocabulary: Texts | None = None
    num_topics: Count = 10
    _: KW_ONLY
    keywords_per_unit: Count | None = None
    epsilon_share: Probability | None = None
    min_units: Count | None = None
    words: CountOrZero | None = None
    pairs: bool = False
    review: Live = None

    def _check_together(self) -> None:
        if self.review is not None and not callable(self.review):
            raise fail("Topics.review", "a function of released words, which returns those to drop", type(self.review))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Evolution(Option):
    """The search of private evolution (Xie et al. 2024).

    Args:
      rounds: noisy histograms per label; their costs compose.
      num_candidates: first candidates; None: as many as a later round has.
      num_survivors: candidates that are kept after a round.
      num_variations: variations of each survivor; 0 with one round, which then chooses among the candidates.
      neighbours: candidates that a text votes for.
      selection: "rank" or "sample".
      threshold: noisy votes that a candidate needs to be kept, beside those that become demonstrations; None: any.
      candidates: public first candidates, for all labels or by label.
    """

    rounds: Count = 5
    num_candidates: Count | None = None
    num_survivors: Count = 10
    num_variations: CountOrZero = 3
    neighbours: Count = 1
    selection: Literal["rank", "sample"] = "rank"
    threshold: NotNegative | None = None
    candidates: Mapping[str, Texts] | Texts | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Student(Option):
    """How the student's prompt is searched for among labelled public inputs. It costs no budget.

    Args:
      llm: the model that the prompt is for; None: the model of the teachers.
      shots: demonstrations of a prompt.
      num_candidates: prompts that are tried.
      num_validation: labelled inputs that are held back to try them on.
      seed: public seed of the choice of candidates.
      calibrate: as of `LabelAnswers`; None: prompts of one demonstration.
    """

    llm: ModelLike | None = None
    shots: Count = 4
    num_candidates: Count = 20
    num_validation: Count = 50
    seed: int = 0
    calibrate: bool | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Similar(Option):
    """Shows the examples of a pool whose inputs are most similar to the query, the most similar one first.

    Args:
      embeddings: any of LangChain's, whose vectors are kept in memory, or a vector store for this pool alone.
      k: examples that are shown.
      fetch_k: `k` of so many similar ones, each unlike those before it (maximal marginal relevance); None: the `k` most
        similar.
      input_keys: variables of the query that are compared; None: those of the template that the inputs were labelled
        with, or else all.
    """

    embeddings: Live
    _: KW_ONLY
    k: Count = 4
    fetch_k: Count | None = None
    input_keys: Texts | None = None

    def _check_together(self) -> None:
        if self.fetch_k is not None and self.fetch_k < self.k:
            raise fail("Similar.fetch_k", f"at least k={self.k}", self.fetch_k)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ByLength(Option):
    """Shows the first examples of a pool that fit beside the query, as the template of the labels writes them.

    Args:
      max_length: largest length of query and examples together, without prefix and suffix.
      get_text_length: function from a text to its length; None: its words.
    """

    max_length: Count = 2048
    get_text_length: Live = None


StrategyLike: TypeAlias = Literal["validated"] | Similar | ByLength
"""Which examples of a pool a query is shown: those of the student's prompt, similar ones, or the first that fit."""


@dataclass(frozen=True, slots=True, repr=False)
class SoftPromptConfig(Option):
    """The numbers that are trained; the names are those of peft.

    Args:
      method: "soft_prompt" (embeddings before the text) or "prefix" (keys and values of every layer).
      num_virtual_tokens: positions that the prompt takes.
      init_text: public text that it starts from; None: random numbers.
      encoder_hidden_size: width of the network that makes a prefix while it is trained; None: no network.
    """

    method: Literal["soft_prompt", "prefix"] = "soft_prompt"
    num_virtual_tokens: Count = 10
    _: KW_ONLY
    init_text: str | None = None
    encoder_hidden_size: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Training(Option):
    """DP-SGD and its optimizer; the names are those of Opacus and jax_privacy.

    Args:
      expected_batch_size: expected units of a step.
      epochs: how often a unit is expected to be sampled; or give `steps`.
      steps: training steps.
      l2_clip_norm: largest L2 norm of a unit's gradient.
      learning_rate: size of a step.
      optimizer: "adam" or "sgd".
      schedule: "constant" or "linear".
      validation: PUBLIC records whose loss is shown during training.
      validate_every: steps between two validations; None: about twenty validations.
    """

    expected_batch_size: Count
    epochs: Positive | None = None
    steps: Count | None = None
    l2_clip_norm: Positive = 0.1
    learning_rate: Positive = 0.01
    optimizer: Literal["adam", "sgd"] = "adam"
    schedule: Literal["constant", "linear"] = "constant"
    validation: Live = None
    validate_every: Count | None = None

    def _check_together(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            found = "neither" if self.steps is None else "both"
            raise fail("Training", "epochs or steps", found, "An epoch samples each unit once in expectation.")
        if self.validate_every is not None and self.validation is None:
            raise fail("Training", "validation= with validate_every=", "validate_every alone")


@dataclass(frozen=True, slots=True, repr=False)
class TrainableModel(Option):
    """A local model whose prompt is trained, and how it is loaded. It receives the private texts, on this machine.

    Args:
      model: a local folder, a model object or a `HuggingFaceBackend`.
      tokenizer: with a model object.
      micro_batch: examples that are computed at once; has no effect on results.
      device: such as "cuda"; None: where the model is.
      dtype: of the weights of a model that is read from a folder.
    """

    model: Live
    tokenizer: Live = None
    _: KW_ONLY
    micro_batch: Count = 16
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LocalExecutor(Option):
    """Runs the jobs of a run in this process.

    Args:
      max_concurrency: model calls in flight at once.
    """

    max_concurrency: Count = 32
