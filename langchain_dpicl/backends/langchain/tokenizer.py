"""The public tokenizer of a model: how its tokens are spelled in bytes."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from langchain_dpicl.exceptions import CapabilityError, ConfigurationError

CONTROL = b""
"""The bytes of a control token: none, so it ends a text."""

_MAX_ID = 2**31 - 1
_SPACE = "\u2581"  # how SentencePiece writes a space
_ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SAMPLE = "\u00e9"  # two bytes in UTF-8, and another letter in either way of writing tokens


@runtime_checkable
class Tokenizer(Protocol):
    """Turns text into token ids: a `tiktoken.Encoding`, a tokenizer of transformers, or anything with `encode`."""

    def encode(self, text: str) -> Any:
        """Returns the ids of a text."""


class PublicTokenizer:
    """A tokenizer as the engines use it: counting and spelling, without ever raising for an id.

    Args:
      tokenizer: one with `encode`, or the name of an encoding of tiktoken, which is loaded at its first use.

    Raises:
      ConfigurationError: it is neither, or tiktoken knows no encoding of that name.
    """

    def __init__(self, tokenizer: Tokenizer | str) -> None:
        if not isinstance(tokenizer, str) and not callable(getattr(tokenizer, "encode", None)):
            raise ConfigurationError(
                "expected tokenizer as an object with encode(text), such as a tiktoken.Encoding or a tokenizer of "
                f"transformers, or the name of a tiktoken encoding, found {type(tokenizer).__name__}"
            )
        self._given = tokenizer
        self._spell: Callable[[int], bytes | None] | None = None
        self._known: dict[int, bytes] = {}
        self._lock = threading.Lock()
        if isinstance(tokenizer, str):
            _refuse_unknown(tokenizer)
        else:
            self.load()

    def __repr__(self) -> str:
        shown = repr(self._given) if isinstance(self._given, str) else type(self._given).__name__
        return f"PublicTokenizer({shown})"

    def count(self, text: str) -> int:
        """Returns the number of tokens of a public text."""
        return len(self._ids(text))

    def tokens(self, text: str) -> list[bytes]:
        """Returns the bytes of each token of a public text; U+FFFD for one that it does not spell.

        Raises:
          CapabilityError: it spells none.
        """
        self.load()
        if self._spell is None:
            raise CapabilityError(
                f"expected a tokenizer that spells its tokens, found {type(self._given).__name__}, which only counts; "
                "give a tiktoken.Encoding or a tokenizer of transformers"
            )
        return [self.spelled(number) or "\ufffd".encode() for number in self._ids(text)]

    def load(self) -> None:
        """Loads a named encoding now, so that `spelled` cannot fail later."""
        if self._spell is None:
            self._spell = speller(self._load())

    def spelled(self, number: int) -> bytes | None:
        """Returns the bytes of a token, `CONTROL` for a control token, None for an id that it does not know."""
        if self._spell is None or isinstance(number, bool) or not 0 <= number <= _MAX_ID:
            return None
        if number in self._known:
            return self._known[number]
        try:
            raw = self._spell(number)
        except Exception:  # noqa: BLE001  foreign code, asked about whatever id a server sent
            return None
        if isinstance(raw, bytes):
            self._known[number] = raw  # known ids only, so no more than the vocabulary
            return raw
        return None

    def _ids(self, text: str) -> Any:
        return _encode(self._load(), text.encode("utf-8", "replace").decode())

    def _load(self) -> Any:
        with self._lock:
            if isinstance(self._given, str):
                self._given = _load_encoding(self._given)
            return self._given


def speller(tokenizer: Any) -> Callable[[int], bytes | None] | None:
    """Returns a tokenizer's function from ids to bytes; None for an unknown kind of tokenizer."""
    if callable(getattr(tokenizer, "decode_single_token_bytes", None)):
        return _spells_like_tiktoken(tokenizer)
    if not callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
        return None
    sample = [str(tokenizer.convert_ids_to_tokens(number)) for number in _encode(tokenizer, _SAMPLE)]
    for read in (_byte_level, _piece):
        if b"".join(read(token) or b"?" for token in sample).strip() == _SAMPLE.encode():
            return _spells_like_transformers(tokenizer, read)
    return None


def _refuse_unknown(name: str) -> None:
    import tiktoken

    if name not in tiktoken.list_encoding_names():
        raise ConfigurationError(
            f"expected tokenizer as one of tiktoken's encodings {tiktoken.list_encoding_names()}, found {name!r}"
        )


def _load_encoding(name: str) -> Any:
    import tiktoken

    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no network, no room for the file, or another file than it should be
        raise ConfigurationError(
            f"the encoding {name!r} of tiktoken cannot be loaded ({type(error).__name__}): it is downloaded at its "
            "first use. Allow the network once, or set TIKTOKEN_CACHE_DIR to a folder that holds it; or pass a "
            "tiktoken.Encoding of your own, or leave tokenizer out"
        ) from error


def _encode(tokenizer: Any, text: str) -> Any:
    """Returns the ids of a text, in which control tokens are plain text."""
    if callable(getattr(tokenizer, "encode_ordinary", None)):
        return tokenizer.encode_ordinary(text)
    if callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
        return tokenizer.encode(text, add_special_tokens=False)
    encoding = tokenizer.encode(text)
    return getattr(encoding, "ids", encoding)  # the tokenizers package returns an object that has them


def _spells_like_tiktoken(encoding: Any) -> Callable[[int], bytes | None]:
    is_control = getattr(encoding, "is_special_token", None)

    def spell(number: int) -> bytes | None:
        if is_control is not None and is_control(number):
            return CONTROL
        raw: bytes = encoding.decode_single_token_bytes(number)  # KeyError for an unknown id
        return raw

    return spell


def _spells_like_transformers(tokenizer: Any, read: Callable[[str], bytes | None]) -> Callable[[int], bytes | None]:
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", None) or {}
    control = {*(getattr(tokenizer, "all_special_ids", None) or ())}
    control |= {number for number, token in added.items() if getattr(token, "special", False)}
    unknown = getattr(tokenizer, "unk_token_id", None)

    def spell(number: int) -> bytes | None:
        token = tokenizer.convert_ids_to_tokens(number)
        # Older tokenizers answer an id that they do not know with the unknown token.
        if not isinstance(token, str) or number == unknown or token == getattr(tokenizer, "unk_token", None):
            return None
        if number in control:
            return CONTROL
        return token.encode() if number in added else read(token)

    return spell


def _byte_level(token: str) -> bytes | None:
    """Reads a token as GPT-2's descendants write it: one printable character per byte."""
    try:
        return bytes(map(byte_alphabet().__getitem__, token))
    except KeyError:
        return None


def _piece(token: str) -> bytes | None:
    """Reads a token as SentencePiece writes it: text with marked spaces, or one byte as <0xHH>."""
    byte = _ONE_BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Returns the byte behind each printable character: most stand for themselves, the others are shifted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(moved)}
