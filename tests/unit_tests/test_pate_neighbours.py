"""Neighbouring data sets and hostile texts: nothing that a record does is seen but in its own vote, under the noise.

Of a run that labels public inputs, with an outage, a refusal and a second start from its file. Coins stay random, so
what is compared is everything beside the noised labels: errors, files, reports, events, logs, progress, reprs, ledger
lines and what the engine is asked. Where a noisy test decides about tickets, its threshold is out of everybody's reach.
"""

from __future__ import annotations

import asyncio
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import Budget, PrivateExamples, PromptPATELabeler, _progress
from langchain_dpicl.backends import label_rows
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.labelled_pool import LabelledPool
from langchain_dpicl.privacy import accounting
from langchain_dpicl.privacy.plans import ReleasePlan
from langchain_dpicl.privacy.sampling import PartitionedSlots, PoissonSlots, PoissonUnits
from langchain_dpicl.privacy.stores import InMemoryStore
from tests import audit_plants as plant
from tests import pate_plants as pate
from tests.pate_games import free_price
from tests.unit_tests.test_voting_neighbours import BREAKS_THE_CALL, ORDER, PLAIN, Fragile
from tests.unit_tests.test_voting_neighbours import HOSTILE as TEXTS

HOSTILE = {**TEXTS, "bytes that are no text": b"\xff\xfe\x00 card".decode(errors="surrogateescape")}
SLOTS = {"rows": "slots", "num_slots": 3, "shots_per_slot": 2}
FIXED = {"teachers": "fixed", "num_slots": 3, "shots_per_slot": 2, "adjacency": "replace_one"}
ALL_PASS, NONE_PASSES = (-1e5, 2.0, 3.0), (1e5, 2.0, 3.0)
DESIGNS: dict[str, dict[str, Any]] = {
    "fresh units": {"rows": "units", "num_slots": 6},
    "fresh slots, histograms": {**SLOTS, "mechanism": "gaussian", "votes": "soft"},
    "fresh slots, none passes": {**SLOTS, "mechanism": "confident_gnmax", "confident": NONE_PASSES},
    "one sample": {**SLOTS, "teachers": "one_sample", "mechanism": "permute_and_flip"},
    "one sample, all pass": {
        **SLOTS,
        "teachers": "one_sample",
        "mechanism": "confident_gnmax",
        "confident": ALL_PASS,
        "max_answers": 2,
    },
    "fixed, calibrated": {**FIXED, "calibrate": True},
    "fixed, all pass": {**FIXED, "mechanism": "confident_gnmax", "confident": ALL_PASS, "max_answers": 2},
    "fixed, none passes": {**FIXED, "mechanism": "confident_gnmax", "confident": NONE_PASSES, "max_answers": 2},
}
OUTAGE = "RAISES, in public"
RELEASED = ("labelled", "rejected")


class Events(BaseCallbackHandler):
    """Keeps custom events, and errors of runs."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_custom_event(self, name: str, data: Any, **kwargs: Any) -> None:
        self.told.append([name, data])

    def on_chain_error(self, error: BaseException, **kwargs: Any) -> None:
        self.told.append(["error", _fault(error)])


class Bar:
    """A progress bar that keeps what it was told, in the place of tqdm's."""

    shown: list[Any]

    def __init__(self, **options: Any) -> None:
        self.shown.append(options)

    def update(self) -> None:
        self.shown.append("tick")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shown.append("end")


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(level=0)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(autouse=True)
def free_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "epsilon_bound", free_price)


