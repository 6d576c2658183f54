"""The chains of `examples/` run, on the embedded model and with the one line changed; no record is on what is public."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda

from langchain_dpicl import PrivacyBudgetCallbackHandler
from langchain_dpicl.results import Receipt, VotingResult
from tests.example_files import example
from tests.loopback_provider import Provider, provider
from tests.sealed_files import resealed

CANARY = "Quxbadger"


@pytest.fixture(scope="module")
def served() -> Iterator[Provider]:
    with provider() as running:
        yield running


@pytest.fixture
def by_wire(served: Provider, monkeypatch: pytest.MonkeyPatch) -> Provider:
    """What a stock client talks to where its address is not given."""
    monkeypatch.setenv("OPENAI_BASE_URL", served.url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    served.clear()
    return served


def sent(served: Provider) -> str:
    return json.dumps([request.body for request in served.received])


def with_canary(questions: Any, *, every: bool) -> Any:
    """Puts a word into the private records: into each of them, or into the first one."""

    def records(num_per_label: int, **options: Any) -> list[dict[str, str]]:
        made = questions(num_per_label, **options)
        return [
            {**one, "text": f"{CANARY} {one['text']}" if every or place == 0 else one["text"]}
            for place, one in enumerate(made)
        ]

    return records


def test_the_quickstart_releases_answers_votes_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with example("quickstart", SIZE=300) as quickstart:
        quickstart.bank_questions = with_canary(quickstart.bank_questions, every=False)
        quickstart.main()
    shown = capsys.readouterr().out
    released, answers, votes = (
        shown.split(title)[1].split("\n\n")[0] for title in ("\nReleased", "\nA model", "\nPriv")
    )
    assert [line.split("]")[0].strip(" [") for line in released.split("\n")[1:]] == list(quickstart.LABELS)
    assert answers.count(" -> ") == votes.count(" -> ") == 3
    assert all(line.endswith(quickstart.LABELS) for line in f"{answers}\n{votes}".splitlines() if " -> " in line)
    assert "queries_left=17 of 20" in votes
    assert "epsilon: 1 of 1 promised, 0 left, delta 1e-06" in shown
    assert CANARY not in shown


@pytest.mark.loopback
def test_the_quickstart_answers_by_a_provider_that_sees_no_record(
    by_wire: Provider, capsys: pytest.CaptureFixture[str]
) -> None:
    with example("quickstart", provider=True, SIZE=300) as quickstart:
        quickstart.bank_questions = with_canary(quickstart.bank_questions, every=False)
        quickstart.main()
    assert {request.body["model"] for request in by_wire.received} == {"gpt-4.1-mini"}
    asked = [request.body["messages"][0]["content"].rpartition("question: ")[2] for request in by_wire.received]
    wanted = [f"{question}\ntopic:" for question in quickstart.QUESTIONS]
    assert [text for text in asked if text in wanted] == wanted  # the others are content-free, and the probe
    demonstrations = capsys.readouterr().out.split("paid once)\n")[1].split("\n\n")[0]
    first = demonstrations.split("\n")[0].split("] ")[1]
    assert first in by_wire.received[-1].body["messages"][0]["content"]
    assert CANARY not in sent(by_wire)


class TestPrivateFewShotChain:
    """Released once, served from a file."""

    @pytest.fixture(scope="class")
    @staticmethod
    def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("released") / "demonstrations.json"
        with example("private_few_shot_chain", SIZE=300, NUM_SLOTS=20) as chain:
            chain.bank_questions = with_canary(chain.bank_questions, every=False)
            chain.main(["release", str(path)])
        return path

    def test_the_serving_side_verifies_a_file_and_answers(
        self, written: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with example("private_few_shot_chain") as chain:
            del chain.bank_questions, chain.PrivateExamples  # the serving side needs neither
            chain.main(["serve", str(written)])
        shown = capsys.readouterr().out
        assert shown.startswith("verified  epsilon 2.99")
        assert shown.count("   [") == 8
        assert shown.count(" -> ") == 8
        assert [line.split()[-1].count(".") for line in shown.splitlines()[-2:]] == [1, 1]
        assert CANARY not in written.read_text()

    def test_a_file_that_claims_less_than_it_cost_is_refused(self, written: Path, tmp_path: Path) -> None:
        report = json.loads(written.read_text())["report"]
        edited = resealed(written.read_text(), report={**report, "epsilon": 0.5})
        (tmp_path / "cheap.json").write_text(edited)
        with example("private_few_shot_chain") as chain, pytest.raises(SystemExit, match=r"cheap\.json: .*epsilon"):
            chain.main(["serve", str(tmp_path / "cheap.json")])

    def test_one_side_alone_needs_a_file(self, capsys: pytest.CaptureFixture[str]) -> None:
        with example("private_few_shot_chain") as chain, pytest.raises(SystemExit):
            chain.main(["serve"])
        assert "expected a FILE" in capsys.readouterr().err

    @pytest.mark.loopback
    async def test_a_provider_serves_the_file_at_once_for_all_questions(self, written: Path, by_wire: Provider) -> None:
        with example("private_few_shot_chain", provider=True) as chain:
            served = chain.as_chain(await asyncio.to_thread(chain.load, written))
            answers = await chain.answer_at_once(served, ["my card", "my transfer"])
        assert len(answers) == 2
        assert {request.body["model"] for request in by_wire.received} == {"gpt-4.1-mini"}
        assert len(by_wire.received) == 2
        assert sent(by_wire).count("\\ntopic: card payment") == 4  # two demonstrations in each prompt


def told(**scores: float) -> VotingResult:
    """What the voter of the notes says."""
    receipt = Receipt(
        source="release", tickets=1, component="voting", dataset_id="case-notes", ledger_id="0" * 32, entry=2,
        adjacency="add_remove", epsilon=1.0, delta=1e-6, mechanism="gaussian", noise_multiplier=1.0, queries_left=3,
    )  # fmt: skip
    return VotingResult(
        label=max(scores, key=lambda page: scores[page]),
        abstained=False,
        scores=scores,
        expected_votes=40.0,
        receipt=receipt,
    )


class TestPrivateNotesRag:
    """Notes vote, pages are retrieved, a model reads the pages."""

    def test_answers_come_from_public_pages_and_nothing_shows_a_note(self, capsys: pytest.CaptureFixture[str]) -> None:
        with example("private_notes_rag", SIZE=300, NUM_SLOTS=20) as rag:
            rag.bank_questions = with_canary(rag.bank_questions, every=True)
            assert all(CANARY in note["note"] for note in rag.private_notes())
            rag.main(["--ask", "Can a transfer be cancelled?", "--ask", "My cash is wrong."])
        shown = capsys.readouterr().out
        assert shown.count("   pages:") == shown.count("   answer: ") == 2
        assert "queries_left=28 of 30" in shown
        assert "all 30 questions together: epsilon 1.99" in shown
        assert CANARY not in shown

    def test_pages_with_most_noisy_votes_are_retrieved_and_no_others(self) -> None:
        with example("private_notes_rag") as rag:
            voter = RunnableLambda(
                lambda _: told(**{"card payment": 9.9, "transfer": 30.0, "top up": 12.5, "cash withdrawal": -3.0})
            )
            both = rag.NotesRetriever(voter=voter, least=0.25).invoke("?")
            assert [page.metadata["page"] for page in both] == ["transfer", "top up"]
            assert [page.page_content for page in both] == [rag.HANDBOOK["transfer"], rag.HANDBOOK["top up"]]
            one = rag.NotesRetriever(voter=voter, least=0.5).invoke("?")
            assert [page.metadata["votes"] for page in one] == [30.0]
            assert rag.NotesRetriever(voter=voter, least=1.0).invoke("?") == []
            few = RunnableLambda(lambda _: told(**dict.fromkeys(rag.LABELS, 9.0)))
            assert rag.as_chain(few).invoke({"input": "?"})["answer"] == rag.NOBODY

    def test_a_spent_budget_refuses_through_the_stock_chain(self, capsys: pytest.CaptureFixture[str]) -> None:
        with example("private_notes_rag", SIZE=100, NUM_SLOTS=8) as rag:
            planned = rag.make_voter
            rag.make_voter = lambda budget: planned(budget, max_queries=1)
            rag.main(["--ask", "one", "--ask", "two", "--ask", "three"])
        shown = capsys.readouterr().out
        assert shown.count("refused: ") == 1
        assert "three" not in shown

    @pytest.mark.loopback
    def test_a_provider_writes_from_pages_and_sees_no_note(self, by_wire: Provider) -> None:
        with example("private_notes_rag", provider=True, SIZE=100, NUM_SLOTS=8) as rag:
            rag.bank_questions = with_canary(rag.bank_questions, every=True)
            voter = rag.make_voter(PrivacyBudgetCallbackHandler(epsilon=2.0, delta=1e-5))
            rag.as_chain(voter.with_receipts(), least=-1e3).invoke({"input": "Can a transfer be cancelled?"})
        (request,) = by_wire.received
        assert request.body["model"] == "gpt-4.1-mini"
        text = request.body["messages"][0]["content"]
        assert "question: Can a transfer be cancelled?" in text
        assert any(page in text for page in rag.HANDBOOK.values())
        assert CANARY not in text


@pytest.mark.loopback
def test_a_provider_votes_behind_the_retriever(by_wire: Provider) -> None:
    with example("rag_voting", provider=True, SIZE=100, NUM_SLOTS=4) as rag:
        rag.bank_questions = with_canary(rag.bank_questions, every=True)
        voter, budget = rag.make_voter()
        by_wire.clear()  # of the probe
        state = rag.as_chain(voter).invoke({"input": "Can a transfer be cancelled?"})
    assert state["topic"].label in {*rag.LABELS, "a person"}
    assert state["topic"].receipt.queries_left == 29
    assert budget.remaining_epsilon == 2.0
    private = [request for request in by_wire.received if CANARY in json.dumps(request.body)]
    assert 0 < len(private) <= len(by_wire.received) - 1  # the public prompt was asked too
    bodies = [json.dumps(request.body) for request in by_wire.received]
    assert all("Can a transfer be cancelled?" in body or "question: N/A" in body for body in bodies)
    assert any("question: N/A" in body for body in bodies)  # rows are calibrated


@pytest.mark.loopback
def test_a_provider_labels_public_lines(by_wire: Provider) -> None:
    with example("pate_labelling", provider=True, SIZE=100, NUM_SLOTS=4) as pate:
        lines = list(pate.TOPIC_OF)[:2]
        pate.TOPIC_OF = {line: pate.TOPIC_OF[line] for line in lines}
        labeler, budget = pate.make_labeler()
        by_wire.clear()  # of the probe
        pool = labeler.run(progress=False)
    assert [entry.fields["text"] for entry in pool.entries] == lines
    assert labeler.queries_left == 0
    assert budget.remaining_epsilon == pytest.approx(0, abs=1e-9)
    assert {request.body["model"] for request in by_wire.received} == {"gpt-4.1-mini"}
