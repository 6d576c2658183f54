"""Serves released soft prompts on a local model: an engine that writes public text, and a classifier."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableConfig
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from langchain_dpicl._construction import tells_how_to_build
from langchain_dpicl._opaque import Uncopyable
from langchain_dpicl.backends.base import Rows
from langchain_dpicl.backends.hf import loading
from langchain_dpicl.backends.hf.backend import HuggingFaceBackend
from langchain_dpicl.backends.sync_async import Blocking, EffectGenerator, run_in_thread
from langchain_dpicl.backends.tuning.tasks import TaskKind
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.released.soft_prompt import ARRAY, SoftPrompt
from langchain_dpicl.serving import PublicRunnable
from langchain_dpicl.soft_prompts.plan import model_parts
from langchain_dpicl.tasks import public_text

if TYPE_CHECKING:
    from langchain_dpicl.backends.tuning.engine import ScoringInput, SoftPromptScorer


Ints = NDArray[np.int64]
T = TypeVar("T")

_A_MODEL = "it holds a whole model. Construct it in the other process"
_LEAST = 8
"""Room for private prompts of an engine that is built here, which reads none."""


class SoftPromptBackend(Uncopyable):
    r"""An engine of a causal model with released soft prompts in front of its input. For PUBLIC texts; serving is free.

    `LocalLLM(backend=SoftPromptBackend(model, prompt))` streams, stops and samples as with any engine. A text is put
    into the template of the prompt's task and cut, as in training. Several prompts share the model's
    weights: rows of one batch may have different ones, of either method and any length.

    Args:
      model: a `HuggingFaceBackend`, a model object, or a local folder with a model and its tokenizer.
      prompts: one prompt, or several by name.
      tokenizer: with a model object.
      default: name of the prompt of rows that name none; None: the only prompt.
      fills_template: whether a text is put into the template; None: if that of the row's prompt has one text field. If
        False, texts are continued as they are, for instance behind
        `PromptTemplate.from_template(prompt.task.template)`.
      max_new_tokens: initial room for generated tokens; it grows as far as the model's context and the longest text of
        the batch allow, and is less where a text leaves less.

    Raises:
      ConfigurationError: an unknown name, a prompt of another model, tokenizer or kind, or one that leaves no room for
        a text.
      CapabilityError: the model does not support soft prompts.
    """

    chat = False

    _pickle_advice = _A_MODEL

    def __init__(
        self,
        model: Any,
        prompts: SoftPrompt | Mapping[str, SoftPrompt],
        *,
        tokenizer: Any = None,
        default: str | None = None,
        fills_template: bool | None = None,
        max_new_tokens: int = 128,
    ) -> None:
        self.prompts = named_prompts(prompts)
        self.default = default_prompt_name(self.prompts, default)
        self.max_new_tokens = check_int("max_new_tokens", max_new_tokens, low=1)
        self._base = _base_backend(model, tokenizer)
        for name, prompt in self.prompts.items():
            _check_prompt(name, prompt, self._base)
        self._room = _PromptRunner(self._base, self.prompts)
        for name, prompt in self.prompts.items():
            check_weights(name, prompt, self._room.weights)
        pairs = [name for name, prompt in self.prompts.items() if prompt.task.takes_pair]
        if fills_template and pairs:
            advice = "Leave fills_template out, and put PromptTemplate.from_template(prompt.task.template) before it."
            raise fail("fills_template", "None or False where a template shows a pair", fills_template, advice)
        self.fills_template = fills_template

    def named(self, name: str) -> SoftPromptBackend:
        """Returns this engine with another default; weights and prompts are shared.

        Args:
          name: one of the prompts.

        Raises:
          ConfigurationError: no prompt has this name.
        """
        # A shallow copy: weights and prompts on the device are shared.
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, default=default_prompt_name(self.prompts, name))
        return other

    @property
    def name(self) -> str:
        """Public name: the model's and the default prompt's fingerprint."""
        prompt = "no default" if self.default is None else self.prompts[self.default].fingerprint
        return f"{self._base.name} ({prompt})"

    @property
    def fingerprint(self) -> str:
        """Says which engine this is, default prompt included: equal ones generate alike, for caches too; public."""
        known = repr((self._base.fingerprint, self.name, self.fills_template, self.max_new_tokens))
        return hashlib.sha256(known.encode()).hexdigest()[:16]

    @property
    def eos(self) -> int:
        """The end-of-text token."""
        return self._base.eos

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, in which special tokens are plain text.

        Args:
          text: public.
        """
        return self._base.encode(text)

    def count_tokens(self, text: str) -> int:
        """Returns the number of tokens of a public text, without template and prompt.

        Args:
          text: public.
        """
        return self._base.count_tokens(text)

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of one token; special tokens have none.

        Args:
          token: an id.
        """
        return self._base.token_bytes(token)

    def ends_in_space(self, text: str) -> bool:
        """Whether the model's input ends in a space, which is left out, because tokens of words start with one.

        Args:
          text: as the caller passes it.
        """
        known = self._known(None)
        if not self._is_put_into_template(known):
            return text.endswith(" ")
        literal, name = self.prompts[known].task.pieces[-1]
        return name is None and literal.endswith(" ")

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        rng: Generator | Sequence[Generator] | None = None,
        names: Sequence[str | None] | None = None,
    ) -> Iterator[tuple[Ints, Rows]]:
        """Yields the next token of every row int64[rows] and the rows float64[rows, ids] it was taken from.

        For PUBLIC prompts; it ends only at the end of the model's context, as `HuggingFaceBackend.generate` does.

        Args:
          prompts: texts, or ids that are continued as they are.
          temperature: 0 takes the likeliest token.
          top_k: samples among this many likeliest tokens.
          top_p: samples among the likeliest tokens that together have this probability.
          rng: random generator of the sampling, which protects nothing, for all rows or for each; None for a fresh one.
          names: the soft prompt of each row; None: the default.

        Raises:
          ConfigurationError: a number is out of range, or a name is unknown.
        """
        if names is not None and len(names) != len(prompts):
            raise fail("names", f"one for each of {len(prompts)} prompts", len(names))
        known = [self._known(name) for name in names or [None] * len(prompts)]
        rows = [self._ids(prompt, name) for prompt, name in zip(prompts, known, strict=True)]
        coins = rng or Generator(PCG64())
        return self._room.generated(rows, known, (temperature, top_k, top_p, coins), room=self.max_new_tokens)

    def by_itself(self, action: Callable[[], T]) -> T:
        """Runs an action that generates for one PRIVATE prompt; see `HuggingFaceBackend.by_itself`.

        Args:
          action: calls `generate`, and reads all that it needs of it.
        """
        return self._base.by_itself(action)

    def check_silent(self) -> None:
        """Looks whether somebody else's hook would see a private prompt now.

        Raises:
          UnsilencableModelError: it would.
        """
        self._base.check_silent()

    def __repr__(self) -> str:
        return f"SoftPromptBackend({self._base.name!r}, prompts={sorted(self.prompts)}, default={self.default!r})"

    def _known(self, name: str | None) -> str:
        chosen = self.default if name is None else name
        if chosen is None or chosen not in self.prompts:
            raise fail("names", f"one of {sorted(self.prompts)}", name, "Or give the engine a default.")
        return chosen

    def _is_put_into_template(self, name: str) -> bool:
        """Whether a text behind this prompt is."""
        return not self.prompts[name].task.takes_pair if self.fills_template is None else self.fills_template

    def _ids(self, prompt: str | Sequence[int], name: str) -> list[int]:
        """Returns the ids of a row behind its soft prompt."""
        is_filled = self._is_put_into_template(name) and isinstance(prompt, str)  # and cut, to the length of training
        read = partial(self._room.ids, prompt, name if is_filled else None)
        if self._room.limit is None:
            return read(cap=None)
        free = self._room.limit - self.prompts[name].num_virtual_tokens
        if is_filled:
            return read(cap=free)
        # A text that fits is not cut for tokens that its answer may not need; another one leaves them room.
        ids = read(cap=None)
        return ids if len(ids) < free else read(cap=free - min(self.max_new_tokens, free // 2))


class _PromptRunner:
    """Runs the model; imports torch."""

    def __init__(self, base: HuggingFaceBackend, prompts: Mapping[str, SoftPrompt]) -> None:
        from langchain_dpicl.backends.hf.model_checks import fingerprint
        from langchain_dpicl.backends.hf.tokens import Prompts, TokenizerMaps
        from langchain_dpicl.backends.tuning.prompted_model import PromptRegistry, parts_of
        from langchain_dpicl.backends.tuning.tasks import TaskReader

        self._engine, tokenizer = parts_of(base)
        self.weights = fingerprint(self._engine.body.model)
        self._readers = {name: TaskReader(tokenizer, prompt.task) for name, prompt in prompts.items()}
        self._plain = Prompts(TokenizerMaps(tokenizer, chat=False), eos=self._engine.vocabulary.eos)
        self._shelf = PromptRegistry(self._engine)
        for name, prompt in prompts.items():
            heads = prompt.peft_config.get("num_attention_heads")
            self._shelf.put(name, prompt.method, prompt.arrays[ARRAY], heads=heads if isinstance(heads, int) else 0)
        self._counts = {name: prompt.num_virtual_tokens for name, prompt in prompts.items()}
        limits = [self._engine.limit, self._engine.body.facts.window]
        self.limit = min([limit for limit in limits if limit is not None], default=None)
        self._check_room()

    def _check_room(self) -> None:
        for name, count in self._counts.items():
            if self.limit is not None and count + 2 > self.limit:
                raise fail(f"prompt {name!r}", f"fewer virtual tokens than the model's context, {self.limit}", count)

    def ids(self, prompt: str | Sequence[int], name: str | None, *, cap: int | None) -> list[int]:
        """Returns the ids of a text, put into the template of the named prompt's task if `name` is given."""
        from langchain_dpicl.backends.hf.tokens import cut_middle

        if not isinstance(prompt, str):
            ids = list(prompt)
        elif name is not None:
            ids = self._readers[name].input(prompt).ids
        else:
            begun = self._plain.begun("", cap=cap or 1 << 30)
            [row] = self._plain.rows([prompt], shared="", begun=begun, cap=cap or 1 << 30)
            ids = row or []
        ids = ids or [self._engine.vocabulary.eos]
        return ids if cap is None else cut_middle(ids, cap)

    def generated(
        self, rows: list[list[int]], names: list[str], taste: tuple[Any, ...], *, room: int
    ) -> Iterator[tuple[Ints, Rows]]:
        """`generate` on token ids."""
        from langchain_dpicl.backends.hf import completion, vocabulary
        from langchain_dpicl.backends.hf.batches import BatchShape
        from langchain_dpicl.backends.tuning.prompted_model import PromptedBatch

        drawn = vocabulary.SamplingOptions(*taste)
        if not rows:
            return completion.generate_tokens(self._engine, [], drawn, room=room)
        most = 1 << 30 if self.limit is None else self.limit
        left = [most - len(row) - self._counts[name] for row, name in zip(rows, names, strict=True)]

        def anew(rows: Sequence[Sequence[int]], places: Sequence[int], steps: int) -> PromptedBatch:
            behind = [names[place] for place in places]
            shape = BatchShape(len(rows), max(map(len, rows)), min(room, steps), is_fast=True)
            return PromptedBatch(self._engine.body, lambda: self._shelf.take(behind), shape)

        return completion.regenerate_tokens(self._engine, anew, rows, drawn, left=left)