class Scene:
    """One data set, its ledger and its file; starts as often as it is told to.

    Args:
      texts: the records.
      users: who owns each; None: everybody has one record.
    """

    def __init__(self, texts: tuple[str, ...], *, design: str, path: Path, users: str | None = None) -> None:
        self.options = {**DESIGNS[design]}
        self.engine, self.store, self.path = Fragile(), InMemoryStore(), path
        adjacency = self.options.pop("adjacency", "add_remove")
        self.budget = Budget(epsilon=50, delta=1e-4, adjacency=adjacency, store=self.store)
        records = [{"text": text, "answer": "no"} for text in texts]
        owned: dict[str, Any] = {}
        if users is not None:
            records = [{**record, "user": user} for record, user in zip(records, users, strict=True)]
            owned = {"unit_key": "user"}
        labels = ("yes", "no", "maybe")
        self.private = PrivateExamples(records, label_key="answer", labels=labels, public_size=6, **owned)

    def start(self) -> PromptPATELabeler:
        noise = {} if "confident" in self.options else {"noise_multiplier": 2.0}
        return PromptPATELabeler.from_private_examples(
            self.private,
            llm=self.engine,
            budget=self.budget,
            epsilon=40,
            public_inputs=["how long?", OUTAGE, "why?"],
            max_queries=3,
            checkpoint=self.path,
            **{"calibrate": False, **noise, **self.options},
        )

    def asked(self) -> list[Any]:
        """What the engine is asked: the size of every call where rows are public, else the calls without a record."""
        if self.options.get("rows") != "units":
            return [len(prompts) for prompts in self.engine.calls]
        return [prompts for prompts in self.engine.calls if len(prompts) == 1 and prompts[0].count("answer:") == 1]


def _fault(error: BaseException) -> list[str]:
    named = sorted(key for key in vars(error) if key != "_dpicl_refusal")
    return [type(error).__name__, str(error), repr(error.__cause__), repr(error.__context__), *named]


def _masked(found: Any) -> Any:
    """A value without what the noise decides, and without stamps and hashes."""
    if isinstance(found, dict):
        if found.get("status") in RELEASED:
            votes = found["votes"] and list(found["votes"])
            assert (found["label"] in {"yes", "no", "maybe"}) == (found["status"] == "labelled")
            found = {**found, "status": "released", "label": "", "votes": votes}
        return {
            key: _masked(value) for key, value in found.items() if key not in {"sealed_at", "digest", "content_digest"}
        }
    return [_masked(value) for value in found] if isinstance(found, (list, tuple)) else found


def _steps(scene: Scene, *, is_async: bool) -> Iterator[Any]:
    """Yields what is seen of a run that is interrupted and started again, and of single inputs."""
    labeler = scene.start()

    def run() -> LabelledPool:
        return asyncio.run(labeler.arun(progress=True)) if is_async else labeler.run(progress=True)

    for action in (
        run,
        lambda: labeler.label(7j),
        lambda: labeler.label(OUTAGE),
        lambda: labeler.label("who?"),
        lambda: labeler.label("why?"),
        lambda: labeler.label("one too many"),
        run,
    ):
        try:
            found = action()
            yield _masked(json.loads(found.to_json()) if isinstance(found, LabelledPool) else found.to_dict())
        except Exception as error:
            yield _fault(error)
        yield [labeler.queries_left, repr(labeler), _masked(json.loads(scene.path.read_text()))]
    again = scene.start()
    yield _masked(json.loads(again.pool.to_json()))
    yield [again.queries_left, repr(again), repr(again.rows), again.plan.to_dict(), repr(again.cost())]
    yield [repr(scene.private), repr(scene.budget), scene.private.declaration]


def observe(
    texts: tuple[str, ...], *, design: str, users: str | None = None, with_calls: bool = True, is_async: bool = False
) -> str:
    """Everything that anybody but the engine sees of it, as one text without random ids."""
    events, log, bar = Events(), Log(), type("OneBar", (Bar,), {"shown": []})
    logging.getLogger().addHandler(log)
    real, _progress.tqdm = _progress.tqdm, bar
    try:
        with (
            TemporaryDirectory() as folder,
            warnings.catch_warnings(record=True) as warned,
            redirect_stdout(StringIO()) as printed,
            redirect_stderr(printed),
        ):
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", ResourceWarning)  # sockets of other tests, collected meanwhile
            scene = Scene(texts, design=design, path=Path(folder) / "labels.json", users=users)
            steps = RunnableLambda(lambda _: list(_steps(scene, is_async=is_async)))
            seen = steps.invoke(None, {"callbacks": [events]})
            seen.append(sorted(path.name for path in Path(folder).iterdir()))
    finally:
        _progress.tqdm = real
        logging.getLogger().removeHandler(log)
    lines = [[line.kind, dict(line.body)] for line in scene.store.records()]
    seen += [events.told, lines, log.lines, bar.shown, [str(one.message) for one in warned], printed.getvalue()]
    seen.append(scene.asked() if with_calls else "")
    return json.dumps(seen, default=repr).replace(scene.budget.ledger_id, "<ledger>").replace(folder, "<folder>")


