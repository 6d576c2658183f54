"""Every reader of the package's files, on files that were changed at random: our errors, or the content that was written.

`make fuzz` plays more cases. A failure names the seed and the case, which play again with FUZZ_SEED and FUZZ_CASES.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document

from langchain_dpicl import (
    Budget,
    Decoding,
    DemonstrationSynthesizer,
    DocumentSynthesizer,
    EmbeddedLLM,
    LabelAnswers,
    Noise,
    PrivateExamples,
    PromptPATELabeler,
    Rows,
    SoftPrompt,
    ValueDiscovery,
    WordDiscovery,
    verify_report,
)
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.cli.inputs import METHODS, read_json, read_toml, settings_of
from langchain_dpicl.cli.spending import check_target
from langchain_dpicl.exceptions import ConfigurationError, DPICLError
from langchain_dpicl.options import Topics
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.accounting.events import PureEvent
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.rehearsal import GenerationRehearsal, Rehearsal, rehearse, rehearse_generation
from langchain_dpicl.released.base import parse_json, plain_json
from langchain_dpicl.released.soft_prompt import ARRAY
from langchain_dpicl.reports import claims as _claims
from langchain_dpicl.reports.ledger_audit import check_ledger, export_lines, read_export, read_receipts
from langchain_dpicl.runs.release_run import RunJournal
from langchain_dpicl.soft_prompts.plan import Optimizer
from langchain_dpicl.stores import FileAnchor, SQLiteMemo, SQLiteStore
from langchain_dpicl.stores.beside_ledgers import SQLiteBalances
from langchain_dpicl.stores.memos import MemoKey
from tests import evolution_doubles, gradient_doubles, labelling_doubles
from tests.contracts.release_run import entries_in
from tests.ledgers import free_price
from tests.sealed_files import rechained, sealed

CASES = int(os.environ.get("FUZZ_CASES", "2000"))
SEED = int(os.environ.get("FUZZ_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
WORDS = (" my", " card")
OTHERS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 5e-324, 10**30, -(2**63), 2**63, "", "a", "\x00", "\ud800"),
    *("../..", "{0.__class__}", [], {}, [[]], [None], ["a"] * 500, {"lc": 1, "type": "secret", "id": ["HOME"]}),
)
SPELLED = ("NaN", "-Infinity", "1e400", "9" * 5000, "[" * 50_000 + "]" * 50_000, '{"a":' * 2000 + "1" + "}" * 2000)

SPELLED_IN_TOML = ("inf", "0x" + "f" * 6000, "2026-01-02", "true", "[1, 2]", "{a = 1}", '"a\\u0000b"', "''", '"../x"')
SETTINGS = b"""\
method = "generation"
epsilon = 2.0
max_tokens = 3
checkpoint = "kept"
component = "c"
noise = "gaussian"

[data]
file = "records.jsonl"
public_size = 100
labels = ["a", "b"]

[budget]
delta = 1e-6
ledger = "ledger.db"

[rows]
slots = 3
"""


@dataclass(frozen=True)
class Target:
    """What is read, and how."""

    files: Mapping[str, bytes]
    read: Callable[[Path], Any]
    epsilon: Callable[[Any], float] | None = None
    is_bound: bool = True


# -- changes -----------------------------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def near(value: Any, coins: random.Random) -> Any:
    """A value that looks like it."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return coins.choice([value + 1, -value - 1, value * 2 + 1, str(value), [value], value + 0.25])
    if isinstance(value, str):
        return coins.choice([value + " ", value + "\x00", value[:-1] + "?", value[::-1] + "x", [value], {value: value}])
    if isinstance(value, list):
        return coins.choice([value * 2 + [None], value[1:] if value else [0], {"0": value}])
    return coins.choice([[value], {**value, "more": 1}, dict(list(value.items())[1:]) if value else {"a": 1}])


