"""A secret sample, its tickets and its labels stay with the process and the share that paid for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from langchain_dpicl import PromptPATEExampleSelector
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.backends.rows.label_rows import LabelRows
from langchain_dpicl.exceptions import ConfigurationError, LedgerError
from langchain_dpicl.privacy.ledger import shares
from langchain_dpicl.release import curator
from langchain_dpicl.release import token_block as blocks
from langchain_dpicl.runs.release_run import RunJournal
from tests.contracts.front_room import CANARY
from tests.contracts.release_run import entries_in
from tests.labelling_doubles import CARD, GAUSSIAN, TEACHERS, Spy, counts, examples, house, labeler
from tests.unit_tests.test_private_frames import WORDS, shows_private, synthesizer, word_copier


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("teachers", TEACHERS)
def test_of_two_processes_that_go_on_from_a_private_call_one_releases(teachers: str) -> None:
    spy, child = Spy(), [0]
    readable, writable = os.pipe()
    made = labeler(llm=spy, rows=TEACHERS[teachers], noise=GAUSSIAN, public_inputs=[CARD])

    def split() -> None:
        child[0] = os.fork()

    spy.at_private = split
    try:
        made.run()
        if child[0] == 0:
            os.write(writable, b"released")
    except BaseException as error:
        if child[0]:
            raise
        os.write(writable, f"{type(error).__name__}, {made._items[0].entry.status}".encode())
    finally:
        if child[0] == 0:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        assert pipe.read() == b"LedgerError, waiting"  # refused before the noise, not only at the commit
    os.waitpid(child[0], 0)
    assert [entry.label for entry in made.result.entries] == ["card"]


def elsewhere(monkeypatch: pytest.MonkeyPatch, room: Any) -> None:
    """As if this were a forked copy of the process."""
    monkeypatch.setattr(room, "this_process", lambda: (-1, 0))


def test_a_block_releases_nothing_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    made = synthesizer(FakeBackend(word_copier(WORDS), vocabulary=WORDS))
    real = blocks.RowSource.score

    def score(self: Any, domain: Any) -> Any:
        elsewhere(monkeypatch, blocks)
        return real(self, domain)

    monkeypatch.setattr(blocks.RowSource, "score", score)
    with pytest.raises(LedgerError, match="fork"):
        made.run()


def test_a_fork_commits_nothing_and_gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = house()
    made = labeler(budget=budget, max_queries=2)
    held = made.share.reserve("label", count=2)
    held.burn()
    with monkeypatch.context() as patch:
        elsewhere(patch, shares)
        assert held.give_back() == 0
        with pytest.raises(LedgerError, match="fork"):
            held.commit()
    assert counts(budget) == {"reserve label": 2}
    assert held.give_back() == 1
    held.commit()


def test_a_stop_as_the_question_is_made_shows_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame of `LabelRows.ask` has the prompts under a name; nobody gets to see it."""

    def ask(self: LabelRows, prompts: Any) -> Any:
        assert any(prompts)
        raise KeyboardInterrupt

    made = labeler()
    monkeypatch.setattr(LabelRows, "ask", ask)
    with pytest.raises(KeyboardInterrupt) as caught:
        made.run()
    assert not [shown for shown in shows_private(caught.value) if CANARY in shown]  # the public row may stand there
    assert not [entry for entry in caught.traceback if entry.name == "ask" and entry.path == Path(__file__)]


def test_a_stop_as_a_block_opens_shows_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    made = synthesizer(FakeBackend(word_copier(WORDS), vocabulary=WORDS))
    monkeypatch.setattr(blocks, "RowSource", stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        made.run()
    assert shows_private(caught.value) == []
    assert "__init__" not in [entry.name for entry in caught.traceback if entry.path == Path(blocks.__file__)]


def test_a_closed_sample_releases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[curator.SecretSample] = []
    real = curator.SecretSample.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        real(self, *given, **named)
        opened.append(self)

    monkeypatch.setattr(curator.SecretSample, "__init__", init)
    labeler(public_inputs=[CARD]).run()
    (sample,) = opened
    sample.left = sample.answers_left = 1
    with pytest.raises(Exception, match="none left"):
        next(sample.next_release(rows=lambda _: None, render=lambda _: "", width=2))


# -- one report speaks for all labels ------------------------------------------------------------------------------


def test_a_labeler_of_another_share_does_not_speak_for_a_pool() -> None:
    private, budget = examples(), house()
    dear = labeler(private, budget=budget, component="dear")
    cheap = labeler(private, budget=budget, component="cheap", epsilon=3e5)
    pool = dear.run()
    with pytest.raises(ConfigurationError, match="labeler: expected the one whose share paid for the pool"):
        PromptPATEExampleSelector(pool, labeler=cheap)
    selector = PromptPATEExampleSelector(pool, labeler=dear)
    with pytest.raises(ConfigurationError, match="component"):
        PromptPATEExampleSelector(selector.pool, labeler=cheap)
    with pytest.raises(ConfigurationError, match="PromptPATELabeler"):
        PromptPATEExampleSelector(pool, labeler=private)  # type: ignore[arg-type]


def test_labels_that_another_component_paid_for_are_refused(tmp_path: Path) -> None:
    path, private, budget = tmp_path / "labels.jsonl", examples(), house()
    first = labeler(private, budget=budget, component="a", checkpoint=path)
    first.run()
    terms: dict[str, Any] = {"ledger_id": budget.ledger_id, "dataset_id": private.dataset_id, "plan": first._public}
    forged = RunJournal(tmp_path / "forged.jsonl", component="b", **terms)
    forged.append(entries_in(path)[0])
    before = counts(budget)
    with pytest.raises(ConfigurationError, match="at most the 0 labels that this component has paid for"):
        labeler(private, budget=budget, checkpoint=tmp_path / "forged.jsonl")
    assert counts(budget) == before


def test_a_checkpoint_with_labels_of_another_task_is_refused(tmp_path: Path) -> None:
    private, budget = examples(), house()
    first = labeler(private, budget=budget, component="a")
    terms: dict[str, Any] = {"ledger_id": budget.ledger_id, "dataset_id": private.dataset_id, "plan": first._public}
    forgeries = [("loan", "labelled", "text"), ("card", "public", "text"), (None, "waiting", "text")]
    for number, (label, status, field) in enumerate([*forgeries, ("card", "labelled", "tExt")]):
        forged = RunJournal(tmp_path / f"{number}", component="a", **terms)
        forged.append({"fields": {field: CARD}, "label": label, "status": status, "votes": None})
        expected = "checkpoint: expected releases with labels of this task" if field == "text" else "expected .*'text'"
        with pytest.raises(ConfigurationError, match=expected):
            labeler(private, budget=budget, checkpoint=tmp_path / f"{number}")