@cache
def usual(design: str, with_calls: bool = True, users: str | None = None, is_async: bool = False) -> str:
    """What is seen of plain records."""
    return observe((*PLAIN, "one more"), design=design, with_calls=with_calls, users=users, is_async=is_async)


@pytest.mark.parametrize("design", DESIGNS)
def test_what_is_compared_holds_labels_files_and_every_kind_of_fault(design: str) -> None:
    seen = json.loads(usual(design))
    steps, files = seen[:14:2], [shown[2] for shown in seen[1:14:2]]
    paid = DESIGNS[design].get("max_answers", 3) if "all pass" in design else 3
    assert [one[0] if isinstance(one, list) else one.get("status", "pool") for one in steps] == [
        "LabellingInterruptedError",
        "ConfigurationError",
        "ModelCallError",
        "released",
        "released" if paid == 3 else "PrivacyBudgetExceededError",
        "PrivacyBudgetExceededError",
        "pool",
    ]
    assert "1 of 3 inputs are done" in steps[0][1]
    done = [[entry["status"] for entry in file["entries"]].count("released") for file in files]
    assert done == [1, 1, 1, 2, paid, paid, paid]
    assert seen[-1][: 3 if "calibrated" in design else 2] == {
        "fresh units": [[f"text: {query}\nanswer:"] for query in ("how long?", OUTAGE)],
        "fixed, calibrated": [1, 1, 6],
    }.get(design, [1, 3]), "a public call, then one for the declared slots"


# --- neighbours -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("design", "record"),
    [(d, record) for d in DESIGNS for record in HOSTILE if record in BREAKS_THE_CALL or " pass" not in d],
)
def test_a_replaced_record_is_seen_nowhere_but_under_the_noise(design: str, record: str) -> None:
    with_calls = record not in BREAKS_THE_CALL  # the engine is then asked row by row: it, and it alone, knows why
    found = observe((*PLAIN, HOSTILE[record]), design=design, with_calls=with_calls)
    assert found == usual(design, with_calls)


@pytest.mark.parametrize("design", [design for design in DESIGNS if "fixed" not in design])
@pytest.mark.parametrize(
    "texts",
    [(), PLAIN[:1], PLAIN, (*PLAIN, ORDER, ORDER), ("FAILS",) * 6, ("RAISES",) * 6],
    ids=["none", "one", "five", "seven", "six that fail", "six that raise"],
)
def test_added_and_removed_records_are_seen_nowhere_but_under_the_noise(design: str, texts: tuple[str, ...]) -> None:
    with_calls = "RAISES" not in texts
    assert observe(texts, design=design, with_calls=with_calls) == usual(design, with_calls)


@pytest.mark.parametrize("design", ["fresh units", "fresh slots, histograms", "one sample"])
@pytest.mark.parametrize("users", ["aaaaaa", "aaaaab", "abcdea"])
def test_who_owns_the_records_is_seen_nowhere_but_under_the_noise(design: str, users: str) -> None:
    found = observe((*PLAIN, "one more"), design=design, users=users)
    assert found == usual(design, users="abcdef")


@pytest.mark.parametrize("record", ["fails", "raises", "injection", "empty"])
@pytest.mark.parametrize("design", ["one sample", "fixed, all pass"])
def test_a_replaced_record_is_seen_nowhere_in_async_code(design: str, record: str) -> None:
    with_calls = record not in BREAKS_THE_CALL
    found = observe((*PLAIN, HOSTILE[record]), design=design, with_calls=with_calls, is_async=True)
    assert found == usual(design, with_calls, is_async=True)


