"""Private evolution over the death of its process: a file of released histograms, and the ledger's tickets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.evolution import PrivateEvolution
from langchain_dpicl.exceptions import ConfigurationError, PrivacyBudgetExceededError, RunInterruptedError
from langchain_dpicl.privacy.private_examples import PrivateExamples
from tests.canary import RECORD
from tests.contracts.release_run import entries_in
from tests.evolution_doubles import SEARCH, Muse, charged, evolution
from tests.sealed_files import rechained

pytestmark = pytest.mark.usefixtures("remembered_prices")

RECORDS = [{"text": f"my card {RECORD} {n}", "queue": "bank"} for n in range(5)]
RECORDS += [{"text": f"a film {RECORD} {n}", "queue": "arts"} for n in range(4)]
BY_QUEUE: dict[str, Any] = {"label_key": "queue", "labels": ("bank", "arts"), "public_size": {"bank": 5, "arts": 4}}


class Process:
    """Opens the same ledger and the same checkpoint again, as another process would."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "evolution.jsonl"
        self.ledger = folder / "budget.db"
        self.private = PrivateExamples(
            RECORDS, **BY_QUEUE
        )  # the one thing that stays: a name has one object in a process
        PrivacyBudgetCallbackHandler.create(self.ledger, epsilon=1e12, delta=1e-5)

    def start(self, **options: Any) -> tuple[PrivateEvolution, PrivacyBudgetCallbackHandler]:
        budget = PrivacyBudgetCallbackHandler.open(self.ledger)
        given = {
            "llm": Muse(says=["a card", "a film"] * 20),
            "evolution": SEARCH.replace(rounds=3),
            "component": "texts",
            **options,
        }
        return evolution(private=self.private, budget=budget, checkpoint=self.file, **given), budget


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


def dying(after: int) -> Muse:
    """A model that fails for good after so many answers."""
    said = iter((["a card", "a film"] * 20)[:after])
    return Muse(says=lambda prompt: next(said, OSError("out")))


def test_another_process_goes_on_where_the_first_one_stood(process: Process) -> None:
    first, _ = process.start(llm=dying(4 + 2))  # first candidates, and variations for the second round
    with pytest.raises(RunInterruptedError, match="2 of 6 rounds"):
        first.run(progress=False)
    second, budget = process.start()
    assert second.history == first.history
    assert second.demonstrations == first.demonstrations
    released = second.run(progress=False)
    assert charged(budget) == 6
    assert [len(rounds) for rounds in second.history.values()] == [3, 3]
    assert second.history["bank"][:2] == first.history["bank"]
    third, budget = process.start(llm=dying(0))  # all is there, and nobody is asked
    assert third.is_finished
    assert third.run(progress=False).examples == released.examples
    assert charged(budget) == 6
    process.file.unlink()
    for _ in range(2):
        other, _ = process.start(llm=dying(0))
        with pytest.raises(PrivacyBudgetExceededError, match="label 'bank' of 'texts': requested 1, remaining 0"):
            other.run(progress=False)


def test_a_killed_process_loses_the_one_round_that_it_had_reserved(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    made, budget = process.start()
    made.share = _Killing(made.share)
    with pytest.raises(SystemError, match="killed"):
        made.run(progress=False)
    assert charged(budget) == 2
    again, budget = process.start()
    again.run(progress=False)
    released = again.run(progress=False)
    assert [len(rounds) for rounds in again.history.values()] == [2, 3]
    assert charged(budget) == 6
    assert (released.report["step"], released.report["steps"]) == (5, 6)
    said = "texts: 1 of 6 rounds are left out: their tickets were lost, or used by another run."
    assert [text for text in caplog.messages if "left out" in text] == [said]


def test_a_run_whose_votes_drown_in_noise_says_so_once(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    made, _ = process.start()
    made.run(progress=False)
    assert "stood out" not in caplog.text
    drowned, _ = process.start(llm=dying(0))
    width = len(drowned.history["bank"][-1])
    reach = stats.norm.isf(0.05 / width) * drowned.plan.expected()["noise_scale"]
    drowned._items[0].votes = (0.999 * reach, 0.0)
    drowned._items[1].votes = (1.001 * reach, 0.0)
    for _ in range(2):
        drowned.run(progress=False)
    (said,) = [text for text in caplog.messages if "stood out" in text]
    assert said.startswith("texts: in the last round no candidate of 'bank' stood out of the noise. Use more records")


class _Killing:
    """A share under which the process is gone as soon as its second reservation is on the ledger."""

    def __init__(self, share: Any) -> None:
        self._share = share
        self._taken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._share, name)

    def reserve(self, *args: Any, **kwargs: Any) -> Any:
        taken = self._share.reserve(*args, **kwargs)
        self._taken += 1
        if self._taken == 2:
            raise SystemError("killed")  # nobody gives it back
        return taken


def spoilt(process: Process, spoil: Callable[[list[Any]], object]) -> None:
    """Changes the rounds in the file, and writes the digests that go with them."""
    entries = entries_in(process.file)
    spoil(entries)
    process.file.write_bytes(rechained(process.file.read_bytes(), entries))


def widen(one: dict[str, Any], *, survivors: int, candidates: int = 3) -> None:
    """Makes a round of so many candidates, of which so many survived: fine in all but their number."""
    one["votes"] = {f"text {place}": float(-place) for place in range(candidates)}
    one["survivors"] = list(one["votes"])[:survivors]


def test_the_spoilt_files_below_are_spoilt_by_number_alone(process: Process) -> None:
    process.start()[0].run(progress=False)
    spoilt(process, lambda entries: widen(entries[2], survivors=2))
    assert process.start()[0].votes["bank"] == (0.0, -1.0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entries: entries[0].update(label="other"),
        lambda entries: entries[0].update(label=["bank"]),
        lambda entries: entries[0].update(survivors=[3]),
        lambda entries: entries[0].update(survivors=[[]]),
        lambda entries: entries[0].update(survivors=[]),
        lambda entries: entries[0].update(survivors="a card"),
        lambda entries: entries[0].update(survivors=["never a candidate"]),
        lambda entries: entries[0].update(survivors=entries[0]["survivors"][:1] * 2),
        lambda entries: entries[0].update(votes=["3"]),
        lambda entries: entries[0].update(votes={}),
        lambda entries: entries[0]["votes"].update(a=True),
        lambda entries: entries[0]["votes"].update(a=10**400),
        lambda entries: entries.append(entries[0]),
        lambda entries: entries.insert(0, {}),
        lambda entries: widen(entries[0], survivors=3),
        lambda entries: widen(entries[0], survivors=1, candidates=1_000),
    ],
)
def test_a_file_that_is_not_this_run_s_is_refused(process: Process, spoil: Any) -> None:
    process.start()[0].run(progress=False)
    spoilt(process, spoil)
    with pytest.raises(ConfigurationError):
        process.start()
