"""How a Hugging Face tokenizer spells its tokens, and how prompts and PUBLIC messages become rows of token ids."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from langchain_dpicl._opaque import run_guarded
from langchain_dpicl.backends.langchain.tokenizer import byte_alphabet
from langchain_dpicl.exceptions import ConfigurationError

_ANCHORS = ("\n", "|", "a")
"""Texts put before a continuation if the tokenizer would otherwise add a space."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTENT = "zqcontentqz"
"""Replaces the user's message while the chat template is split."""


class TokenizerMaps:
    """What the engine needs of a tokenizer.

    Args:
      tokenizer: of the transformers package.
      chat: whether prompts are messages of a user; None: if there is a chat template.

    Raises:
      ConfigurationError: the chat template is missing or cannot be taken apart.
    """

    def __init__(self, tokenizer: Any, *, chat: bool | None) -> None:
        self._tokenizer = tokenizer
        self._ids = _encoder(tokenizer)
        self.size = max(tokenizer.get_vocab().values()) + 1
        added = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items()}
        template = tokenizer.chat_template if isinstance(getattr(tokenizer, "chat_template", None), str) else ""
        template = template or str(getattr(tokenizer, "chat_template", None) or "")
        self._template = template
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = frozenset(special | set(tokenizer.all_special_ids))
        # White space is ordinary text also where it is an added token, as Gemma's line breaks are. Other added tokens
        # are read as letters, and so are those that would take the spaces around them.
        strips = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.lstrip or token.rstrip}
        read = {id_: text for id_, text in added.items() if text and (text.strip() or id_ in self.special | strips)}
        odd = {id_: text for id_, text in read.items() if text.strip() and (id_ in self.special or not text.isalnum())}
        self.markers = self.special | {id_ for id_, text in odd.items() if len(text) > 1 and text in template}
        self._added = added
        self._odd = frozenset(odd.values())
        texts = sorted({text for text in read.values() if len(text) > 1}, key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, texts))) if texts else None
        self.eos: int | None = tokenizer.eos_token_id
        self.chat = bool(template) if chat is None else chat
        if self.chat and not template:
            raise ConfigurationError("expected a tokenizer with a chat template for chat=True; pass chat=False")
        self.header, self.footer = self._frame()

    @functools.cached_property
    def fingerprint(self) -> str:
        """A public hash of the tokenizer: equal for equal vocabularies."""
        entries = sorted(self._tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
        vocabulary = json.dumps([entries, sorted(self.special)], ensure_ascii=True)
        return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]

    @functools.cached_property
    def rules(self) -> str:
        """A public hash of all that makes ids of texts and messages: vocabulary, merges, chat template and frame."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        how: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
        how |= {"truncation": None, "padding": None}  # as of `_encoder`
        known = [self.fingerprint, how, self.chat, self._template, self.header, self.footer]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]

    @functools.cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes that each id adds to a text; special tokens and ids without a token add none."""
        names: list[str | None] = [None] * self.size
        for name, id_ in self._tokenizer.get_vocab().items():
            names[id_] = name
        spell = _speller(self._tokenizer)
        return tuple([self._bytes_of(id_, name, spell) for id_, name in enumerate(names)])

    def _bytes_of(self, id_: int, name: str | None, spell: Callable[[str], bytes]) -> bytes:
        if name is None or id_ in self.special:
            return b""
        # Gemma's runs of spaces are added tokens, which are spelled as its other pieces are.
        return self._added[id_].encode() if id_ in self._added and spell is not _bytes_of_piece else spell(name)

    @property
    def known(self) -> frozenset[int]:
        """The ids that have a token."""
        return frozenset(self._tokenizer.get_vocab().values())

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a plain text."""
        first, *others = self._plain(text)
        ids = self._ids(first, False)
        for piece in others:
            ids += self._ids_behind(piece)
        return [id_ for id_ in ids if id_ not in self.markers]

    def knows(self, text: str) -> bool:
        """Whether every part of a text has a token; `encode` leaves out the unknown ones."""
        unknown = self._tokenizer.unk_token_id
        return not any(unknown in self._ids(piece, False) for piece in self._plain(text))

    def special_in(self, text: str) -> list[str]:
        """Returns the tokens of chats, and others that are no words, that a text spells: `encode` reads letters."""
        return sorted(name for name in self._odd if name in text)

    def continued(self, text: str) -> list[int]:
        """Returns the ids of a text that follows other text: no space is added before it."""
        ids = [id_ for piece in self._plain(text) for id_ in self._ids_behind(piece)]
        return [id_ for id_ in ids if id_ not in self.markers]

    def _ids_behind(self, piece: str) -> list[int]:
        if self._begins_with_space:
            for anchor in _ANCHORS:
                alone, both = self._ids(anchor, False), self._ids(anchor + piece, False)
                if both[: len(alone)] == alone:
                    return both[len(alone) :]
        return self._ids(piece, False)

    def count(self, text: str) -> int:
        """Returns the number of tokens of a text."""
        return len(self.encode(text))

    @functools.cached_property
    def _begins_with_space(self) -> bool:
        return b"".join(self.token_bytes[id_] for id_ in self._ids("a", False)) != b"a"

    def _plain(self, text: str) -> Iterator[str]:
        """Yields a text in pieces without special tokens; broken characters are replaced."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        begin = 0
        # From the next character on, so that spellings that overlap are all found. Looking ahead in one pattern would
        # try every spelling at every place, and there may be thousands.
        while self._marker is not None and (marker := self._marker.search(text, begin)):
            yield text[begin : marker.start() + 1]
            begin = marker.start() + 1
        yield text[begin:]

    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ids before and after every prompt."""
        if not self.chat:
            plain, marked = self._ids("a", False), self._ids("a", True)
            before = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
            return tuple(marked[:before]), ()
        pieces = self._shown_alone.split(_CONTENT)
        if len(pieces) != 2:
            raise ConfigurationError(
                f"expected a chat template that shows the user's message once, found it {len(pieces) - 1} times; "
                "pass chat=False, or a tokenizer with another template"
            )
        return tuple(self._ids(pieces[0], False)), tuple(self._ids(pieces[1], False))

    @functools.cached_property
    def answers_after_space(self) -> bool:
        """Whether the chat template ends with white space before the answer."""
        return self._shown_alone[-1:].isspace()

    @functools.cached_property
    def _shown_alone(self) -> str:
        """The chat template's text around a stand-in for the user's message, up to the answer."""
        messages = [{"role": "user", "content": _CONTENT}]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates raise anything; the content is a stand-in
            raise ConfigurationError(
                f"expected a chat template that shows a user's message alone, found one that does not "
                f"({type(error).__name__}: {error}); pass chat=False, or a tokenizer with another template"
            ) from error


def _encoder(tokenizer: Any) -> Callable[[str, bool], list[int]]:
    """Returns what encodes a text, with or without the special tokens around every text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text, framed: (
            list(tokenizer.encode(text, add_special_tokens=framed, verbose=False)) if text else []
        )
    own = copy.deepcopy(backend)
    own.no_truncation()
    own.no_padding()
    return lambda text, framed: list(own.encode(text, add_special_tokens=framed).ids) if text else []