def named_prompts(prompts: SoftPrompt | Mapping[str, SoftPrompt]) -> Mapping[str, SoftPrompt]:
    """Returns prompts by name; a single one is called "default"."""
    by_name = {"default": prompts} if isinstance(prompts, SoftPrompt) else prompts
    is_named = isinstance(by_name, Mapping) and all(
        isinstance(name, str) and name and isinstance(prompt, SoftPrompt) for name, prompt in by_name.items()
    )
    if not is_named or not by_name:
        raise fail("prompts", "a SoftPrompt, or several by name", type(prompts).__name__)
    return MappingProxyType(dict(by_name))


def default_prompt_name(prompts: Mapping[str, SoftPrompt], asked: str | None) -> str | None:
    """Returns the name of the default prompt, or None."""
    if asked is not None and asked not in prompts:
        raise fail("default", f"one of {sorted(prompts)}", asked)
    return next(iter(prompts)) if asked is None and len(prompts) == 1 else asked


def _base_backend(model: Any, tokenizer: Any) -> HuggingFaceBackend:
    if isinstance(model, HuggingFaceBackend):
        if tokenizer is not None:
            raise fail("tokenizer", "None with an engine, which has its own", type(tokenizer).__name__)
        return model
    return HuggingFaceBackend(model, tokenizer, chat=False, max_prompt_tokens=_LEAST, max_new_tokens=1)


