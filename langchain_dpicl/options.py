"""Holds the option values that components share: frozen, public, checked, the same in Python, TOML and JSON."""

from __future__ import annotations

import dataclasses
import functools
import html
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
    runtime_checkable,
)

from annotated_types import Gt, Interval
from pydantic import BeforeValidator, ConfigDict, SkipValidation, Strict, TypeAdapter, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from langchain_dpicl._calls import did_you_mean
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import MAX_INT, fail, plain_or_type

if TYPE_CHECKING:
    from langchain_core.prompts import FewShotPromptTemplate


if TYPE_CHECKING:
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.language_models import LanguageModelLike
    from langchain_core.prompts import BasePromptTemplate
    from langchain_core.runnables import Runnable

    LLM: TypeAlias = "LanguageModelLike | Engine | str"
    """A LangChain model, an engine of this package, or "provider:model" as `init_chat_model` takes it."""
    TemplateLike: TypeAlias = "str | BasePromptTemplate[Any]"
    """A prompt template with plain `{field}` names, or a LangChain template that holds one."""
    QueryInput: TypeAlias = "str | Mapping[str, Any] | Document | Sequence[Any]"
    """What a component answers: a text, the query's variables, a document, or messages."""
    PublicInput: TypeAlias = "str | Document | Mapping[str, str]"
    EmbeddingsLike: TypeAlias = "Embeddings | str"
    ModelLike: TypeAlias = "LLM | Runnable[Any, Any]"
    CandidatesLike: TypeAlias = "Sequence[str] | Runnable[Any, Sequence[str]] | Callable[[Any], Sequence[str]]"
    Live: TypeAlias = Any
else:
    _NAME = WithJsonSchema({"type": "string"})
    LLM = Any
    QueryInput = Any
    PublicInput = Any
    TemplateLike = EmbeddingsLike = ModelLike = Live = Annotated[Any, SkipValidation, _NAME]
    CandidatesLike = Annotated[Any, SkipValidation, WithJsonSchema({"type": "array", "items": {"type": "string"}})]

Where: TypeAlias = "str | os.PathLike[str]"
"""The path of a file."""
Count: TypeAlias = Annotated[int, Interval(ge=1, le=MAX_INT)]
CountOrZero: TypeAlias = Annotated[int, Interval(ge=0, le=MAX_INT)]
Positive: TypeAlias = Annotated[float, Gt(0)]
NotNegative: TypeAlias = Annotated[float, Interval(ge=0)]
Probability: TypeAlias = Annotated[float, Interval(gt=0, lt=1)]
Delta: TypeAlias = Annotated[float, Interval(ge=0, lt=1)]
Share: TypeAlias = Annotated[float, Interval(gt=0, le=1)]


def _listed(value: Any) -> Any:
    if isinstance(value, Iterator):  # it may never end
        raise PydanticCustomError("listed", "a list")
    return value


LISTED = BeforeValidator(_listed)
"""Refuses an iterator, before anything is taken from it."""
Texts: TypeAlias = Annotated[tuple[Annotated[str, Strict()], ...], Strict(strict=False), LISTED]
"""Texts; a list becomes a tuple."""

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


@runtime_checkable
class Engine(Protocol):
    """An engine of this package, such as `HuggingFaceBackend`, or one of yours."""

    @property
    def name(self) -> str:
        """The public name, for reports."""


class _NamesChecked(type):
    """Refuses an unknown option by a message that names the one that was meant."""

    if not TYPE_CHECKING:  # a type checker reads the dataclass's own signature

        def __call__(cls, *values: Any, **options: Any) -> Any:
            for name in options:
                if name not in _defaults(cls):
                    raise fail(
                        cls.__name__, f"options among {list(_defaults(cls))}", name, did_you_mean(name, _defaults(cls))
                    )
            try:
                return super().__call__(*values, **options)
            except TypeError as error:
                missing = [n for n, default in _defaults(cls).items() if default is dataclasses.MISSING]
                wanted = f"named options among {list(_defaults(cls))}" + (f", {missing} always" if missing else "")
                found = str(error).rpartition("__init__() ")[2]  # without the name that Python alone has for it
                message = f"{cls.__name__}: expected {wanted}; {found}."
            raise ConfigurationError(message)

        @property
        def __signature__(cls) -> inspect.Signature:
            build = inspect.signature(cls.__init__)
            return build.replace(parameters=list(build.parameters.values())[1:])