def _speller(tokenizer: Any) -> Callable[[str], bytes]:
    """Returns the function from a token's name to its bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoders = json.loads(backend.to_str()).get("decoder") if backend is not None else None
    kinds = {one.get("type") for one in _flat(decoders)}
    if "ByteLevel" in kinds or hasattr(tokenizer, "byte_decoder"):
        return _bytes_of_letters
    return _bytes_of_piece


def _flat(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder:
        yield decoder
        for inner in decoder.get("decoders", ()):
            yield from _flat(inner)


def _bytes_of_letters(name: str) -> bytes:
    letters = byte_alphabet()
    return bytes(letters[letter] for letter in name) if all(map(letters.__contains__, name)) else name.encode()


def _bytes_of_piece(name: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(name):
        return bytes([int(byte[1], 16)])
    return name.replace("\u2581", " ").encode("utf-8", "replace")


# Rows are made inside `run_guarded`: whatever a text makes a tokenizer raise is its own row's fault.
_WORTH_SHARING = 16
"""A shorter beginning is read with every row, which costs less than caching it."""


class Prompts:
    """Turns prompts into rows of ids.

    Args:
      tokens: the tokenizer's maps.
      eos: the end of the text, which begins an empty one where there is no other start.
    """

    def __init__(self, tokens: TokenizerMaps, *, eos: int) -> None:
        self.tokens = tokens
        self._start = tokens.header or (eos,)

    def begun(self, shared: str, *, cap: int) -> tuple[int, ...]:
        """Returns the ids that all prompts begin with; refuses a public text that leaves no room for a prompt."""
        ids = (*self.tokens.header, *self.tokens.encode(shared))
        if len(ids) + len(self.tokens.footer) >= cap:
            raise ConfigurationError(
                f"expected public text of fewer than {cap} tokens before and after a prompt, found "
                f"{len(ids) + len(self.tokens.footer)}; raise max_prompt_tokens"
            )
        return ids

    @staticmethod
    def apart(begun: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the part of the beginning that is read once for all rows; its last id stays with every row."""
        return begun[:-1] if len(begun) > _WORTH_SHARING else ()

    def rows(
        self, prompts: Sequence[str | None], *, shared: str, begun: tuple[int, ...], cap: int
    ) -> list[list[int] | None]:
        """Returns rows of at most `cap` ids each; None where a prompt is None or cannot be read."""
        return [
            None if prompt is None else run_guarded(lambda prompt=prompt: self._row(prompt, shared, begun, cap))  # type: ignore[misc]
            for prompt in prompts
        ]

    def _row(self, prompt: str, shared: str, begun: tuple[int, ...], cap: int) -> list[int] | None:
        if not prompt.startswith(shared):
            return None
        rest = prompt[len(shared) :]
        if not self.tokens.chat:
            rest = rest.rstrip(" ")
        ids = self.tokens.continued(rest) if shared else self.tokens.encode(rest)
        footer = self.tokens.footer
        ids = cut_middle(ids, cap - len(begun) - len(footer), head=0 if shared else None)
        return [*begun, *ids, *footer] or list(self._start)