def _check_prompt(name: str, prompt: SoftPrompt, base: HuggingFaceBackend) -> None:
    if prompt.task.kind != "causal_lm":
        advice = "SoftPromptClassifier serves it."
        raise fail(f"prompt {name!r}", 'a task of kind "causal_lm"', prompt.task.kind, advice)
    check_tokenizer(name, prompt, base.tokenizer_fingerprint)


def check_tokenizer(name: str, prompt: SoftPrompt, fingerprint: str) -> None:
    """Refuses a prompt that was trained with another tokenizer."""
    if prompt.base["tokenizer"] != fingerprint:
        raise ConfigurationError(
            f"prompt {name!r}: expected the tokenizer that it was trained with (that of {prompt.base['name']!r}, "
            f"fingerprint {prompt.base['tokenizer']}), found {fingerprint}; pass that model and tokenizer."
        )


def check_weights(name: str, prompt: SoftPrompt, fingerprint: str) -> None:
    """Refuses a prompt that was trained on other weights, if both fingerprints are of the same form."""
    known = prompt.base.get("weights", "")
    are_comparable = known.partition(":")[0] == fingerprint.partition(":")[0]
    if are_comparable and known != fingerprint:
        raise ConfigurationError(
            f"prompt {name!r}: expected the weights that it was trained on (those of {prompt.base['name']!r}, "
            f"fingerprint {known}), found {fingerprint}; pass the same model. Parts that a folder lacks are "
            "initialised at random on each load: save such a model with save_pretrained, and use that folder."
        )