def _loud(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(label_rows, "guarded", lambda action: action())


def _counted(patch: pytest.MonkeyPatch) -> None:
    real = ReleasePlan.bound

    def bound(self: Any, rows: Any, *, width: int) -> Any:
        logging.getLogger("langchain_dpicl").warning("%d rows voted", rows.any(axis=1).sum())
        return real(self, rows, width=width)

    patch.setattr(ReleasePlan, "bound", bound)


def _only_full_slots(patch: pytest.MonkeyPatch) -> None:
    real = PoissonSlots.draw
    patch.setattr(PoissonSlots, "draw", lambda self, n, *, rng: tuple(filter(None, real(self, n, rng=rng))))


@pytest.mark.parametrize(
    ("bug", "record"),
    [
        pytest.param(_loud, "RAISES", id="the error of a row goes on"),
        pytest.param(_counted, "FAILS", id="rows that voted are logged"),
        pytest.param(pate.redrawn_until_all_voted, "FAILS", id="failed rows are tried again"),
        pytest.param(pate.free_where_nobody_votes, "FAILS", id="inputs without votes are free"),
        pytest.param(pate.stops_at_disagreement, "FAILS", id="a run stops where nobody votes"),
        pytest.param(_only_full_slots, "", id="only slots that hold somebody are asked"),
    ],
)
def test_a_planted_difference_between_neighbours_is_seen(
    bug: plant.Plant, record: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    design, with_calls = "fresh slots, histograms", record != "RAISES"
    expected = usual(design, with_calls)
    bug(monkeypatch)
    try:
        seen = observe((record,) * 6 if record else (), design=design, with_calls=with_calls)
    except ConfigurationError as error:  # labels that no ticket paid for are refused at the restart
        assert "paid for on this ledger" in str(error)  # noqa: PT017
        return
    assert seen != expected


# --- one record, one row ----------------------------------------------------------------------------------------------


def fixed_coins(patch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Deals units over the rows in turn; returns the list of private matrices that releases will sum."""
    matrices: list[np.ndarray] = []
    real = ReleasePlan.bound

    def bound(self: Any, rows: Any, *, width: int) -> Any:
        matrices.append(np.array(rows))
        return real(self, rows, width=width)

    def dealt(self: Any, n: int, *, rng: Any) -> Any:
        return tuple(tuple(range(slot, n, self.num_slots)) for slot in range(self.num_slots))

    patch.setattr(ReleasePlan, "bound", bound)
    patch.setattr(PoissonUnits, "draw", lambda self, n, *, rng: tuple((unit,) for unit in range(n)))
    for sampler in (PoissonSlots, PartitionedSlots):
        patch.setattr(sampler, "draw", dealt)
    return matrices


@pytest.mark.parametrize("record", HOSTILE)
@pytest.mark.parametrize("design", ["fresh units", "one sample", "fixed, calibrated"])
def test_a_hostile_record_moves_its_own_row_alone(
    design: str, record: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last unit stands in the last row, for every input; every other row stays the same to the last bit."""
    matrices = fixed_coins(monkeypatch)
    for text in ("one more", HOSTILE[record]):
        labeler = Scene((*PLAIN, text), design=design, path=tmp_path / f"{len(matrices)}.json").start()
        for given in ("how long?", "why?"):
            labeler.label(given)
    usual_rows, rows = matrices[:2], matrices[2:]
    for before, after in zip(usual_rows, rows, strict=True):
        assert after.shape == before.shape
        assert after[:-1].tobytes() == before[:-1].tobytes()
        sums = [labeler.plan.release.bound(found, width=3).value for found in (before, after)]
        allowed = labeler.plan.release.aggregation.sensitivity(row_shape="slots", adjacency="replace_one")
        move = sums[1] - sums[0]
        assert np.linalg.norm(move) <= allowed.l2
        assert max(move.max(), 0.0) - min(move.min(), 0.0) <= allowed.range
        assert abs(sums[1].max() - sums[0].max()) <= allowed.linf
    if record in {"fails", *BREAKS_THE_CALL}:
        assert not any(after[-1].any() for after in rows)