def cut_middle(ids: list[int], room: int, *, head: int | None = None) -> list[int]:
    """Returns at most `room` ids: the first `head` (None: a quarter of the room) and the last ones.

    >>> cut_middle([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    [1, 7, 8, 9]
    """
    if len(ids) <= room:
        return ids
    head = room // 4 if head is None else head
    return ids[:head] + ids[len(ids) - (room - head) :]


# The template is applied to stand-ins, and the contents are inserted afterwards as plain text: no content can imitate
# another role. A single user message gives the ids of a private prompt of the same text.
_STAND_IN = re.compile(r"zqcontent(\d+)qz")


def render(tokens: TokenizerMaps, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Returns the ids of messages ({"role": ..., "content": ...}), up to the beginning of the next one.

    A last assistant message is left open, to be continued. Where the template refuses the roles (many want user and
    assistant in turns, and no system), neighbours of one role are joined, and system messages become the user's.
    """
    if not messages:
        raise ConfigurationError("expected at least one message, found none")
    tokenizer = tokens._tokenizer  # noqa: SLF001  its maps know plain text alone
    problem = ""
    for turns in (messages, _in_turns(messages)):
        try:
            pieces = _pieces(tokenizer, turns)
        except Exception as error:  # noqa: BLE001  templates raise anything; contents are stand-ins
            problem = f"{type(error).__name__}: {error}"
            continue
        ids: list[int] = []
        for piece, message in zip(pieces, [*turns, None], strict=True):
            ids += tokenizer.encode(piece, add_special_tokens=False) if piece else []
            ids += tokens.encode(message["content"]) if message is not None else []
        return ids
    roles = [message["role"] for message in messages]
    msg = (
        f"expected messages that the chat template can show, found roles {roles} ({problem}); reorder or leave some out"
    )
    raise ConfigurationError(msg)


def _pieces(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the template's text before each message and after the last."""
    is_open = messages[-1]["role"] == "assistant"
    stand_ins = [{"role": message["role"], "content": f"zqcontent{place}qz"} for place, message in enumerate(messages)]
    shown = str(tokenizer.apply_chat_template(stand_ins, tokenize=False, add_generation_prompt=not is_open))
    places = [int(place) for place in _STAND_IN.findall(shown)]
    if places != [*range(len(messages))]:
        msg = f"expected a chat template that shows each message once and in order, found messages {places}"
        raise ConfigurationError(f"{msg}; pass a tokenizer with another template")
    pieces = _STAND_IN.sub("\0", shown).split("\0")
    return [*pieces[:-1], ""] if is_open else pieces


def _in_turns(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns messages by user and assistant in turns."""

    def role(message: Mapping[str, str]) -> str:
        return "user" if message["role"] == "system" else message["role"]

    return [
        {"role": speaker, "content": "\n\n".join(message["content"] for message in turn)}
        for speaker, turn in groupby(messages, role)
    ]
