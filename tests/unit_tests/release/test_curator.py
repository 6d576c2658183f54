"""The stair: spend before look, one record one row, nothing leaves but a paid index."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from langchain_dpicl.backends.fake import FakeBackend, word_copier
from langchain_dpicl.backends.rows.rows import restrict
from langchain_dpicl.backends.sync_async import run_sync
from langchain_dpicl.baselines import open_block_without_privacy
from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.exceptions import PrivacyBudgetError, PrivacyBudgetMismatchError, PrivateAccessError
from langchain_dpicl.generation.plan import release_plan
from langchain_dpicl.privacy.ledger.shares import Reservation
from langchain_dpicl.privacy.ledger.tickets import Ticket
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots, PoissonUnits
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.release import curator
from langchain_dpicl.release import token_block as blocks
from langchain_dpicl.release.token_block import open_block
from tests.doubles import WORDS, RepeatableCoins, SpyBackend

DOMAIN = tuple(word.encode() for word in WORDS)
UNITS = PoissonUnits(sampling_rate=0.5)
SLOTS = PoissonSlots(sampling_rate=0.5, num_slots=6, shots_per_slot=2)


def render(records: Any) -> str:
    return "\n".join([*(record["text"] for record in records), "my"])


def examples(texts: list[str]) -> PrivateExamples:
    return PrivateExamples(texts, public_size=50)


def ticket_for(plan: Any, private: PrivateExamples, *, length: int = 1, count: int = 1) -> tuple[Budget, Reservation]:
    budget = Budget(epsilon=1e4, delta=1e-4)
    budget.bind(private)
    ticket = Ticket(template="t", event=plan.block_event(length), label=None, max_count=count, refundable=True)
    share = budget.declare("test", tickets=(ticket,), partition=private.dataset_id)
    return budget, share.reserve("t", count=count)


def release(
    private: PrivateExamples, reservation: Reservation, backend: Any, *, plan: Any, steps: int = 1
) -> list[int]:
    out = []
    with open_block(
        private,
        reservation,
        plan=plan,
        length=steps,
        backend=backend,
        render=render,
        choose=lambda values: int(values.argmax()),
    ) as block:
        for _ in range(steps):
            out.append(run_sync(block.next_index(DOMAIN)))
            block.push(DOMAIN[out[-1]])
    return out


@pytest.fixture
def backend() -> SpyBackend:
    return SpyBackend(word_copier(WORDS), vocabulary=WORDS)


def test_spend_is_recorded_before_examples_are_read(backend: SpyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = release_plan(UNITS, noise_multiplier=1.0)
    private = examples(["my card was declined"] * 20)
    _, reservation = ticket_for(plan, private)
    seen = []
    real = PrivateExamples._pool

    def spy(self: PrivateExamples, label: str | None, *, ledger_id: str | None) -> Any:
        seen.append(reservation.unburnt)
        return real(self, label, ledger_id=ledger_id)

    monkeypatch.setattr(PrivateExamples, "_pool", spy)
    release(private, reservation, backend, plan=plan)
    assert seen == [0]


def test_coins_from_a_seed_earn_no_epsilon(backend: SpyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = release_plan(UNITS, noise_multiplier=1.0)
    private = examples(["my card was declined"] * 20)
    _, reservation = ticket_for(plan, private)
    for room in (blocks, curator):
        monkeypatch.setattr(room, "SYSTEM_RANDOM", RepeatableCoins(0))
    with pytest.raises(PrivacyBudgetError, match="another generator"):
        release(private, reservation, backend, plan=plan)
    assert reservation.unburnt == 1
    assert backend.private_prompts == []


def test_a_ticket_for_another_event_is_refused_before_it_burns(backend: SpyBackend) -> None:
    private = examples(["my card was declined"] * 20)
    _, reservation = ticket_for(release_plan(UNITS, noise_multiplier=2.0), private)
    with pytest.raises(PrivacyBudgetError, match="ticket for this very block"):
        release(private, reservation, backend, plan=release_plan(UNITS, noise_multiplier=1.0))
    assert reservation.unburnt == 1
    assert backend.private_prompts == []


@pytest.mark.parametrize("wrong", ["adjacency", "data set"])
def test_a_ticket_of_another_adjacency_or_data_set_is_refused_before_it_burns(backend: SpyBackend, wrong: str) -> None:
    plan = release_plan(UNITS, noise_multiplier=1.0, adjacency="add_remove")
    private = PrivateExamples(["my card"] * 20, public_size=50, dataset_id="a")
    other = PrivateExamples(["my card"] * 20, public_size=50, dataset_id="b")
    budget = Budget(epsilon=1e4, delta=1e-4, adjacency="replace_one" if wrong == "adjacency" else "add_remove")
    budget.bind(private)
    budget.bind(other)
    ticket = Ticket(template="t", event=plan.block_event(1))
    reservation = budget.declare("x", tickets=(ticket,), partition="a").reserve("t")
    with pytest.raises(PrivacyBudgetMismatchError, match="expected a ticket for"):
        release(private if wrong == "adjacency" else other, reservation, backend, plan=plan)
    assert reservation.unburnt == 1
    assert backend.private_prompts == []


def test_a_burnt_ticket_pays_for_nothing_more(backend: SpyBackend) -> None:
    plan = release_plan(UNITS, noise_multiplier=1.0)
    private = examples(["my card was declined"] * 20)
    _, reservation = ticket_for(plan, private)
    release(private, reservation, backend, plan=plan)
    with pytest.raises(PrivacyBudgetError):
        release(private, reservation, backend, plan=plan)
    assert len(backend.private_prompts) <= 1


def test_a_block_releases_no_more_than_its_length(backend: SpyBackend) -> None:
    plan = release_plan(UNITS, noise_multiplier=1.0, redraw_every=2)
    private = examples(["my card was declined"] * 20)
    _, reservation = ticket_for(plan, private, length=2)
    with open_block(
        private, reservation, plan=plan, length=2, backend=backend, render=render, choose=lambda v: int(v.argmax())
    ) as block:
        run_sync(block.next_index(DOMAIN))
        run_sync(block.next_index(DOMAIN))
        with pytest.raises(PrivacyBudgetError, match="none left"):
            run_sync(block.next_index(DOMAIN))
    assert len(backend.private_prompts) == 1, "one secret sample per block"


def test_a_failing_model_keeps_the_charge() -> None:
    plan = release_plan(UNITS, noise_multiplier=1.0)
    private = examples(["my card was declined"] * 20)
    _, reservation = ticket_for(plan, private)
    with (
        pytest.raises(KeyboardInterrupt),
        open_block(
            private,
            reservation,
            plan=plan,
            length=1,
            backend=FakeBackend(word_copier(WORDS), vocabulary=WORDS),
            render=render,
            choose=lambda v: int(v.argmax()),
        ),
    ):
        raise KeyboardInterrupt
    assert reservation.unburnt == 0


class Rows:
    """Records the private matrix of each release, from inside."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.matrices: list[np.ndarray] = []
        for room in (blocks, curator):
            monkeypatch.setattr(room, "SYSTEM_RANDOM", RepeatableCoins(seed))
        monkeypatch.setattr(curator, "is_certified", lambda _: True)
        monkeypatch.setattr(blocks, "restrict", self._restrict)

    def _restrict(self, rows: np.ndarray) -> np.ndarray:
        self.matrices.append(restrict(rows))
        return self.matrices[-1]