def changed_json(text: bytes, coins: random.Random, *, is_sealed: bool) -> bytes:
    """The JSON text with one value changed, moved, doubled or taken away; perhaps with a content digest that fits."""
    whole = json.loads(text)
    path = coins.choice(list(places(whole)))
    holder = whole
    for key in path[:-1]:
        holder = holder[key]
    key, way = path[-1], coins.random()
    if way < 0.15:
        del holder[key]
    elif way < 0.25:
        doubled = copy.deepcopy(holder[key])
        holder.append(doubled) if isinstance(holder, list) else holder.update({f"{key}x": doubled})
    elif way < 0.55:
        holder[key] = near(holder[key], coins)
    elif way < 0.85:
        holder[key] = copy.deepcopy(coins.choice(OTHERS))
    else:
        holder[key] = "@here@"
        return json.dumps(whole).replace('"@here@"', coins.choice(SPELLED)).encode()
    if is_sealed and isinstance(whole, dict):
        try:
            whole = sealed(whole)
        except (TypeError, ValueError, RecursionError):
            return json.dumps(whole).encode()
    return json.dumps(whole).encode()


def changed_bytes(content: bytes, coins: random.Random) -> bytes:
    """The bytes with some flipped, cut, doubled, added or put in another encoding."""
    place, way = coins.randrange(len(content)), coins.randrange(8)
    if way < 3:
        flipped = bytearray(content)
        for _ in range(coins.choice([1, 1, 3])):
            flipped[coins.randrange(len(flipped))] ^= 1 << coins.randrange(8)
        return bytes(flipped)
    return (
        content[:place],
        content[:place] + content[place + coins.randrange(1, 9) :],
        content[: place + 40] + content[place:],
        content + coins.randbytes(coins.randrange(1, 40)),
        coins.choice([b"\xef\xbb\xbf" + content, content.decode("latin-1").encode("utf-16"), coins.randbytes(200)]),
    )[way - 3]


def changed_toml(content: bytes, coins: random.Random) -> bytes:
    """The settings with one value spelled otherwise, or with a line doubled or taken away."""
    lines = content.decode().splitlines()
    place = coins.randrange(len(lines))
    key, sign, _ = lines[place].partition(" = ")
    if sign and coins.random() < 0.8:
        lines[place] = f"{key} = {coins.choice(SPELLED + SPELLED_IN_TOML)}"
    else:
        lines[place : place + 1] = lines[place : place + 1] * coins.choice([0, 2])
    return "\n".join(lines).encode()


def changed_header(content: bytes, coins: random.Random) -> bytes:
    """The safetensors file with other JSON in its header, or with an array of another shape."""
    end = 8 + int.from_bytes(content[:8], "little")
    text, name = content[8:end], ARRAY
    if coins.random() < 0.5:
        header = json.loads(text)
        shape = header[name]["shape"]
        empty = {"dtype": "F32", "shape": [0, 2**30, 2**30, 2**30], "data_offsets": [0, 0]}
        shapes = [{name: {**header[name], "shape": one}} for one in ([1] * 100 + shape, shape[::-1], [*shape, 1])]
        text = json.dumps({**header, **coins.choice([{"more": empty}, *shapes])}).encode()
    else:
        text = changed_json(text, coins, is_sealed=False)
    return len(text).to_bytes(8, "little") + text + content[end:]


def changed_form(name: str, content: bytes, coins: random.Random, *, is_sealed: bool) -> bytes | None:
    """The content changed as what it says; None where it is neither JSON nor TOML, nor begins with JSON."""
    if name.endswith(".toml"):
        return changed_toml(content, coins)
    if name.endswith(".safetensors"):
        return changed_header(content, coins)
    return changed_json(content, coins, is_sealed=is_sealed) if is_json(content) else None


def is_json(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict | list)
    except (ValueError, RecursionError):
        return False


# -- targets -----------------------------------------------------------------------------------------------------------


def house() -> Budget:
    return Budget(epsilon=1e4, delta=1e-4)


def kept(made: Any) -> Target:
    """What is kept as one file of JSON."""
    kind = type(made)

    def read(folder: Path) -> Any:
        return kind.load(folder / "file")

    return Target({"file": made.to_json().encode()}, read, epsilon=lambda found: found.epsilon)


