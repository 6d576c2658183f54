"""Local Hugging Face models as an engine: the whole vocabulary, in batches, with a cache per session."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from langchain_dpicl._opaque import CopiedAsItself
from langchain_dpicl.backends.base import FullSession, Rows, Token, check_whole
from langchain_dpicl.backends.hf import loading
from langchain_dpicl.backends.hf.tokens import cut_middle
from langchain_dpicl.backends.sync_async import AwaitedInThreads
from langchain_dpicl.exceptions import ConfigurationError, DPICLError, ModelCallError, PrivateAccessError

if TYPE_CHECKING:
    from langchain_dpicl.backends.hf.engine import Engine, LocalSession, PublicPredictor
    from langchain_dpicl.backends.hf.tokens import Prompts

# A row's bits depend on its own prompt and on public facts alone, so replacing one prompt leaves all others bit-
# identical. Nothing is downloaded, and no code of a model's repository runs.
# A space at a prompt's end is dropped (tokens start with theirs), special tokens in it are plain text, and the middle
# of a prompt longer than `max_prompt_tokens` is cut out: the public beginning (`shared`, the head of a chat template)
# or else the first quarter stays, and the end. All of that happens inside the prompt's own row.
Ints = NDArray[np.int64]
T = TypeVar("T")


class HuggingFaceBackend(AwaitedInThreads, CopiedAsItself):
    """A causal language model of the transformers package as an engine.

    Formal guarantees:
      - A row is a function of its own prompt, public arguments and the machine, to the last bit: prompts run at
        public batch sizes and one public length. Each shape is tried out with public text at its first use; where
        rows move each other all the same, they run one by one.
      - Models that compute a row from others (batch normalisation, experts of limited capacity, activations
        quantised at run time) are refused; mixtures of experts run one row at a time.

    Args:
      model: a model object, or the path of a local folder. An object keeps its weights, dtype and device, and is put
        into evaluation mode.
      tokenizer: its tokenizer, or a path; None: from the model's folder.
      max_prompt_tokens: length that every prompt is padded or cut to; public.
      max_new_tokens: tokens for which a session makes room by default; it grows.
      row_batch: rows that run together where their number is secret.
      device: "cpu", "cuda", "cuda:1", ...; None: a folder is loaded to "cuda" if there is one, an object stays.
      dtype: "float32", "bfloat16" or "float16" for a folder; None: as it was saved.
      chat: whether a prompt is a user's message that an assistant answers; None: if there is a chat template.
      eos_token_id: id, or ids, that end a text; None: what tokenizer and model name. All of them count as the first.
      name: public name for reports; None: the model's own.

    Raises:
      ConfigurationError: no such folder, a tokenizer of another model, a model that ends no text, or lengths that do
        not fit into its context.
      CapabilityError: no causal language model, or one that is refused.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_prompt_tokens: int = 512,
        max_new_tokens: int = 128,
        row_batch: int = 16,
        device: str | None = None,
        dtype: str | None = None,
        chat: bool | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        name: str | None = None,
    ) -> None:
        sizes = {"max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens, "row_batch": row_batch}
        for option, value in sizes.items():
            check_whole(option, value)
        options: dict[str, Any] = {
            **sizes,
            "device": device,
            "dtype": dtype,
            "chat": chat,
            "eos_token_id": eos_token_id,
            "name": name,
        }
        is_from_folder = isinstance(model, str | os.PathLike) and isinstance(tokenizer, str | os.PathLike | None)
        self._recipe = (model, tokenizer, options) if is_from_folder else None
        model, tokenizer, lacking = loading.load(model, tokenizer, device=device, dtype=dtype)
        if lacking:
            raise ConfigurationError(
                f"expected a folder with all weights of the model, found none for {sorted(lacking)[:3]}, which would "
                "be made at random and answer noise; save the whole model there, with the head that writes"
            )
        facts = loading.inspect_model(model)
        limit = facts.context
        if limit is not None and max_prompt_tokens + max_new_tokens > limit:
            raise ConfigurationError(
                f"expected max_prompt_tokens + max_new_tokens <= {limit}, the model's context, found "
                f"{max_prompt_tokens} + {max_new_tokens}; lower one of them"
            )
        self.max_prompt_tokens = max_prompt_tokens
        self.max_new_tokens = max_new_tokens
        self._name = name or loading.public_name(model)
        self._prompts, self._engine = _rooms(
            model, tokenizer, facts, chat=chat, ends=eos_token_id, row_batch=row_batch, limit=limit
        )
        self._public = self._public_answers()

    def _public_answers(self) -> PublicPredictor:
        from langchain_dpicl.backends.hf.engine import PublicPredictor

        begun = self._prompts.apart(self._prompts.begun("", cap=self.max_prompt_tokens))
        return PublicPredictor(self._engine, length=self.max_prompt_tokens, room=self.max_new_tokens, begun=begun)

    def __reduce__(self) -> tuple[Callable[..., HuggingFaceBackend], tuple[Any, ...]]:
        """Pickles what was loaded from a folder as that folder's path; objects are refused."""
        if self._recipe is None:
            raise PrivateAccessError(
                "expected an engine that was loaded from a folder, found one around a model object, which is not "
                "pickled; construct HuggingFaceBackend in the other process"
            )
        model, tokenizer, options = self._recipe
        return functools.partial(HuggingFaceBackend, model, tokenizer, **options), ()

    def __repr__(self) -> str:
        return f"HuggingFaceBackend({self._name!r}, tokenizer={self.tokenizer_fingerprint!r})"

    @property
    def name(self) -> str:
        """Public name of the model, for reports."""
        return self._name

    @property
    def tokenizer_fingerprint(self) -> str:
        """Says which tokenizer this is: engines with equal ones speak of the same token ids; public."""
        return self._prompts.tokens.fingerprint

    @functools.cached_property
    def fingerprint(self) -> str:
        """Says which engine this is: equal ones generate alike, and caches take them for one; public.

        It covers weights (some numbers of each, read once), tokenizer, chat template, ends and lengths. Weights that
        have no fingerprint, such as quantised ones, are those of this object alone.
        """
        from langchain_dpicl.backends.hf import model_checks

        model, vocabulary = self._engine.body.model, self._engine.vocabulary
        weights = model_checks.fingerprint(model, by_name=True) or uuid.uuid4().hex
        config = _without_folders(model.config.to_dict())
        reading = self._prompts.tokens.rules, vocabulary.ends, self._reading_room(self.max_new_tokens)
        known = repr((weights, model.dtype, config, *reading))
        return hashlib.sha256(known.encode()).hexdigest()[:16]

    @property
    def max_top_k(self) -> int | None:
        """None: the whole vocabulary is scored."""
        return None

    @property
    def context(self) -> int | None:
        """Tokens that the model can read and write together; None: it names no limit."""
        return self._engine.limit

    @property
    def room(self) -> int | None:
        """Tokens that can be written behind a prompt; None: the model names no limit."""
        return None if self._engine.limit is None else self._engine.limit - self.max_prompt_tokens

    @property
    def eos(self) -> int:
        """The end of the text; where a model has several, all of them count as this one."""
        return self._engine.vocabulary.eos

    @property
    def chat(self) -> bool:
        """Whether a prompt is a user's message that an assistant answers."""
        return self._prompts.tokens.chat

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns PUBLIC messages ({"role": ..., "content": ...}) as a prompt of `generate`, by the chat template.

        Args:
          messages: dicts with "role" and "content", as chat templates take them.
        """
        from langchain_dpicl.backends.hf.tokens import render

        return render(self._prompts.tokens, messages)

    def vocabulary(self) -> Sequence[int]:
        """Returns the ids that can follow, in order: no start, padding or chat markers."""
        return self._engine.vocabulary.keys

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, in which special tokens are plain text.

        Args:
          text: private or public.
        """
        return self._prompts.tokens.encode(text)

    def continued(self, text: str) -> list[int]:
        """Returns the ids of a text that follows other text: no space is added before it.

        Args:
          text: private or public.
        """
        return self._prompts.tokens.continued(text)

    def count_tokens(self, text: str) -> int:
        """Returns the number of tokens of a public text."""
        return len(self.encode(text))

    def check_public(self, prompt: str) -> None:
        """Refuses a prompt that is longer than `max_prompt_tokens`, so that it would be cut.

        Args:
          prompt: PUBLIC.

        Raises:
          ModelCallError: it is longer, or cannot be read.
        """
        length = len(self._public_row(prompt, sys.maxsize))
        if length > self.max_prompt_tokens:
            raise ModelCallError(
                f"expected a public prompt of at most {self.max_prompt_tokens} tokens, found {length}. Raise "
                "max_prompt_tokens, or shorten it: the query, or what stands around it."
            )

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of one token; the end of the text, and special tokens, have none.

        Args:
          token: an id.
        """
        spelled = self._prompts.tokens.token_bytes
        return b"" if token == self.eos or not 0 <= token < len(spelled) else spelled[token]

    def decode(self, tokens: Sequence[Token]) -> str:
        """Returns the text of tokens; the end of the text gives nothing, bytes that are no UTF-8 are replaced."""
        checked = self._engine.vocabulary.checked
        return b"".join([self.token_bytes(checked(token)) for token in tokens]).decode("utf-8", "replace")

    def open(self, prompts: Sequence[str | None], prefix: Sequence[Token] = ()) -> LocalSession:
        """Starts a session on private prompts, each continued by the released `prefix`; their number stays secret.

        Opened with up to 15 tokens, a session has the bits of one to which they were pushed one by one; with more,
        they are read in blocks, and agree up to rounding.
        """
        session = self._opened(prompts, prefix, public=None, num_rows=None, shared="", max_new_tokens=None)
        if isinstance(session, DPICLError):
            del prompts
            raise session
        return session

    def open_full(
        self,
        prompts: Sequence[str | None],
        prefix: Sequence[Token] = (),
        *,
        public: str,
        num_rows: int | None,
        shared: str = "",
        max_new_tokens: int | None = None,
    ) -> LocalSession:
        """Starts a session on private prompts with the public one as one more row; see `FullBackend.open_full`."""
        options: dict[str, Any] = {"num_rows": num_rows, "shared": shared, "max_new_tokens": max_new_tokens}
        session = self._opened(prompts, prefix, public=public, **options)
        if isinstance(session, DPICLError):
            del prompts
            raise session
        return session

    @property
    def rows_at_once(self) -> int:
        """Rows of several texts that share a batch; public."""
        return self._engine.rows_at_once

    def join(self, sessions: Sequence[FullSession]) -> None:
        """Lets sessions share one batch; see `GroupBackend.join`.

        Args:
          sessions: of `open_full`, with a public number of rows, from which nothing was asked.
        """
        from langchain_dpicl.backends.hf.engine import LocalSession, join

        join([session for session in sessions if isinstance(session, LocalSession)])

    def _opened(
        self,
        prompts: Sequence[str | None],
        prefix: Sequence[Token],
        *,
        public: str | None,
        num_rows: int | None,
        shared: str,
        max_new_tokens: int | None,
    ) -> LocalSession | DPICLError:
        """Returns a session, or a public error, which is raised from a frame without prompts."""
        from langchain_dpicl.backends.hf.engine import LocalSession, PrivateRows, check_room

        room = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        try:
            ids = [self._engine.vocabulary.checked(token) for token in prefix]
            check_room(self._engine.limit, self.max_prompt_tokens + max(len(ids), max_new_tokens or 0))
            begun = self._prompts.begun(shared, cap=self.max_prompt_tokens)
            reach = max(room, len(ids))
            shape = self._engine.shape(self.max_prompt_tokens, room, self._prompts.apart(begun), reach=reach)
            if num_rows is not None and num_rows != len(prompts):
                return ConfigurationError(f"expected num_rows={num_rows} prompts, found another number of them")
            if public is not None and not public.startswith(shared):
                return ConfigurationError("expected a public prompt that begins with the shared text, found another")
        except DPICLError as error:
            return error.with_traceback(None)
        texts = [*prompts] if public is None else [public, *prompts]
        rows = self._prompts.rows(texts, shared=shared, begun=begun, cap=self.max_prompt_tokens)
        own = [row and row[len(shape.shared) :] for row in rows]
        private = PrivateRows(own, "units" if num_rows is None else "slots", shape, public is not None)
        return LocalSession(self._engine, private, ids)

    def top_tokens(self, prompt: str, prefix: Sequence[Token], *, top_k: int) -> list[tuple[Token, float]]:
        """Returns up to `top_k` (token, probability) pairs after a public prompt, likeliest first.

        Raises:
          ModelCallError: the prompt cannot be read, or is longer than `max_prompt_tokens`.
        """
        from langchain_dpicl.backends.hf.vocabulary import probabilities

        vocabulary = self._engine.vocabulary
        ids = [vocabulary.checked(token) for token in prefix]
        self.check_public(prompt)
        settled = self._public.settled(self._public_row(prompt, self.max_prompt_tokens), ids)
        row = probabilities(settled, vocabulary.candidates)[0]
        best = np.argsort(-row, kind="stable")[: max(top_k, 0)]
        return [(vocabulary.keys[place], float(row[place])) for place in best if row[place] > 0]

    def _public_row(self, prompt: str | Sequence[int], cap: int) -> list[int]:
        """Returns the ids of a public prompt, or the ids that are one (`render_chat`), cut to `cap`."""
        if not isinstance(prompt, str):
            return cut_middle(list(prompt), cap)
        begun = self._prompts.begun("", cap=cap)
        row = self._prompts.rows([prompt], shared="", begun=begun, cap=cap)[0]
        if row is None:
            raise ModelCallError("the tokenizer could not read the public prompt")
        return row

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Rows:
        """Returns float64[prompts, choices]: log-likelihood of each choice as the continuation of each prompt.

        A space is read between the two if the prompt ends or the choice starts with one; a chat template brings its
        own. A failed row is -inf everywhere.
        """
        from langchain_dpicl.backends.hf.completion import score

        return score(self._engine, self._prompts, prompts, choices, cap=self.max_prompt_tokens)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        rng: Generator | Sequence[Generator] | None = None,
    ) -> Iterator[tuple[Ints, Rows]]:
        """Yields the next token of every row int64[rows] and the rows float64[rows, ids] it was taken from.

        Rows are by token id. For PUBLIC prompts, which run together at the length of the longest; what is too long for
        the context is cut as any prompt is. It ends where the model's context does, and otherwise never. A row whose
        context ends before that of others has token -1 from then on, and a row of zeros.

        Args:
          prompts: each is continued by its own tokens; a text, or what `render_chat` returned.
          temperature: 0 takes the likeliest token.
          top_k: takes one of this many likeliest tokens.
          top_p: takes one of the likeliest tokens that together have this probability.
          rng: coins of the sampling, which protect nobody, from one source for all rows or for each; None: fresh ones.
        """
        from langchain_dpicl.backends.hf import completion, vocabulary

        taste = vocabulary.SamplingOptions(temperature, top_k, top_p, rng or Generator(PCG64()))
        rows = [self._public_row(prompt, self._reading_room(self.max_new_tokens)) for prompt in prompts]
        return completion.generate_tokens(self._engine, rows, taste, room=self.max_new_tokens)

    def by_itself(self, action: Callable[[], T]) -> T:
        """Runs an action that generates for one PRIVATE prompt, as private calls of a LangChain model do; others wait.

        Args:
          action: calls `generate`, and reads all that it needs of it.

        Raises:
          UnsilencableModelError: somebody else's hook would see the prompt.
        """
        return self._engine.by_itself(action)

    def check_silent(self) -> None:
        """Looks whether somebody else's hook would see a private prompt now.

        Raises:
          UnsilencableModelError: it would.
        """
        self._engine.body.hooks.check()

    def _reading_room(self, room: int) -> int:
        """Returns how many tokens a public prompt may have if `room` are to be written."""
        limit = self._engine.limit
        return self.max_prompt_tokens if limit is None else max(limit - room, 1)

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        public: bool = False,
    ) -> list[str]:
        """Returns one greedy completion per prompt: until EOS, `max_tokens`, or the first stop string (not included).

        Args:
          prompts: private, unless `public`; "" where one fails.
          max_tokens: most tokens of a completion; also stopped by the end of the context.
          stop: strings that end a completion, wherever they lie between tokens.
          public: whether the prompts are public: they then run at their own lengths, which is faster.
        """
        from langchain_dpicl.backends.hf import completion

        ends = tuple(word for word in stop if word)
        job = completion.CompletionRequest(max_tokens, ends, self.chat, self.token_bytes)
        if public:
            cap = self._reading_room(min(max_tokens, self.max_new_tokens))
            rows = [self._public_row(prompt, cap) for prompt in prompts]
            texts = completion.complete_public(self._engine, rows, job)
        else:
            texts = completion.complete_private(self._engine, self._prompts, prompts, job, cap=self.max_prompt_tokens)
        pairs = zip(prompts, texts, strict=True)
        return [text.removeprefix(" ") if prompt.endswith(" ") and not self.chat else text for prompt, text in pairs]


def _without_folders(config: Any) -> Any:
    """Returns a model's settings in one order, without the folders that they were read from."""
    if isinstance(config, Mapping):
        items = ((str(name), _without_folders(value)) for name, value in config.items() if name != "_name_or_path")
        return sorted(items, key=lambda item: item[0])
    if isinstance(config, set | frozenset):
        return sorted(map(repr, config))
    return config


def _rooms(
    model: Any,
    tokenizer: Any,
    facts: loading.ModelInfo,
    *,
    chat: bool | None,
    ends: int | Sequence[int] | None,
    row_batch: int,
    limit: int | None,
) -> tuple[Prompts, Engine]:
    from langchain_dpicl.backends.hf.batches import ModelBody
    from langchain_dpicl.backends.hf.engine import Engine
    from langchain_dpicl.backends.hf.tokens import Prompts, TokenizerMaps
    from langchain_dpicl.backends.hf.vocabulary import Vocabulary

    tokens = TokenizerMaps(tokenizer, chat=chat)
    vocabulary = Vocabulary(tokens, facts, ends=ends)
    body = ModelBody(model, facts, filler=vocabulary.filler)
    return Prompts(tokens, eos=vocabulary.eos), Engine(body, vocabulary, row_batch=row_batch, limit=limit)
