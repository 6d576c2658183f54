"""Signs files of reports and releases with Ed25519, and verifies the signatures."""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_dpicl._plain_files import read_plain, unique_keys
from langchain_dpicl.exceptions import ConfigurationError, LedgerError
from langchain_dpicl.privacy._validate import check_name, fail, is_name
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.ledger.state import LedgerState
from langchain_dpicl.privacy.ledger.store import in_blocks

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    from langchain_dpicl.privacy.ledger.store import LedgerHeader, LedgerStore

FileName: TypeAlias = "str | os.PathLike[str]"

FORMAT, VERSION = "langchain-dpicl/signature", 1
MOST_BYTES = 256 * 2**20
"""Largest file that is signed or verified."""
MOST_OF_SIGNATURE = _MOST_OF_KEY = 64 * 1024
_PURPOSE = b"langchain-dpicl signature 1\n"
"""Stands before what is signed, so that a signature of ours is none of another protocol."""
_OF_PAGE = re.compile(rb"<td>ledger</td><td>([^<]{1,200})</td>")
"""Where a report's page names its ledger."""
_MADE_BY = "Make one with `ssh-keygen -t ed25519 -N '' -f KEY`, or `openssl genpkey -algorithm ed25519 -out KEY`."


@dataclass(frozen=True, slots=True)
class Signature:
    """A signed statement about one file; everything in it is public.

    Attributes:
      sha256: of the bytes of the file, hex.
      ledger: `ledger_id`, `line` and `hash` of the last line of a ledger at that time; None: no ledger was named.
      signer: who signs, in the signer's own words.
      public_key: Ed25519, 32 bytes as base64. Compare it with a key that you got in another way.
      value: the signature, 64 bytes as base64.
    """

    sha256: str
    ledger: Mapping[str, Any] | None
    signer: str
    public_key: str
    value: str

    def to_json(self) -> str:
        """Returns the text of a signature file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Signature:
        """Reads the text of a signature file.

        Raises:
          ConfigurationError: it is no signature of this version.
        """
        expected = f"a signature file of format {FORMAT!r}, version {VERSION}"
        try:
            data = json.loads(text, object_pairs_hook=unique_keys)
            if (data.pop("format"), data.pop("version")) == (FORMAT, VERSION):
                return cls(**_checked(data))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        raise fail("signature", expected, "something else", "Sign the file anew with `dpicl report sign`.")


def _checked(data: dict[str, Any]) -> dict[str, Any]:
    ledger = data["ledger"]
    texts = [data[name] for name in ("sha256", "signer", "public_key", "value")]
    if ledger is not None:
        texts.extend((ledger["ledger_id"], ledger["hash"]))
        if set(ledger) != {"ledger_id", "line", "hash"} or type(ledger["line"]) is not int or ledger["line"] < 0:
            raise ValueError
    if not all(map(is_name, texts)):  # printable: they are shown
        raise TypeError
    return data


def sign_file(path: FileName, *, key: FileName, ledger: LedgerStore | None = None, signer: str = "-") -> Signature:
    """Signs the bytes of a file: a report as JSON or HTML, or a saved release.

    Formal guarantees:
      - The signature covers the file's bytes, the last line of `ledger` and `signer`; changing any of them breaks it.
      - It says that who holds the key signed the file. It says neither when, nor that the file is right: verify the
        report as well.

    Args:
      path: the file, at most 256 MB.
      key: file of an Ed25519 private key without a password, PEM or OpenSSH.
      ledger: ledger whose last line is named in the signature, so that one that is set back later is found. All of its
        lines are recomputed.
      signer: public name of who signs.

    Raises:
      ConfigurationError: the key is no such key, the file is no plain file or names another ledger, or `cryptography`
        is not installed.
      LedgerError: the ledger cannot be read, or is broken.
    """
    private, data = _private_key(key), read_signed(path)
    public = _base64(private.public_key().public_bytes_raw())
    head = _head_of(ledger)
    if head is not None and (other := _other_ledger(data, head)):
        raise fail("ledger", f"{other}, which the file names", head["ledger_id"], "Sign it with its own ledger.")
    unsigned = Signature(_digest(data), head, check_name("signer", signer), public, "")
    return dataclasses.replace(unsigned, value=_base64(private.sign(_statement(unsigned))))


def problems_of(
    data: bytes, signature: Signature, *, public_key: FileName, ledger: LedgerStore | None = None
) -> Iterator[str]:
    """Says what is wrong with a signature; nothing means that the holder of the key signed exactly these bytes.

    Args:
      data: the signed file, from `read_signed`.
      signature: what was kept beside it.
      public_key: file of the Ed25519 public key that you trust, PEM or OpenSSH.
      ledger: the ledger today; all of its lines are recomputed, and it must still hold the one that was signed.

    Raises:
      ConfigurationError: the key is no such key, or `cryptography` is not installed.
      LedgerError: the ledger cannot be read.
    """
    trusted = _public_key(public_key)
    from cryptography.exceptions import InvalidSignature

    if signature.public_key != _base64(trusted.public_bytes_raw()):
        yield "key: the file was signed with another key than the one given"
    if signature.sha256 != _digest(data):
        yield "file: it was changed after it was signed"
    try:
        trusted.verify(base64.b64decode(signature.value, validate=True), _statement(signature))
    except (InvalidSignature, binascii.Error, ValueError):
        yield "signature: it does not fit this key and this statement"
    if signature.ledger is not None and _other_ledger(data, signature.ledger):
        yield "ledger: the file names another one than its signature"
    if ledger is not None:
        yield from _ledger_problems(signature.ledger, ledger)


def _ledger_problems(signed: Mapping[str, Any] | None, ledger: LedgerStore) -> Iterator[str]:
    header = ledger.header()
    if signed is None:
        yield "ledger: the signature names none"
    elif header is None or header.ledger_id != signed["ledger_id"]:
        yield "ledger: the signature names another one"
    else:
        try:
            (_, found), line = _recomputed(ledger, header, signed["line"]), signed["line"]
        except LedgerError as error:
            yield f"ledger: it is broken; {error}"
        else:
            if found != signed["hash"]:
                yield f"ledger: line {line} is not the one that was signed; the ledger was set back or changed"


def _head_of(ledger: LedgerStore | None) -> dict[str, Any] | None:
    if ledger is None:
        return None
    header = ledger.header()
    if header is None:
        raise fail("ledger", "one that was created", "none")
    line, digest = _recomputed(ledger, header)
    return {"ledger_id": header.ledger_id, "line": line, "hash": digest}


def _recomputed(ledger: LedgerStore, header: LedgerHeader, line: int | None = None) -> tuple[int, str | None]:
    """Applies every line to a new state; returns number and hash of the last one, or of `line`, None where it lacks."""
    state = LedgerState(header)
    wanted = header.digest if line == 0 else None
    for block in in_blocks(ledger):
        if line is not None and state.seq < line <= state.seq + len(block):
            wanted = block[line - state.seq - 1].hash
        state.apply_all(block)
    return (state.seq, state.head) if line is None else (line, wanted)


def _other_ledger(data: bytes, signed: Mapping[str, Any]) -> str | None:
    """Returns the ledger that a report, its page or a release names, if it is another than the one that is signed."""
    return next((name for name in _ledgers_of(data) if name != signed["ledger_id"]), None)


def _ledgers_of(data: bytes) -> Iterator[str]:
    yield from (found[1].decode("utf-8", "replace") for found in _OF_PAGE.finditer(data))
    try:
        unread: list[Any] = [json.loads(data)]
    except (ValueError, RecursionError):  # no JSON: it names none
        return
    while unread:
        one = unread.pop()
        if isinstance(one, Mapping):
            unread += (one.get(name) for name in ("report", "budget", "ledger"))
            if isinstance(name := one.get("ledger_id"), str):
                yield name


def _statement(signature: Signature) -> bytes:
    """The bytes that are signed: everything in the signature but its value."""
    return _PURPOSE + canonical_json({**dataclasses.asdict(signature), "value": ""}).encode()


def read_signed(path: FileName) -> bytes:
    """Returns the bytes of a file to be signed or verified."""
    return read_plain(path, MOST_BYTES)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _private_key(path: FileName) -> Ed25519PrivateKey:
    forms = _forms()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    readers = forms.load_pem_private_key, forms.load_ssh_private_key
    found = _loaded(path, *(partial(read, password=None) for read in readers))
    if not isinstance(found, Ed25519PrivateKey):
        raise fail("key", "the file of an Ed25519 private key without a password", "something else", _MADE_BY)
    return found


def _public_key(path: FileName) -> Ed25519PublicKey:
    forms = _forms()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    found = _loaded(path, forms.load_pem_public_key, forms.load_ssh_public_key)
    if not isinstance(found, Ed25519PublicKey):
        advice = "KEY.pub of ssh-keygen, or the output of `openssl pkey -in KEY -pubout`."
        raise fail("key", "the file of an Ed25519 public key", "something else", advice)
    return found


def _loaded(path: FileName, *readers: Any) -> object:
    """Returns what the first reader that can read the file makes of it; None where none can."""
    try:
        is_key = b"-----BEGIN" in os.fsencode(path)  # of what is opened, whatever str() shows
    except TypeError:  # no path, but a bytearray is opened as one
        is_key = "-----BEGIN" in str(path)
    except ValueError:  # refused as it is read
        is_key = False
    if is_key:
        raise fail("key", "the path of the file of a key", "the text of a key", "Keep it in a file.")
    data = read_plain(path, _MOST_OF_KEY)
    for read in readers:
        with contextlib.suppress(Exception):  # its messages may quote the key
            return read(data)
    return None


def _forms() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        raise ConfigurationError(
            "signature: expected cryptography, found none. Install langchain-dpicl[sign]."
        ) from None
    return serialization