def released() -> dict[str, Target]:
    """One release of each kind."""
    engine = FakeBackend(lambda prompt, prefix: dict.fromkeys(WORDS, 0.5), vocabulary=WORDS)
    demonstrations = DemonstrationSynthesizer.from_private_examples(
        labelling_doubles.examples(),
        llm=engine,
        budget=house(),
        epsilon=4.0,
        max_tokens=2,
        noise=Noise(multiplier=2.0),
        decoding=Decoding(candidates="all"),
    )
    labels = PromptPATELabeler.from_private_examples(
        labelling_doubles.examples(),
        llm=FakeBackend(labelling_doubles.by_query, vocabulary=[" card", " transfer"]),
        public_inputs=["a card", "x"],
        budget=house(),
        rows=Rows(units=4),
        noise=Noise(multiplier=2.0),
        answers=LabelAnswers(calibrate=False),
        epsilon=50.0,
    )
    notes = [Document(f"card {number}", metadata={"source": str(number)}) for number in range(400)]
    documents = DocumentSynthesizer.from_private_examples(
        PrivateExamples(notes, public_size=400, unit_key="source"),
        llm=engine,
        topics=Topics(("card", "cash"), 1),
        documents_per_topic=1,
        max_tokens=2,
        budget=house(),
        epsilon=90.0,
        noise=Noise(multiplier=2.0),
    )
    counted = PrivateExamples([{"text": f"v{number % 3}"} for number in range(600)], public_size=600)
    counts = ValueDiscovery.from_private_examples(counted, field="text", budget=house(), epsilon=8.0)
    made = [one.run(progress=False) for one in (demonstrations, labels, documents)]
    spoken = PrivateExamples([{"text": "velda hums"}] * 600, public_size=600)
    words = WordDiscovery.from_private_examples(spoken, budget=house(), epsilon=8.0, pairs=True)
    return {type(one).__name__: kept(one) for one in (*made, counts.run(), words.run())}


def trained(folder: Path) -> dict[str, Target]:
    """A prompt, and a journal with the arrays of two steps beside it."""
    prompt = gradient_doubles.prepared(training=gradient_doubles.training(steps=2)).run(progress=False)
    prompt.save(folder / "prompt")
    files = {one.name: one.read_bytes() for one in (folder / "prompt").iterdir()}
    rule = Optimizer("adam", 0.1, "constant", 2)
    terms: dict[str, Any] = {"component": "c", "ledger_id": "1" * 32, "dataset_id": "d", "plan": {"steps": 2}}
    made, state = RunJournal(folder / "journal", **terms), rule.start(np.zeros(8))
    for step in (1, 2):
        state = rule.update(state, np.ones(8))
        made.append({"step": step}, arrays=state.to_bytes())

    def restored(place: Path) -> Any:
        found = RunJournal(place / "journal", **terms)
        if len(found.entries) != 2:
            raise ConfigurationError("an unfinished last line was dropped, whose step is made again")
        return [found.entries, rule.restored(2, found.arrays(), width=8).to_bytes()]

    return {
        "SoftPrompt": Target(files, SoftPrompt.load, epsilon=lambda found: found.epsilon),
        "journal": Target({one.name: one.read_bytes() for one in folder.glob("journal*")}, restored),
    }


def gone_on_with(folder: Path) -> dict[str, Target]:
    """The releases in the checkpoints of four runs, with digests that fit."""
    notes = PrivateExamples([f"card {number}" for number in range(400)], public_size=400, dataset_id="gone on with")
    given: dict[str, Any] = {"budget": house(), "noise": Noise(multiplier=2.0), "decoding": Decoding(candidates="all")}
    given |= {"llm": FakeBackend(lambda prompt, prefix: dict.fromkeys(WORDS, 0.5), vocabulary=WORDS), "max_tokens": 2}
    topics = {"topics": Topics(("card", "cash"), 1), "documents_per_topic": 1, "epsilon": 90.0}
    taught, ledger = labelling_doubles.examples(), labelling_doubles.house()
    evolved, budget = PrivateExamples(evolution_doubles.RECORDS, public_size=20), evolution_doubles.budget_of()
    makers: dict[str, Callable[[Path], Any]] = {
        "evolution": lambda path: evolution_doubles.evolution(
            private=evolved, budget=budget, checkpoint=path, component="evolution"
        ),
        "demonstrations": lambda path: DemonstrationSynthesizer.from_private_examples(
            notes, checkpoint=path, component="demonstrations", epsilon=4.0, **given
        ),
        "documents": lambda path: DocumentSynthesizer.from_private_examples(
            notes, checkpoint=path, component="documents", **topics, **given
        ),
        "labels": lambda path: labelling_doubles.labeler(
            taught, budget=ledger, checkpoint=path, component="labels", noise=labelling_doubles.GAUSSIAN
        ),
    }
    return {f"checkpoint of {name}": _checkpoint(folder / name, make) for name, make in makers.items()}