_KEYS = {"text", "pair", "prompt"}
_CARRIERS = (str, PromptValue, BaseMessage, Document)
"""Types that a chain passes in place of a text."""


@tells_how_to_build()
class SoftPromptClassifier(Uncopyable, PublicRunnable[Any, str]):
    """Labels texts with released soft prompts: by label words, or by a sequence-classification head.

    An input is a text (also a prompt value, a message or a document), or a dict with "text", optionally "pair" (a
    second text) and "prompt" (the name of the soft prompt). Several prompts share one model, and a batch runs together
    also with different prompts of one length. Inputs must be PUBLIC; serving is free.

    Args:
      model: a model object or a local folder, of the kind that the prompts were trained on; for a causal one also a
        `HuggingFaceBackend`. A classifier from a folder gets the head that the prompts carry; the head of an object
        must be equal to it.
      prompts: one prompt, or several by name.
      tokenizer: with a model object.
      default: name of the prompt of inputs that name none; None: the only prompt.
      batch_size: texts per model call.
      device: "cpu", "cuda", ...; None: a folder is loaded to "cuda" if available, an object is not moved.
      dtype: "float32", "bfloat16" or "float16" for a folder; None: as saved.

    Raises:
      ConfigurationError: an unknown name, prompts of several kinds, a prompt of another model or tokenizer, or one that
        writes free text.
      CapabilityError: the model does not support such a prompt.
      ModelCallError: memory ran out.
    """

    _pickle_advice = _A_MODEL

    def __init__(
        self,
        model: Any,
        prompts: SoftPrompt | Mapping[str, SoftPrompt],
        *,
        tokenizer: Any = None,
        default: str | None = None,
        batch_size: int = 16,
        device: str | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__()
        self.prompts = named_prompts(prompts)
        self.default = default_prompt_name(self.prompts, default)
        kinds = {prompt.task.kind for prompt in self.prompts.values()}
        if len(kinds) > 1:
            raise fail("prompts", "tasks of one kind, because they share a model", sorted(kinds))
        if writes := [name for name, prompt in self.prompts.items() if prompt.task.writes_text]:
            raise fail("prompts", "tasks with labels", writes, "Serve tasks that write text with SoftPromptBackend.")
        [kind] = kinds
        self._scorer = _scorer(
            *model_parts(model, tokenizer),
            kind=kind,
            batch_size=check_int("batch_size", batch_size, low=1),
            device=device,
            dtype=dtype,
        )
        for name, prompt in self.prompts.items():
            heads = prompt.peft_config.get("num_attention_heads")
            numbers = prompt.arrays[ARRAY]
            fingerprint = self._scorer.put(
                name, prompt.method, numbers, task=prompt.task, heads=heads, head=prompt.head
            )
            check_tokenizer(name, prompt, fingerprint)
            check_weights(name, prompt, self._scorer.weights())

    def scores(self, inputs: Sequence[str | Mapping[str, str]]) -> list[dict[str, float]]:
        """Returns, for each input, the probability of each label of its prompt's task, in the order of the labels.

        Args:
          inputs: a list of texts or dicts.

        Raises:
          ConfigurationError: an input is malformed, or names no prompt.
          ModelCallError: the model failed.
        """
        if isinstance(inputs, (str, bytes, Mapping)):
            raise fail("inputs", "a list", type(inputs).__name__, "Put a single input into a list.")
        asked = [self._question(one_input) for one_input in inputs]
        probabilities = self._scorer.scores(asked)
        return [
            dict(zip(self.prompts[one.prompt].task.labels, shares.tolist(), strict=True))
            for one, shares in zip(asked, probabilities, strict=True)
        ]

    async def ascores(self, inputs: Sequence[str | Mapping[str, str]]) -> list[dict[str, float]]:
        """Async version of `scores`, in a worker thread; a cancelled call ends with the model's work."""
        return await run_in_thread(lambda: self.scores(inputs))

    def __repr__(self) -> str:
        return f"SoftPromptClassifier({self._scorer.name!r}, prompts={sorted(self.prompts)}, default={self.default!r})"

    def _walk(
        self, inputs: Sequence[Any], configs: Sequence[RunnableConfig], *, keep_errors: bool = False
    ) -> EffectGenerator[list[str | Exception]]:
        del configs, keep_errors  # LangChain raises the first error where none is kept
        answers: list[str | Exception] = yield Blocking(lambda: self._answers(inputs))
        return answers

    def _answers(self, inputs: Sequence[Any]) -> list[str | Exception]:
        """Returns the label of each input, or its error."""
        asked = [self._question_or_error(one_input) for one_input in inputs]
        questions = [one for one in asked if not isinstance(one, Exception)]
        probabilities = iter(self._scorer.scores(questions))
        return [
            one
            if isinstance(one, Exception)
            else self.prompts[one.prompt].task.labels[int(next(probabilities).argmax())]
            for one in asked
        ]

    def _question_or_error(self, one_input: Any) -> ScoringInput | ConfigurationError:
        try:
            return self._question(one_input)
        except ConfigurationError as error:
            return error

    def _question(self, one_input: Any) -> ScoringInput:
        from langchain_dpicl.backends.tuning.engine import ScoringInput

        fields = {"text": public_text("input", one_input)} if isinstance(one_input, _CARRIERS) else one_input
        if not isinstance(fields, Mapping) or "text" not in fields or not set(fields) <= _KEYS:
            actual = sorted(map(str, fields)) if isinstance(fields, Mapping) else type(one_input).__name__
            raise fail("input", 'a text, or a dict of "text", "pair" and "prompt"', actual)
        if strange := sorted(key for key, value in fields.items() if not isinstance(value, str)):
            raise fail("input", "texts", f"something else under {strange}")
        name = fields.get("prompt", self.default or "")
        if name not in self.prompts:
            raise fail("input", f'under "prompt" one of {sorted(self.prompts)}', name)
        task = self.prompts[name].task
        if task.kind != "sequence_classification" and task.takes_pair != ("pair" in fields):
            raise fail("input", f'{"a" if task.takes_pair else "no"} "pair", as the template shows', sorted(fields))
        return ScoringInput(name, fields["text"], fields.get("pair"))


def _scorer(
    model: Any, tokenizer: Any, *, kind: TaskKind, batch_size: int, device: str | None, dtype: str | None
) -> SoftPromptScorer:
    is_own = isinstance(model, str | os.PathLike)
    model, tokenizer, _ = loading.load(model, tokenizer, device=device, dtype=dtype, kind=kind)
    from langchain_dpicl.backends.tuning.engine import SoftPromptScorer  # imports torch, which `load` has checked for

    return SoftPromptScorer(model, tokenizer, kind=kind, batch_size=batch_size, is_own=is_own)
