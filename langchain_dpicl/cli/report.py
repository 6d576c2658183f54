"""Runs `dpicl report`: sign the file of a report or a release, and verify both."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli.ledger import DONE, WRONG, CommandOutput, opened_store, write_new
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.reports.rendering import format_rounded_up

if TYPE_CHECKING:
    from langchain_dpicl.privacy.ledger.store import LedgerStore

_SUFFIX = ".signature.json"
_NOTES = """\
A key pair: `ssh-keygen -t ed25519 -N "" -f KEY` makes KEY and KEY.pub. Keep KEY secret. Give KEY.pub to
those who verify, but do not send it together with the report.
"""


def add_report(commands: Any, *, run: Callable[[argparse.Namespace], int]) -> None:
    """Adds `dpicl report` and its two commands."""
    command = commands.add_parser("report", help="sign a report or a release, and verify it", notes=_NOTES)
    command.set_defaults(run=run, act=None)
    actions = command.add_subparsers(metavar="ACTION", required=True)
    sign = _action(actions, "sign", _sign, "sign a file with an Ed25519 key")
    sign.add_argument("--key", type=Path, required=True, help="private key without a password, PEM or OpenSSH")
    sign.add_argument("--signer", default="-", help="public name of who signs")
    sign.add_argument("--out", type=Path, help=f"file to make (default: FILE{_SUFFIX})")
    verify = _action(actions, "verify", _verify, "compute a report anew, and verify its signature if --key is given")
    verify.add_argument("--key", type=Path, help="public key that you trust, PEM or OpenSSH")
    verify.add_argument("--signature", type=Path, help=f"file of the signature (default: FILE{_SUFFIX})")


def _action(
    actions: Any, name: str, act: Callable[[argparse.Namespace], CommandOutput], text: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("file", type=Path, help="report as JSON or HTML, or a release; of a soft prompt its folder")
    command.add_argument("--ledger", help="its ledger; its last line becomes part of the signature")
    command.add_argument("--name", help="which of the ledgers there (default: budget)")
    command.set_defaults(act=act)
    return command


def run_report(arguments: argparse.Namespace) -> CommandOutput:
    """Runs the command that was typed."""
    output: CommandOutput = arguments.act(arguments)
    return output


@contextlib.contextmanager
def _ledger(arguments: argparse.Namespace) -> Iterator[LedgerStore | None]:
    if arguments.ledger is None:
        yield None
        return
    with opened_store(arguments.ledger, arguments.name) as store:
        yield store


def _sign(arguments: argparse.Namespace) -> CommandOutput:
    from langchain_dpicl.reports.signatures import sign_file

    file = _file_in(arguments.file)
    for problem in _problems_beside(file, arguments.out):
        raise ConfigurationError(f"{problem}. A signature of this folder would not verify.")
    with _ledger(arguments) as store:
        signature = sign_file(file, key=arguments.key, ledger=store, signer=arguments.signer)
    out = arguments.out or _beside(file)
    write_new(out, signature.to_json())
    line = "" if signature.ledger is None else f", with line {signature.ledger['line']} of its ledger"
    return CommandOutput(DONE, f"{file} is signed in {out}{line}")


def _file_in(path: Path) -> Path:
    """Returns the file that is signed: of a soft prompt the one that holds the digests of the others."""
    from langchain_dpicl.released.soft_prompt import OURS

    return path / OURS if path.is_dir() else path


def _beside(path: Path) -> Path:
    return path.with_name(path.name + _SUFFIX)


def _verify(arguments: argparse.Namespace) -> CommandOutput:
    from langchain_dpicl.reports.signatures import read_signed

    is_page = arguments.file.suffix.lower() in {".html", ".htm"}
    if arguments.key is None and (is_page or arguments.signature is not None or arguments.ledger is not None):
        advice = "A signature needs one, and of a page nothing else is verified."
        raise ConfigurationError(f"--key: expected the public key that you trust, found none. {advice}")
    file = _file_in(arguments.file)
    data = read_signed(file)
    problems: list[str] = []
    words = ["  prices     not computed anew: this is a page; verify the JSON report too"]
    if not is_page:
        words, problems = _recomputed(data)
        problems.extend(_problems_beside(file, arguments.signature))
    if arguments.key is None:
        words.append("  signature  not verified: no --key was given")
    else:
        said, wrong = _unsigned(data, file, arguments)
        problems.extend(wrong)
        words.extend(("  signature  NOT verified",) if wrong else said)
    words.insert(0, f"{file}: {'NOT ' if problems else ''}verified")
    return CommandOutput(WRONG if problems else DONE, "\n".join(words), tuple(f"not verified: {p}" for p in problems))


def _recomputed(data: bytes) -> tuple[list[str], list[str]]:
    """Returns what a report costs, computed anew, and what is wrong with it."""
    from langchain_dpicl.reports.report import verify_report

    found = verify_report(data)
    price = f"epsilon {format_rounded_up(found.epsilon)}, delta {format_rounded_up(found.delta)}"
    return [f"  prices     {price}, computed anew from the tickets"], list(found.problems)


def _problems_beside(file: Path, signature: Path | None) -> Iterator[str]:
    """Says what is wrong with the files beside that of a soft prompt, of which it holds the digests.

    Formal guarantees:
      - Nothing means that the folder holds the three files of a prompt, those of PEFT byte for byte as they are
        written, and at most a signature beside them: a digest of numbers is none of a file.
    """
    from langchain_dpicl._plain_files import MAX_ARRAYS, read_plain
    from langchain_dpicl.released.soft_prompt import OURS, SoftPrompt

    if file.name != OURS:
        return
    try:
        written = SoftPrompt.load(file.parent).files_of_peft()
        for name, data in written.items():
            if read_plain(file.parent / name, MAX_ARRAYS) != data:
                yield f"{name}: expected the file as SoftPrompt.save writes it, found another with the same content"
    except (ConfigurationError, OSError) as error:
        yield str(error)
    else:
        known = {file, _beside(file), *(file.parent / name for name in written)} | ({signature} if signature else set())
        kept = {path.name for path in known if path.parent.resolve() == file.parent.resolve()}
        if strange := sorted({path.name for path in file.parent.iterdir()} - kept):
            yield f"{file.parent}: expected the files of a prompt alone, found {strange[:5]}, which nothing signs"


def _unsigned(data: bytes, file: Path, arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Returns what the signature says, and what is wrong with it."""
    from langchain_dpicl._plain_files import read_plain
    from langchain_dpicl.reports.signatures import MOST_OF_SIGNATURE, Signature, problems_of

    text = read_plain(arguments.signature or _beside(file), MOST_OF_SIGNATURE)
    signature = Signature.from_json(text)
    with _ledger(arguments) as store:
        problems = list(problems_of(data, signature, public_key=arguments.key, ledger=store))
    said = [f"  signature  that of the given key; signer {signature.signer}"]
    if (signed := signature.ledger) is not None:
        compared = "is still there" if arguments.ledger is not None else "not compared: no --ledger was given"
        said.append(f"  ledger     {signed['ledger_id']}, line {signed['line']} {compared}")
    return said, problems