def _checkpoint(path: Path, make: Callable[[Path], Any]) -> Target:
    make(path).run(progress=False)
    journal = path.read_bytes()

    def restored(place: Path) -> Any:
        entries = parse_json("entries", (place / "file").read_bytes().decode("ascii", "replace"))
        if not isinstance(entries, list):
            raise ConfigurationError("no list")
        (place / "journal").write_bytes(rechained(journal, plain_json("entries", {"": entries})[""]))
        return make(place / "journal").result.to_json()

    return Target({"file": json.dumps(entries_in(path)).encode()}, restored, is_bound=False)


def reported(folder: Path) -> dict[str, Target]:
    """A ledger's report, export and receipts, as commands read them; and its anchor."""
    budget = Budget(epsilon=4.0, delta=1e-6, store=InMemoryStore())
    taken = budget.declare("x", tickets=[Ticket("q", PureEvent(0.1), max_count=3)], epsilon=1.0).reserve("q")
    budget.declare("y", tickets=[Ticket("q", PureEvent(0.1), max_count=3)], epsilon=1.0)
    report = budget.report().to_json().encode()
    lines = "\n".join(export_lines(budget._store)).encode() + b"\n"
    receipt = {"ledger_id": taken.ledger_id, "entry": taken.entry, "entry_hash": taken.entry_hash}
    FileAnchor.new(folder / "anchor").write("ab" * 16, 5, "cd" * 32)

    def verified(place: Path) -> Any:
        found = verify_report(read_json(place / "file"))
        if not found.ok:
            raise ConfigurationError(found.problems[0])
        return read_json(place / "file")

    def exported(place: Path) -> Any:
        store = read_export(place / "file")
        found = check_ledger(store)
        if found.problems:
            raise ConfigurationError(found.problems[0])
        return [store.header(), *store.records()]

    return {
        "report": Target({"file": report}, verified),
        "export": Target({"file": lines}, exported),
        "receipts": Target(
            {"file": json.dumps([receipt]).encode()}, lambda p: read_receipts(p / "file"), is_bound=False
        ),
        "anchor": Target({"file": (folder / "anchor").read_bytes()}, lambda p: FileAnchor(p / "file").read("ab" * 16)),
    }


def declared(folder: Path) -> dict[str, Target]:
    """The settings of a command, and the paths in them."""

    def read(place: Path) -> dict[str, Any]:
        given = read_toml(place / "settings.toml")
        found = settings_of(given, methods=tuple(METHODS))
        check_target(argparse.Namespace(out=folder / "out.json"), found)
        return given

    return {"settings": Target({"settings.toml": SETTINGS}, read, is_bound=False)}


def databases(folder: Path) -> dict[str, Target]:
    """Files of SQLite; a number that was flipped in one is not known, so kinds of errors alone are of interest."""
    memo, key = SQLiteMemo(folder / "memo"), MemoKey("s" * 64, "t" * 64, "q" * 64)
    memo.remember(key, "[1, 2]")
    balances = SQLiteBalances(folder / "balances")
    balances.take_up({"participations": 1}, lambda: {"entry": 1})
    balances.debit(["unit"], 0)
    store = SQLiteStore.new(folder / "ledger")
    Budget(epsilon=1.0, delta=1e-6, store=store).close()

    def debited(place: Path) -> Any:
        found = SQLiteBalances(place / "file")
        found.bind_filter({"participations": 1})
        return found.debit(["unit", "another"], 1)

    def opened(place: Path) -> Any:
        budget = Budget.open(SQLiteStore(place / "file"))
        try:
            return budget.verify()
        finally:
            budget.close()

    reads = {"memo": lambda p: SQLiteMemo(p / "file").recall(key), "balances": debited, "ledger": opened}
    return {name: Target({"file": (folder / name).read_bytes()}, read, is_bound=False) for name, read in reads.items()}