class Option(metaclass=_NamesChecked):
    """Base of option values: frozen, public and compared by value.

    Options must not be chosen by looking at the records. A field that is None was not given: the planner or the
    component chooses, and `component.plan` shows what.

    Formal guarantees:
      - Holds no record; equal values give equal plans.
      - `from_dict(value.to_dict()) == value` if all fields are JSON values.

    Raises:
      ConfigurationError: a field is out of its range, or two fields exclude each other.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", **_STRICT)

    def __post_init__(self) -> None:
        """Checks every field that differs from its default, then what fields say together."""
        for name, default in _defaults(type(self)).items():
            value = getattr(self, name)
            if value is not default:
                object.__setattr__(self, name, _checked(type(self), name, value))
        self._check_together()

    def _check_together(self) -> None:
        """Raises if fields exclude each other."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults, as JSON values; a model or a store is shown by name."""
        defaults = _defaults(type(self))
        given = {name: getattr(self, name) for name in defaults}
        return {name: _shown(value) for name, value in given.items() if not _equals(value, defaults[name])}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Builds the value from what TOML or JSON holds.

        Args:
          state: fields by name; models and embeddings are written "provider:model".

        Raises:
          ConfigurationError: a name or a value is wrong; says which, and which name is close to it.
        """
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            raise fail(cls.__name__, "a table of fields by name", plain_or_type(state))
        parts = {name: part for name, value in state.items() if (part := _option_in(cls, name, value)) is not None}
        return cls(**{**state, **parts})

    def replace(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed.

        Args:
          changes: the new values of fields.

        Raises:
          ConfigurationError: as the constructor.
        """
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Returns the JSON schema that editors and `dpicl` read."""
        schema = TypeAdapter(cls).json_schema()
        # Of a class that holds its own kind, pydantic shows a reference alone.
        own = schema["$defs"][cls.__name__] if schema.pop("$ref", None) else {}
        return {**own, **schema}

    def __repr__(self) -> str:
        """Shows what differs from the defaults."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self.to_dict())


_MOST_SHOWN = 500
"""Characters of a value in a notebook's table."""