@pytest.mark.parametrize("seed", range(12))
def test_one_record_moves_one_slot(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The replaced record stands at a fixed position, so both data sets meet the same coins.
    common = ["my card was declined", "my transfer is late", "my top up failed"] * 7
    plan = release_plan(SLOTS, noise_multiplier=1.0)
    matrices = []
    for changed in ("my card is late late late", "my transfer was my card"):
        rows = Rows(monkeypatch, seed)
        private = examples([*common, changed])
        _, reservation = ticket_for(plan, private)
        release(private, reservation, FakeBackend(word_copier(WORDS), vocabulary=WORDS), plan=plan)
        matrices.append(rows.matrices[0])
    moved = np.abs(matrices[0] - matrices[1]).sum(axis=1) > 0
    assert moved.sum() <= 1
    assert matrices[0].shape == (6, len(DOMAIN))


class RaisesOn(FakeBackend):
    """An engine that breaks the contract: it raises for one prompt's content."""

    def open(self, prompts: Any, prefix: Any) -> Any:
        if any("declined declined" in prompt for prompt in prompts):
            raise ValueError("declined declined")
        return super().open(prompts, prefix)


@pytest.mark.parametrize("engine", ["abstains", "raises"])
@pytest.mark.parametrize("seed", range(4))
def test_a_row_that_fails_abstains_alone(engine: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["my card was declined", "my transfer is late"] * 10
    plan = release_plan(SLOTS, noise_multiplier=1.0)
    matrices = []
    for poison in ("my card", "declined declined"):
        rows = Rows(monkeypatch, seed)
        kind = RaisesOn if engine == "raises" else FakeBackend
        backend = kind(word_copier(WORDS), vocabulary=WORDS, fail_rows_containing="declined declined")
        private = examples([*common, poison])
        _, reservation = ticket_for(plan, private)
        release(private, reservation, backend, plan=plan)
        matrices.append(rows.matrices[0])
    moved = np.abs(matrices[0] - matrices[1]).sum(axis=1) > 0
    assert moved.sum() <= 1
    if moved.any():
        assert matrices[1][moved].sum() == 0


def test_a_row_that_cannot_be_rendered_abstains(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(monkeypatch, 0)
    plan = release_plan(PoissonUnits(sampling_rate=1.0), noise_multiplier=1.0)
    private = examples(["my card", "bad"])
    _, reservation = ticket_for(plan, private)

    def picky(records: Any) -> str:
        if records[0]["text"] == "bad":
            raise KeyError("bad")
        return render(records)

    with open_block(
        private,
        reservation,
        plan=plan,
        length=1,
        backend=FakeBackend(word_copier(WORDS), vocabulary=WORDS),
        render=picky,
        choose=lambda v: int(v.argmax()),
    ) as block:
        run_sync(block.next_index(DOMAIN))
    assert sorted((rows.matrices[0].sum(axis=1) > 0).tolist()) == [False, True]


def test_empty_sample_releases_pure_noise() -> None:
    plan = release_plan(PoissonUnits(sampling_rate=0.5), noise_multiplier=1.0)
    picks = set()
    private = examples([])
    _, reservation = ticket_for(plan, private, count=60)
    backend = FakeBackend(word_copier(WORDS), vocabulary=WORDS)
    for _ in range(60):
        picks.update(release(private, reservation, backend, plan=plan))
    # 60 uniform draws over 10 words hit fewer than 3 different ones with probability below 1e-30.
    assert len(picks) >= 3
    assert backend.calls["private_rows"] == 0


def test_the_path_without_privacy_refuses_attached_examples(backend: SpyBackend) -> None:
    plan = release_plan(UNITS)
    private = examples(["my card was declined"])
    ticket_for(plan, private)
    with (
        pytest.raises(PrivateAccessError),
        open_block_without_privacy(private, label=None, plan=plan, length=1, backend=backend, render=render),
    ):
        pass
    assert backend.private_prompts == []


def test_examples_opened_without_privacy_can_never_be_attached(backend: SpyBackend) -> None:
    private = examples(["my card was declined"])
    with open_block_without_privacy(
        private, label=None, plan=release_plan(UNITS), length=1, backend=backend, render=render
    ) as block:
        assert run_sync(block.next_index(DOMAIN)) in range(len(DOMAIN))
    with pytest.raises(PrivateAccessError):
        Budget(epsilon=1, delta=1e-6).bind(private)


def test_restrict_gives_each_row_one_vote_or_none() -> None:
    rows = restrict(np.array([[0.2, 0.2], [0.0, 0.0], [np.nan, 0.5], [-1.0, 2.0]]))
    assert rows.tolist() == [[0.5, 0.5], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]


def test_a_block_shows_no_prompt(backend: SpyBackend) -> None:
    private = examples(["CANARY my card"])
    plan = release_plan(PoissonUnits(sampling_rate=1.0))
    with open_block_without_privacy(private, label=None, plan=plan, length=1, backend=backend, render=render) as block:
        ask = next(block.next_index(DOMAIN))
        boxed = ask.run()
        shown = [repr(block), str(block), repr(ask), repr(boxed)]
    assert not [text for text in shown if "CANARY" in text]
    assert "CANARY" in backend.private_prompts[0][0]