def rehearsed(folder: Path) -> dict[str, Target]:
    """Rehearsals, whose numbers are read by what makes a plan of them."""

    def votes(path: Path) -> dict[str, Any]:
        found = Rehearsal.load(path / "file")
        for shots in (1, 3, 50):
            found.facts(shots=shots, calibrated=found.readings[0]).ceiling()
        found.zero_shot(found.readings[0])
        return found.to_dict()

    def texts(path: Path) -> dict[str, Any]:
        found = GenerationRehearsal.load(path / "file")
        found.rows()
        return found.to_dict()

    examples = [{"text": f"my card {place}", "label": "ab"[place % 2]} for place in range(8)]
    rehearse(EmbeddedLLM(), examples, shots=(1, 2), progress=False).save(folder / "votes")
    rehearse_generation(EmbeddedLLM(), examples, shots=(1,), max_tokens=3, progress=False).save(folder / "texts")
    files = {name: {"file": (folder / name).read_bytes()} for name in ("votes", "texts")}
    return {"Rehearsal": Target(files["votes"], votes), "GenerationRehearsal": Target(files["texts"], texts)}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Target]]:
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        made = released()
        patch.setattr(accounting, "epsilon_bound", free_price)
        others = (trained, gone_on_with, reported, declared, databases, rehearsed)
        yield {**made, **{name: target for make in others for name, target in make(folder).items()}}


# -- the game ----------------------------------------------------------------------------------------------------------


def written(folder: Path, files: Mapping[str, bytes]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def shown(found: Any) -> Any:
    return found.to_json() if hasattr(found, "to_json") else found


def play(target: Target, right: Any, folder: Path, coins: random.Random) -> str:
    """Reads a changed file; returns what came of it, or fails."""
    name = coins.choice(sorted(target.files))
    content, is_sealed = target.files[name], coins.random() < 0.5
    changed = changed_form(name, content, coins, is_sealed=is_sealed) if coins.random() < 0.65 else None
    as_json = changed is not None
    changed = changed_bytes(content, coins) if changed is None else changed
    try:
        found = target.read(written(folder, {**target.files, name: changed}))
    except DPICLError:
        return "refused"
    if as_json and is_sealed and target.epsilon is not None:  # who writes the digest anew still claims no less
        assert target.epsilon(found) >= target.epsilon(right), f"epsilon {target.epsilon(found)} was read"
        return "rewritten"
    if as_json and is_sealed:
        return "rewritten"
    assert not target.is_bound or shown(found) == shown(right), f"{name}: another content was read"
    return "same"


def test_a_changed_file_is_refused_or_read_as_it_was_written(targets: dict[str, Target], tmp_path: Path) -> None:
    right = {name: target.read(written(tmp_path / "x", target.files)) for name, target in targets.items()}
    seen: Counter[tuple[str, str]] = Counter()
    for case in range(CASES):
        name = sorted(targets)[case % len(targets)]
        coins = random.Random(f"{SEED} {case}")
        try:
            seen[name, play(targets[name], right[name], tmp_path / "x", coins)] += 1
        except Exception as error:
            pytest.fail(f"FUZZ_SEED={SEED}, case {case}, {name}: {type(error).__name__}: {str(error)[:300]}")
    print(f"FUZZ_SEED={SEED}", dict(sorted(seen.items())))
    assert all(seen[name, "refused"] for name in targets)


@pytest.mark.parametrize("name", ["ReleasedDemonstrations", "SoftPrompt"])
def test_readers_that_compare_no_digest_are_caught(
    name: str, targets: dict[str, Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_claims, "content_problems", lambda state: ())
    right = targets[name].read(written(tmp_path / "x", targets[name].files))
    with pytest.raises(AssertionError, match="another content was read"):
        for case in range(1000):
            play(targets[name], right, tmp_path / "x", random.Random(case))