def html_table(title: str, values: Mapping[str, Any]) -> str:
    """Returns public values as a table, for notebooks; of a long value its beginning."""
    texts = ((name, str(value)) for name, value in values.items())
    short = ((name, text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ...") for name, text in texts)
    cells = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in short)
    return f"<table><caption>{html.escape(title)}</caption>{''.join(cells)}</table>"


OptionT = TypeVar("OptionT", bound=Option)


def option_of(name: str, value: object, *kinds: type[OptionT]) -> OptionT:
    """Returns an option value that a caller gave; None stands for the defaults of the first kind."""
    if value is None:
        return kinds[0]()
    if isinstance(value, kinds):
        return value
    raise fail(name, " or ".join(f"{kind.__name__}(...)" for kind in kinds), plain_or_type(value))


def refuse_unused(option: Option, used: Collection[str], component: str) -> None:
    """Refuses fields that differ from their defaults and that a component does not use."""
    if unused := sorted(set(option.to_dict()) - set(used)):
        raise fail(type(option).__name__, f"fields among {sorted(used)} for {component}", unused)


@functools.cache
def _defaults(option: type[Option]) -> Mapping[str, Any]:
    return {f.name: f.default for f in dataclasses.fields(option)}  # type: ignore[arg-type]


@functools.cache
def _adapters(option: type[Option]) -> Mapping[str, TypeAdapter[Any]]:
    hints = get_type_hints(option, include_extras=True)
    return {name: TypeAdapter(hints[name], config=_config_of(hints[name])) for name in _defaults(option)}


def _option_in(option: type[Option], name: str, value: Any) -> Option | tuple[Any, ...] | None:
    """Returns the option values that a field takes, built from mappings; None for other fields and values."""
    hint = get_type_hints(option).get(name)
    kinds = [part for part in getattr(hint, "__args__", ()) if isinstance(part, type) and issubclass(part, Option)]
    if kinds and get_origin(hint) is tuple:
        items = value if isinstance(value, list) else ()
        return tuple([kinds[0].from_dict(item) if isinstance(item, Mapping) else item for item in items]) or None
    return kinds[0].from_dict(value) if kinds and isinstance(value, Mapping) else None


def _config_of(hint: Any) -> ConfigDict | None:
    """Returns the configuration of a field; one that is an option value has its own."""
    is_option = any(dataclasses.is_dataclass(part) for part in (hint, *getattr(hint, "__args__", ())))
    return None if is_option else _STRICT


def _checked(option: type[Option], name: str, value: Any) -> Any:
    """Returns a field's value, a list of texts as a tuple."""
    try:
        found = _adapters(option)[name].validate_python(value)
        return tuple(found) if isinstance(found, list) else found
    except ValidationError as error:
        expected = " or ".join(dict.fromkeys(_expected(line) for line in error.errors(include_input=False)))
    raise fail(f"{option.__name__}.{name}", expected, plain_or_type(value))  # a collection may be of records


def _expected(line: Any) -> str:
    """Returns what pydantic expected, as the object of "expected"."""
    context = line.get("ctx", {})
    if isinstance(context.get("error"), ConfigurationError):
        return str(context["error"])
    said = str(line["msg"]).removeprefix("Input should be ").replace("a valid tuple", "a list of texts")
    said = f"a number {said}" if said.startswith(("greater", "less")) else said
    is_of_item = bool(line["loc"]) and isinstance(line["loc"][0], int)
    return f"a list, each item {said}" if is_of_item else said


def _equals(value: Any, default: Any) -> bool:
    try:
        return bool(value is default or (type(value) is type(default) and value == default))
    except (TypeError, ValueError):  # a live object that compares by element
        return False


def _shown(value: Any) -> Any:
    """Returns a JSON value; a live object is shown by its name or that of its class, and by none of its fields."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Option):
        return value.to_dict()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _shown(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(part) for part in value]
    template = getattr(value, "template", None)
    return template if isinstance(template, str) else _name_of(value)


def _name_of(value: Any) -> str:
    names = (getattr(value, attribute, None) for attribute in ("name", "model_name", "model"))
    return next((name for name in names if isinstance(name, str) and name), type(value).__name__)


Votes: TypeAlias = Literal["hard", "soft", "text"]
Exhausted: TypeAlias = Literal["raise", "zero_shot"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LabelAnswers(Option):
    """How labels are read from prompts, and when no label is given. Used by voting, PATE, retrieval and classifiers.

    Args:
      votes: "hard": one vote per row; "soft": each row gives its label probabilities; "text": what the model writes is
        its vote, also where it has probabilities.
      calibrate: divide a row's probabilities by those of the same row on content-free inputs (Zhao et al. 2021), for
        that many calls more per row; None: where the model reports probabilities of tokens, unless its engine
        declares or a rehearsal finds that it does better without. False: where whole labels are scored, a label whose
        text begins another's ("card", "card arrival") is always the likelier one.
      content_free: inputs without content.
      abstain_below: share of the expected votes that an answer needs, in (0, 1]; "auto": half of an even share, which
        larger noise passes alone (retrieval: what noise alone reaches in one of twenty queries); "never": the label
        with the most noisy votes always. None: "never" for voting, "auto" for PATE and retrieval. It costs nothing.
      min_votes: the same in noisy votes, where no number of votes can be expected (retrieval).
      abstain_label: the answer where no label is given.
      scores: release the noisy votes with the label, on the same ticket.
      other_label: name of votes whose text is no label ("text" votes); "": they count for no label.
    """

    votes: Votes = "hard"
    calibrate: bool | None = None
    content_free: Texts = ("N/A",)
    abstain_below: Share | Literal["auto", "never"] | None = None
    min_votes: Positive | None = None
    abstain_label: str = "abstain"
    scores: bool = False
    other_label: str = "other"

    def _check_together(self) -> None:
        if self.abstain_below is not None and self.min_votes is not None:
            raise fail("LabelAnswers", "abstain_below or min_votes", "both")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EmbeddingAnswers(Option):
    """Free answers by embeddings: the public candidate nearest to a noisy mean (Wu et al. 2024).

    Args:
      embeddings: receive the private answers; None: local ones, or those of `Retrieval`.
      candidates: public answers, never from private records: a list, or a Runnable or function that gives one for a
        query's text (its variables as a dict, where there are several); None: `writer` writes them. One without a
        direction, which the embeddings tell nothing about, is refused in a list, and otherwise dropped.
      num_candidates: answers that `writer` is asked for, at least 2. Equal ones count once, so it needs a temperature
        above 0.
      writer: the public model, for candidates and zero-shot answers, in traced calls, with its own settings: a Runnable
        from a prompt to text, or an engine; None: `llm`.
      max_tokens: most tokens of an answer.
      stop: texts that end an answer.
      abstain_answer: of retrieval: the answer where nothing exceeds the noise; no candidate.
    """

    embeddings: EmbeddingsLike | None = None
    candidates: CandidatesLike | None = None
    num_candidates: Count = 20
    writer: ModelLike | None = None
    max_tokens: Count = 64
    stop: Texts = ("\n",)
    abstain_answer: str = "abstain"

    def _check_together(self) -> None:
        if self.num_candidates < 2:
            raise fail("EmbeddingAnswers.num_candidates", "at least 2 answers to choose from", self.num_candidates)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class KeywordAnswers(Option):
    """Free answers by keywords, from which the public model writes the answer (Wu et al. 2024).

    Args:
      keywords: the public domain; None: words of the query and of public candidates, which scripts without spaces do
        not show.
      num_keywords: keywords of one release.
      max_keywords: most keywords of a domain that is made for a query; None: 256.
      answer_prompt: prompt of the public model, with {keywords} and the query's variables; None: the prompt without
        examples, under a line with the keywords.
      candidates: as of `EmbeddingAnswers`.
      num_candidates: answers that `writer` is asked for.
      writer: the public model, for candidates, answers and zero-shot answers; None: `llm`.
      max_tokens: most tokens of an answer.
      stop: texts that end an answer.
      abstain_answer: of retrieval: the answer where nothing exceeds the noise.
    """

    keywords: Texts | None = None
    num_keywords: Count = 10
    max_keywords: Count | None = None
    answer_prompt: TemplateLike | None = None
    candidates: CandidatesLike | None = None
    num_candidates: Count = 20
    writer: ModelLike | None = None
    max_tokens: Count = 64
    stop: Texts = ("\n",)
    abstain_answer: str = "abstain"

    def _check_together(self) -> None:
        if self.keywords is not None and (self.max_keywords is not None or self.candidates is not None):
            advice = "These two build a domain, and keywords= is one; leave them out."
            raise fail("KeywordAnswers", "keywords= or max_keywords= and candidates=", "both", advice)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Serving(Option):
    """How queries are taken and answers kept: length, memory, tenants, and what happens after the last ticket.

    Args:
      max_query_chars: characters that a query may have, all of its variables together; longer ones are refused before
        any call. None: as a record's text, `private.max_chars`.
      memo_size: answers cached per tenant; cache hits are not charged. 0: every query is charged.
      memo: where answers outlive the process: the path of a SQLite file (created if missing), or a `ReleaseMemo` such
        as `PostgresMemo`. Needs `component` and a durable ledger.
      tenant_max_queries: charged queries per tenant (`config["configurable"]["tenant"]`), over all processes and, on a
        stream, all runs; None: as many as the share pays for.
      on_exhausted: "raise", or "zero_shot": the public model alone answers, for free; the result says so.
      public_first: True: the public prompt is asked before a ticket is reserved, so an outage of the model is free.
        False: voting over an API asks it beside the private rows, which takes half the time; the first answer of an
        outage costs its ticket. Other components ask it first in any case.
    """

    max_query_chars: Count | None = None
    memo_size: CountOrZero = 256
    memo: Live = None
    tenant_max_queries: Count | None = None
    on_exhausted: Exhausted = "raise"
    public_first: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Retrieval(Option):
    """Which documents take part in an answer.

    Args:
      embeddings: receive every private document; None: local ones.
      similarity_threshold: least cosine between a document and the query, in (0, 1].
      participations: answers in which one unit may take part; the noise grows with its square root.
      slots: rows of every query; "per_unit": one per participating unit (less noise, but the number of calls shows how
        many take part).
      documents_per_unit: a unit's nearest documents that its row shows.
      balances: path of a file that keeps the units' balances after the process, or `SQLiteBalances`.
    """

    embeddings: EmbeddingsLike | None = None
    _: KW_ONLY
    similarity_threshold: Share
    participations: Count
    slots: Count | Literal["per_unit"] = 32
    documents_per_unit: Count = 1
    balances: Live = None


@dataclass(frozen=True, slots=True, repr=False)
class Topics(Option):
    """How topics of private documents are found, and which words leave of each.

    Args:
      vocabulary: public keywords that may become topics, found by a noisy histogram, which seldom stand in the same
        records: a unit belongs to the rarest alone. None: words of the documents that many units write, found as
        `WordDiscovery` finds them.
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
      threshold: noisy votes that a candidate needs to be kept, beside those that become demonstrations; None: any.
      candidates: public first candidates, for all labels or by label. One without a direction, which the embeddings
        tell nothing about, is refused here, and dropped where the model wrote it.
    """

    rounds: Count = 5
    num_candidates: Count | None = None
    num_survivors: Count = 10
    num_variations: CountOrZero = 3
    neighbours: Count = 1
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
    """

    method: Literal["soft_prompt", "prefix"] = "soft_prompt"
    num_virtual_tokens: Count = 10
    _: KW_ONLY
    init_text: str | None = None


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


Sampling: TypeAlias = Literal["poisson", "fixed", "partition", "disjoint"]
NoiseName: TypeAlias = Literal["gumbel", "gaussian", "permute_and_flip"]
LogitNoiseName: TypeAlias = Literal["recentered_clip", "difference_clip", "clip_and_blend"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rows(Option):
    """How many prompts one release reads, how many records each shows, and how they are drawn.

    A row is one prompt: one vote, one teacher, or one distribution over the next token. `slots` gives a fixed number of
    k-shot prompts; `units` gives one one-shot prompt per sampled unit, with half the noise and an expected number of
    calls. If neither is given, there are as many rows as is usual for the component.

    Args:
      slots: number of prompts with `shots` records each.
      units: expected number of one-shot prompts.
      shots: records per slot.
      sampling: "poisson"; "fixed" (balanced samples, `replace_one` only); "partition" (every unit stays in its slot:
        the fixed teachers of PATE); "disjoint" (one secret allocation for a whole run, a batch per demonstration).
      fill: expected units per shot of a slot; None: 1.5 for slots of one or two shots that are filled at random,
        otherwise 1.
      redraw_every: releases per secret sample: a number of tokens, or "run" (one sample for a whole text, or for all
        labels of a labelling run); None: 1.
    """

    slots: Count | None = None
    units: Count | None = None
    shots: Count = 1
    sampling: Sampling = "poisson"
    fill: Positive | None = None
    redraw_every: Count | Literal["run"] | None = None

    def _check_together(self) -> None:
        if self.slots is not None and self.units is not None:
            raise fail(
                "Rows", "slots or units", "both", "Slots are prompts of a fixed number, units of an expected one."
            )
        if self.units is not None and (self.shots > 1 or self.sampling != "poisson" or self.fill is not None):
            raise fail("Rows(units=)", "shots=1, sampling='poisson' and no fill", self, "Use slots= for these.")
        if self.fill is not None and self.slots is None and self.shots == 1 and self.sampling == "poisson":
            raise fail("Rows.fill", "None without slots", self.fill, "Give slots=, whose shots it fills.")
        if self.fill is not None and self.sampling in {"fixed", "partition"}:
            raise fail("Rows.fill", "None where slots have a fixed number of records", self.fill)


@dataclass(frozen=True, slots=True, repr=False)
class Noise(Option):
    """Which mechanism adds noise, and how much.

    Args:
      mechanism: "gumbel", "gaussian" or "permute_and_flip"; None: "gumbel" where an index is released, "gaussian" where
        a vector is.
      multiplier: noise scale over sensitivity; its cost must fit the component's epsilon. None: calibrated to it.
      delta: the component's part of the budget's delta; None: in proportion to its epsilon.
    """

    mechanism: NoiseName | None = None
    _: KW_ONLY
    multiplier: Positive | None = None
    delta: Delta | None = None


@dataclass(frozen=True, slots=True, repr=False)
class LogitNoise(Option):
    """Noise of the token mechanisms on logits, for engines that report their whole vocabulary.

    Args:
      mechanism: "recentered_clip", "difference_clip" or "clip_and_blend" (Bhusal et al. 2025).
      clip: largest magnitude of a clipped logit or difference; None: what temperature and noise permit.
      blend_weight: weight of the private rows in (0, 1] ("clip_and_blend").
      center: what is subtracted from a row's logits ("clip_and_blend").
      free_below: total variation to the public distribution below which, by a noisy test, a token is public and free.
      max_private_tokens: with `free_below`, the largest number of private tokens per text.
      multiplier: noise scale over sensitivity; None: calibrated.
      delta: the component's part of the budget's delta; None: in proportion to its epsilon.
    """

    mechanism: LogitNoiseName
    _: KW_ONLY
    clip: Positive | None = None
    blend_weight: Share | None = None
    center: Literal["max", "none"] | None = None
    free_below: Probability | None = None
    max_private_tokens: Count | None = None
    multiplier: Positive | None = None
    delta: Delta | None = None

    def _check_together(self) -> None:
        has_blend = self.blend_weight is not None or self.center is not None
        if has_blend and self.mechanism != "clip_and_blend":
            blend = "'clip_and_blend' where blend_weight or center is given"
            raise fail("LogitNoise.mechanism", blend, self.mechanism)
        if (self.free_below is None) != (self.max_private_tokens is None):
            raise fail("LogitNoise", "both of free_below and max_private_tokens, or neither", "one of them")


@dataclass(frozen=True, slots=True, repr=False)
class ConfidentGNMax(Option):
    """The noise of Confident-GNMax (Duan et al. 2023): a noisy test of the winner's votes, then a noisy maximum.

    Args:
      threshold: noisy votes that the winner needs.
      test_stddev: standard deviation of the test's noise, in votes.
      vote_stddev: standard deviation of the noise on the votes, in votes.
      max_answers: labels that the share pays for, if tests are charged apart; None: as many as queries.
      delta: the component's part of the budget's delta; None: in proportion to its epsilon.
    """

    threshold: float
    test_stddev: Positive
    vote_stddev: Positive
    _: KW_ONLY
    max_answers: Count | None = None
    delta: Delta | None = None


N = TypeVar("N", bound=Option)
M = TypeVar("M", bound=Option)


@overload
def noise_of(value: object, kind: type[N], /) -> N: ...
@overload
def noise_of(value: object, kind: type[N], other: type[M], /) -> N | M: ...
@overload
def noise_of(value: object, /, *kinds: type[Any]) -> Any: ...
def noise_of(value: object, /, *kinds: Any) -> Any:
    """Returns the option value of `noise=`: a mechanism's name is short for its option, None for the first kind."""
    if isinstance(value, kinds):
        return value
    if value is None:
        return kinds[0]()
    short = {Noise: get_args(NoiseName), LogitNoise: get_args(LogitNoiseName)}
    for kind in kinds:
        if isinstance(value, str) and value in short.get(kind, ()):
            return kind(value)
    wanted = [repr(name) for kind in kinds for name in short.get(kind, ())]
    raise fail("noise", ", ".join([*wanted, *(f"{kind.__name__}(...)" for kind in kinds)]), plain_or_type(value))


def noise_with(value: object, mechanism: str) -> Noise:
    """Returns the `Noise` of a component that has one mechanism, which `value` may name."""
    noise = noise_of(value, Noise)
    if noise.mechanism not in {None, mechanism}:
        raise fail("Noise.mechanism", f"None (this component adds {mechanism!r} noise)", noise.mechanism)
    return noise


@dataclass(frozen=True, slots=True, repr=False)
class FewShotTask(Option):
    r"""The wording of a few-shot prompt over private records, and the names of its answers.

    Args:
      example_prompt: template of one record, such as `"Ticket: {text}\nQueue: {queue}"`; None: text and label on a line
        each.
      suffix: template of the query after the records, such as `"Ticket: {input}\nQueue:"`; None: the example up to its
        label, with `{input}` in place of the text.
      prefix: template before the records.
      example_separator: text between the parts.
      labels: the answers; None: the declared labels of the examples.
      verbalizers: label to the text or texts that stand for it, taken verbatim; the first one is shown in examples.
        None: a space and the label.
      wordings: further public wordings of the same task, with the same variables of the query; this one is the first.
        Of n, slot i reads wording i mod n. They cost no privacy, and need rows of slots; see `SlotRenderers`. Their
        labels and verbalizers are the task's own.
    """

    example_prompt: TemplateLike | None = None
    suffix: TemplateLike | None = None
    _: KW_ONLY
    prefix: TemplateLike = ""
    example_separator: str = "\n\n"
    labels: Texts | None = None
    verbalizers: Mapping[str, str | Texts] | None = None
    wordings: Annotated[tuple[FewShotTask, ...], Strict(strict=False), LISTED] = ()

    def _check_together(self) -> None:
        for wording in self.wordings:
            if shared := sorted({"labels", "verbalizers", "wordings"} & set(wording.to_dict())):
                advice = "Labels and verbalizers are those of the task itself."
                raise fail("FewShotTask.wordings", "templates alone", shared, advice)

    @classmethod
    def of(
        cls,
        task: Self | None,
        example_prompt: TemplateLike | None = None,
        suffix: TemplateLike | None = None,
        prefix: TemplateLike = "",
    ) -> Self:
        """Returns the wording that a caller gave: as `task`, or by its templates.

        Args:
          task: the wording.
          example_prompt: of a wording without `task`.
          suffix: of a wording without `task`.
          prefix: of a wording without `task`.

        Raises:
          ConfigurationError: both are given, or `task` is something else.
        """
        if task is None:
            return cls(example_prompt, suffix, prefix=prefix)
        if example_prompt is not None or suffix is not None or prefix != "":
            advice = "Put the templates into the task."
            raise fail("task", "task=, or example_prompt=, suffix= and prefix=", "both", advice)
        return option_of("task", task, cls)

    @classmethod
    def from_template(cls, template: FewShotPromptTemplate, **changes: Any) -> Self:
        """Takes the wording of a LangChain few-shot template, without its examples.

        Args:
          template: the template, in f-string format and without partial variables.
          changes: further fields.

        Raises:
          ConfigurationError: it is no such template.
        """
        kind = getattr(template, "template_format", None)
        if (
            not hasattr(template, "example_prompt")
            or kind != "f-string"
            or getattr(template, "partial_variables", None)
        ):
            expected = "a FewShotPromptTemplate in f-string format without partial variables"
            raise fail("template", expected, kind or type(template))
        return cls(
            template.example_prompt,
            template.suffix,
            prefix=template.prefix,
            example_separator=template.example_separator,
            **changes,
        )


@dataclass(frozen=True, slots=True, repr=False)
class OpenLabel(Option):
    """A label without declared values: written first under the same privacy, or drawn from a public list.

    Args:
      key: field of the label.
      values: public list to draw from; None: the label is written.
      max_tokens: most tokens of a written label.
    """

    key: str
    values: Texts | None = None
    max_tokens: Count = 10


@dataclass(frozen=True, slots=True, repr=False)
class GenerationTask(Option):
    """The prompt of synthetic records.

    Args:
      instruction: task description, the first paragraph of every prompt.
      record_prompt: template of one record that ends with the text field; None: label and text on a line each.
      open_label: a label without declared values.
      variation_prompt: of `PrivateEvolution`: asks for a variation of a text.
      hints: of `PrivateEvolution`: sentences after the instruction, one per prompt in turn.
    """

    instruction: str | None = None
    record_prompt: TemplateLike | None = None
    _: KW_ONLY
    open_label: OpenLabel | None = None
    variation_prompt: TemplateLike | None = None
    hints: Texts = ()

    @classmethod
    def of(cls, task: Self | None, instruction: str | None) -> Self:
        """Returns the wording that a caller gave: as `task`, by its instruction, or by both.

        Args:
          task: the wording.
          instruction: of a wording whose task has none.

        Raises:
          ConfigurationError: both have an instruction, or `task` is something else.
        """
        given = option_of("task", task, cls)
        if instruction is None:
            return given
        if given.instruction is not None:
            raise fail("instruction", "it once, as instruction= or in task=", "both")
        return given.replace(instruction=instruction)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Decoding(Option):
    """How a text is written from released tokens.

    Args:
      candidates: tokens per step, the public prompt's likeliest; "all": the whole vocabulary.
      stop: texts that end a field; None: a line break, or nothing under a grammar. Records of several lines need
        another, such as two line breaks: a text that is written like them would end after its first line.
      temperature: of the released token's softmax; None: the mechanism's own.
      top_k: sample among so many noised candidates ("gaussian" with a temperature only).
      top_p: nucleus sampling on the noised vector ("gaussian" with a temperature only).
      grammar: a `Grammar`: what a text may be; what it forces is free.
      released_words: a `ReleasedWords`, whose words may be written too although the public model does not foresee them;
        a word that is begun is finished for free. True: the words of each label, released before its texts for a part
        of the same share, or of a `DocumentSynthesizer` those of each topic. None: no such words.
    """

    candidates: Count | Literal["all"] = 100
    stop: Texts | None = None
    temperature: Positive | None = None
    top_k: Count | None = None
    top_p: Share = 1.0
    grammar: Live = None
    released_words: Live = None

    def _check_together(self) -> None:
        given = self.released_words
        if given is not None and given is not True and not hasattr(given, "by_label"):
            # A file of settings can say true only: another value there would leave words out of the plan.
            raise fail("Decoding.released_words", "a ReleasedWords, True (true in TOML) or None", plain_or_type(given))


OPTIONS: tuple[type[Option], ...] = (
    Rows,
    Noise,
    LogitNoise,
    ConfidentGNMax,
    FewShotTask,
    OpenLabel,
    GenerationTask,
    Decoding,
    LabelAnswers,
    EmbeddingAnswers,
    KeywordAnswers,
    Serving,
    Retrieval,
    Topics,
    Evolution,
    Student,
    Similar,
    ByLength,
    SoftPromptConfig,
    Training,
    TrainableModel,
    LocalExecutor,
)
"""Every option value, in the order of the page that documents them."""


__all__ = [
    "ByLength",
    "ConfidentGNMax",
    "Decoding",
    "EmbeddingAnswers",
    "Evolution",
    "FewShotTask",
    "GenerationTask",
    "KeywordAnswers",
    "LabelAnswers",
    "LocalExecutor",
    "LogitNoise",
    "Noise",
    "OpenLabel",
    "Option",
    "Retrieval",
    "Rows",
    "Serving",
    "Similar",
    "SoftPromptConfig",
    "Student",
    "Topics",
    "TrainableModel",
    "Training",
]
