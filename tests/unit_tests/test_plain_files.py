"""Files of others: plain ones alone are read, without waiting, up to a size; every reader refuses the rest as ours."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import LabelledPool, ReleasedCounts, ReleasedDemonstrations, SoftPrompt, SyntheticDocuments
from langchain_dpicl import _plain_files as plain_files
from langchain_dpicl._plain_files import check_target, read_plain
from langchain_dpicl.cli import inputs
from langchain_dpicl.cli.check import _read
from langchain_dpicl.cli.inputs import read_json, read_records
from langchain_dpicl.cli.spending import public_items, public_lines
from langchain_dpicl.exceptions import ConfigurationError, DPICLError
from langchain_dpicl.released import ReleasedWords
from langchain_dpicl.released.base import write_bytes, write_whole
from langchain_dpicl.released.soft_prompt import OURS, PEFT_ARRAYS, PEFT_CONFIG
from langchain_dpicl.reports.ledger_audit import read_export, read_receipts
from langchain_dpicl.runs.release_run import RunJournal
from langchain_dpicl.soft_prompts.plan import _architectures
from langchain_dpicl.stores import FileAnchor, SQLiteMemo, SQLiteStore
from langchain_dpicl.stores.beside_ledgers import SQLiteBalances
from tests.gradient_doubles import LogisticEngine

CANARY = "canary-3d81"
BASELINE = {"private": False, "epsilon": "infinity"}


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


KINDS: dict[str, Callable[[Path], Any]] = {
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a FIFO": os.mkfifo,
    "a link to a FIFO": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
    "a folder": Path.mkdir,
    "a link to a folder": lambda path: path.symlink_to("."),
    "a socket": _socket,
    "a sparse file of 8 GiB": lambda path: (path.touch(), os.truncate(path, 8 << 30)),
}


def named(reader: Callable[[Path], Any], name: str) -> Callable[[Path], Any]:
    """A reader that goes by the name of the file."""
    return lambda path: reader(path.rename(path.with_name(name)))


READERS: dict[str, Callable[[Path], Any]] = {
    "demonstrations": ReleasedDemonstrations.load,
    "pool": LabelledPool.load,
    "documents": SyntheticDocuments.load,
    "counts": ReleasedCounts.load,
    "words": ReleasedWords.load,
    "journal": RunJournal.component_in,
    "JSON of a command": read_json,
    "lines of a command": lambda path: public_lines(path, path.with_name("records"), "--vocabulary"),
    "records": named(read_records, "file.jsonl"),
    "packed records": named(read_records, "file.csv.gz"),
    "records of an owner": named(lambda path: _read(path, "text"), "file.csv"),
    "public records": named(lambda path: public_items(path, path.with_name("records"), "--inputs"), "file.jsonl.gz"),
    "receipts": read_receipts,
    "export": read_export,
    "configuration of a model": _architectures,
    "anchor": FileAnchor,
    "ledger": SQLiteStore,
    "memo": SQLiteMemo,
    "balances": SQLiteBalances,
}


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    """What blocks would block without end."""

    def late(*_: object) -> None:
        raise TimeoutError("a reader waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def soft() -> SoftPrompt:
    engine = LogisticEngine()
    return SoftPrompt.of(engine, engine.initial(), report={**BASELINE, "baseline": "none"})


@pytest.mark.enable_socket
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_plain_file_is_refused_at_once_and_as_ours(reader: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    KINDS[kind](path)
    with pytest.raises(DPICLError):
        READERS[reader](path)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a socket"])
@pytest.mark.parametrize("file", [OURS, PEFT_CONFIG, PEFT_ARRAYS])
def test_a_prompt_folder_with_something_else_in_the_place_of_a_file_is_refused(
    file: str, kind: str, tmp_path: Path
) -> None:
    soft().save(tmp_path / "prompt")
    (tmp_path / "prompt" / file).unlink()
    KINDS[kind](tmp_path / "prompt" / file)
    with pytest.raises(ConfigurationError, match=r"expected a plain file|expected at most"):
        SoftPrompt.load(tmp_path / "prompt")


def test_a_link_to_a_plain_file_is_followed(tmp_path: Path) -> None:
    soft().save(tmp_path / "prompt")
    for file in (OURS, PEFT_CONFIG, PEFT_ARRAYS):
        moved = tmp_path / f"elsewhere-{file}"
        (tmp_path / "prompt" / file).rename(moved)
        (tmp_path / "prompt" / file).symlink_to(moved)
    assert SoftPrompt.load(tmp_path / "prompt") == soft()


def test_a_missing_file_and_a_broken_link_stay_os_errors(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("nothing", "link"):
        with pytest.raises(FileNotFoundError):
            read_plain(tmp_path / name, 10)
    with pytest.raises(OSError, match="symbolic links"):
        read_plain(tmp_path / "loop", 10)


@pytest.mark.parametrize("wrong", ["a\0b", "\ud800"])
def test_a_path_that_no_file_can_have_is_refused_as_ours(wrong: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigurationError, FileNotFoundError)) as caught:
        read_plain(tmp_path / wrong, 10)
    assert isinstance(caught.value, ConfigurationError)
    with pytest.raises(ConfigurationError, match="checkpoint: expected a file in a folder"):
        RunJournal.component_in(tmp_path / wrong)


def test_a_file_is_read_to_its_cap_and_not_beyond(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_plain(path, 100) == b"x" * 100
    with pytest.raises(ConfigurationError, match="expected at most 99 bytes"):
        read_plain(path, 99)
    assert read_plain("/proc/self/status", 1 << 20).startswith(b"Name:")  # says that it is empty
    with pytest.raises(ConfigurationError, match="expected at most 10 bytes"):
        read_plain("/proc/self/status", 10)


@pytest.mark.parametrize("name", ["r.jsonl", "r.csv", "r.jsonl.gz", "r.csv.gz"])
def test_records_are_read_to_a_cap_on_what_they_unpack_to(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = f"text\n{CANARY}\n" if ".csv" in name else json.dumps({"text": CANARY}) + "\n"
    text = (content + "\n" * 1000).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    monkeypatch.setattr(inputs, "MAX_RECORDS", len(text))
    assert read_records(tmp_path / name) == [{"text": CANARY}]
    monkeypatch.setattr(inputs, "MAX_RECORDS", len(text) - 1)
    with pytest.raises(ConfigurationError, match=r"at most [\d,]+ bytes|more than [\d,]+ bytes") as caught:
        read_records(tmp_path / name)
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    if name.endswith(".gz"):
        assert [*_read(tmp_path / name, "text").broken] == [
            f"more than {len(text) - 1:,} bytes, unpacked, or than the memory holds"
        ]


def test_what_is_looked_at_is_what_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody puts a FIFO in the file's place between the look and the opening, and a device behind it."""
    path = tmp_path / "file"
    path.write_bytes(b"{}")
    real = os.open

    def late(name: Any, *rest: Any, **options: Any) -> int:
        path.unlink()
        os.mkfifo(path)
        return real(name, *rest, **options)

    monkeypatch.setattr(plain_files.os, "open", late)
    with pytest.raises(ConfigurationError, match="found a FIFO"):
        read_plain(path, 10)


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    before = len(list(Path("/proc/self/fd").iterdir()))
    (tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    for _ in range(20):
        for path, most in ((tmp_path, 10), (tmp_path / "file", 10), (Path("/dev/zero"), 10)):
            with pytest.raises(ConfigurationError):
                read_plain(path, most)
        with pytest.raises(ConfigurationError):
            read_records(tmp_path / "broken.jsonl.gz")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected at most 3 bytes, found 4"):
        write_bytes(tmp_path / "file", b"long", 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [None, 5, {}, "a\0b", "\ud800"])
def test_what_is_no_path_is_refused_as_ours(wrong: Any) -> None:
    for act in (
        lambda: read_plain(wrong, 10),
        lambda: write_whole(wrong, "{}"),
        lambda: SoftPrompt.load(wrong),
        lambda: soft().save(wrong),
    ):
        with pytest.raises(ConfigurationError, match="path: expected the path of a file, found"):
            act()
    with pytest.raises(ConfigurationError, match="path: expected the path of a file, found"):
        write_whole("", "{}")


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path, kind in ((tmp_path / "none" / "a.json", FileNotFoundError), (tmp_path / "folder", IsADirectoryError)):
        with pytest.raises(kind) as caught:
            write_whole(path, "{}")
        assert str(caught.value).endswith(f": {str(path)!r}")
    assert [each.name for each in tmp_path.iterdir()] == ["folder"]


def test_nothing_takes_the_place_of_a_device_or_of_a_link_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "stdout").symlink_to("plain")  # as /dev/stdout, where the shell sends it into a file
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigurationError, match="expected a plain file, found a device"):
        write_whole(tmp_path / "fifo", "{}")
    realpath = os.path.realpath
    with monkeypatch.context() as patch:
        patch.setattr("os.path.realpath", lambda path: "/dev" if str(path) == str(tmp_path) else realpath(path))
        with pytest.raises(ConfigurationError, match="expected a plain file, found a device"):
            write_whole(tmp_path / "stdout", "{}")
    assert (tmp_path / "stdout").is_symlink()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["fifo", "plain", "stdout"]


def test_the_target_of_a_checkpoint_is_a_file_in_a_folder_that_exists(tmp_path: Path) -> None:
    assert check_target("checkpoint", tmp_path / "file") == tmp_path / "file"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "file")
    (tmp_path / "loop").symlink_to("loop")
    for wrong in (7, tmp_path, *(tmp_path / name for name in ("nowhere/file", "link", "loop", "x" * 300))):
        with pytest.raises(ConfigurationError, match=r"^checkpoint: expected"):
            check_target("checkpoint", wrong)


def test_a_file_that_fills_the_memory_as_it_is_parsed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("{}\n")

    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(json, "loads", full)
    for reader in ("demonstrations", "journal", "JSON of a command", "receipts", "records"):
        with pytest.raises(ConfigurationError):
            READERS[reader](path)
