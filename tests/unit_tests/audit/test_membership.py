"""Membership attacks: who is a member, what is scored, what leaks, and that results say what they are."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import langchain_dpicl
from langchain_dpicl import PrivateExamples
from langchain_dpicl.audit.membership import (
    NOTICE,
    AskTarget,
    Claim,
    MembershipResult,
    Record,
    RocCurve,
    Target,
    membership_attack,
)
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, PrivateAccessError, RecordError
from tests.doubles import RepeatableCoins

LABELS = ("card", "cash", "top up")
CANARY = "zq-member-canary"
PEOPLE = [{"text": f"person {i}", "label": LABELS[i % 3], "other": "kept"} for i in range(60)]


class Remembering:
    """A target that keeps what it was built of and asked, and gives its members away, or does not."""

    def __init__(self, *, tells: bool = True) -> None:
        self.built_of: list[list[Record]] = []
        self.asked: list[list[str]] = []
        self.tells = tells

    def target(self, **options: Any) -> Target:
        return Target("remembering", LABELS, "everything", self.build, **options)

    def build(self, records: Sequence[Record]) -> AskTarget:
        self.built_of.append(list(records))
        members = {record["text"] for record in records}

        def ask(texts: Sequence[str]) -> Any:
            self.asked.append(list(texts))
            known = np.array([text in members for text in texts], dtype=float)[:, None]
            return np.tile(np.array([0.2, 0.3, 0.5]), (len(texts), 1)) + self.tells * known

        return ask


def attacked(target: Target, **options: Any) -> MembershipResult:
    given = {"num_records": 4, "num_prompts": 6, "num_nonmembers": 9, "progress": False, "rng": RepeatableCoins(1)}
    return membership_attack(PEOPLE, target, **{**given, **options})


def members_of(records: Sequence[Record], texts: Sequence[str]) -> list[str]:
    """Returns the texts that were asked of records that the target was built of."""
    names = {record["text"] for record in records}
    return [text for text in texts if text in names]


def label_of(text: str) -> str:
    return next(person["label"] for person in PEOPLE if person["text"] == text)


class TestWhoIsAMember:
    def test_a_target_is_built_of_members_and_asked_about_them_and_others(self) -> None:
        spy = Remembering()
        found = attacked(spy.target(), num_members=2)
        assert found.member_scores.shape == (6, 2)
        assert found.nonmember_scores.shape == (6, 9)
        for records, texts in zip(spy.built_of, spy.asked, strict=True):
            names = [record["text"] for record in records]
            assert len(set(names)) == 4
            assert len(set(texts)) == 11
            assert len(set(texts) & set(names)) == 2
            assert all(record["other"] == "kept" for record in records)

    def test_every_record_and_every_place_in_the_prompt_is_as_likely_a_member(self) -> None:
        """Chi-squared of 1,200 draws over 60 records and 4 places; false alarms once in a million (and coins repeat)."""
        spy = Remembering()
        attacked(spy.target(), num_prompts=1_200, num_nonmembers=1)
        members = [members_of(records, texts)[0] for records, texts in zip(spy.built_of, spy.asked, strict=True)]
        places = [[r["text"] for r in records].index(m) for records, m in zip(spy.built_of, members, strict=True)]
        for drawn, kinds in ((members, 60), (places, 4)):
            counts = Counter(drawn)
            assert len(counts) == kinds
            assert stats.chisquare(list(counts.values())).pvalue > 1e-6

    def test_records_with_the_same_text_count_once(self) -> None:
        """A label is in none of twenty prompts with a chance below 1e-13."""
        spy = Remembering()
        membership_attack(
            [*PEOPLE[:14], *({**person, "label": LABELS[0]} for person in PEOPLE[:14])],
            spy.target(),
            num_records=4,
            num_prompts=20,
            num_nonmembers=10,
            progress=False,
        )
        for records, texts in zip(spy.built_of, spy.asked, strict=True):
            everybody = {record["text"] for record in records} | set(texts)
            assert len(everybody) == 14
        assert {record["label"] for records in spy.built_of for record in records} == set(LABELS)

    def test_others_of_the_same_label_share_the_labels_of_the_members_in_turn(self) -> None:
        spy = Remembering()
        attacked(spy.target(), nonmembers="same_label", num_members=2, num_nonmembers=8, num_prompts=20)
        for records, texts in zip(spy.built_of, spy.asked, strict=True):
            labels, inside = Counter(map(label_of, texts)), Counter(map(label_of, members_of(records, texts)))
            assert inside.total() == 2
            assert labels == {label: 5 * count for label, count in inside.items()}  # theirs, and four others of each
            assert len(set(texts)) == 10

    def test_two_attacks_draw_their_own_members(self) -> None:
        spies = Remembering(), Remembering()
        for spy in spies:
            membership_attack(PEOPLE, spy.target(), num_records=20, num_prompts=2, num_nonmembers=5, progress=False)
        assert spies[0].asked != spies[1].asked

    def test_the_order_of_the_questions_tells_nobody(self) -> None:
        """A target that only counts its questions: members come first by chance alone, once in ten; 600 prompts."""
        turns: list[int] = []

        def build(records: Sequence[Record]) -> AskTarget:
            names = {record["text"] for record in records}

            def ask(texts: Sequence[str]) -> Any:
                turns.extend(turn for turn, text in enumerate(texts) if text in names)
                return np.tile(-np.arange(len(texts), dtype=float)[:, None], (1, 3))

            return ask

        found = attacked(Target("counting", LABELS, "the order", build), num_prompts=600)
        counts = Counter(turns)
        assert counts.total() == 600
        # Chi-squared of ten turns; false alarms once in a million (and the coins repeat).
        assert stats.chisquare([counts[turn] for turn in range(10)]).pvalue > 1e-6
        assert found.member_scores.ravel().tolist() == [-turn for turn in turns]
        everything = np.concatenate([found.member_scores, found.nonmember_scores], axis=1)
        assert (np.sort(everything, axis=1) == np.arange(-9, 1)).all()


class TestScores:
    def test_a_score_is_what_the_records_own_label_gets(self) -> None:
        spy = Remembering()
        found = attacked(spy.target(), num_members=3)
        worth = dict(zip(LABELS, (0.2, 0.3, 0.5), strict=True))
        asked = zip(spy.built_of, spy.asked, found.member_scores, found.nonmember_scores, strict=True)
        for records, texts, inside, outside in asked:
            members = set(members_of(records, texts))
            assert sorted(inside) == sorted(1.0 + worth[label_of(text)] for text in members)
            assert sorted(outside) == sorted(worth[label_of(text)] for text in texts if text not in members)

    def test_a_target_that_remembers_is_found_out_and_one_that_does_not_is_guessed(self) -> None:
        told = attacked(Remembering().target())
        assert told.auc == told.tpr_at(0.01) == told.mean_prompt_auc == 1.0
        silent = attacked(Remembering(tells=False).target(), nonmembers="same_label")
        assert silent.auc != 1.0
        assert silent.mean_prompt_auc == 0.5
        assert silent.tpr_at(0.01) in {0.0, 0.5, 1 / 6, 1 / 3, 2 / 3}

    def test_one_threshold_for_all_prompts_is_not_one_per_prompt(self) -> None:
        levels = np.arange(4.0)[:, None]
        found = result(member_scores=levels + 0.5, nonmember_scores=levels + np.zeros((4, 3)))
        assert found.mean_prompt_auc == 1.0
        assert found.auc == RocCurve.of(found.member_scores, found.nonmember_scores).auc == 10 / 16


def result(**changes: Any) -> MembershipResult:
    given: dict[str, Any] = {
        "name": "a prompt",
        "reads": "label probabilities",
        "num_records": 4,
        "nonmembers": "any",
        "claim": None,
        "member_scores": [[0.75], [0.875]],
        "nonmember_scores": [[0.125, 0.25], [0.5, 0.8125]],
    }
    return MembershipResult(**(given | changes))


class TestResult:
    def test_it_is_frozen_with_its_scores(self) -> None:
        found = result()
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.name = "another"  # type: ignore[misc]
        with pytest.raises(ValueError, match="read-only"):
            found.member_scores[0, 0] = 0.0

    def test_what_a_claim_allows_is_never_shown_smaller(self) -> None:
        found = result(claim=Claim(0.5, 0.0, "replace_one"))
        assert found.claim.auc == pytest.approx(0.62246, abs=1e-5)
        assert "at most 0.623 under its claim" in found.summary()

    def test_it_keeps_no_array_of_the_caller(self) -> None:
        scores = np.array([[0.75], [0.875]])
        found = result(member_scores=scores)
        scores[:] = 0.0
        assert found.member_scores.tolist() == [[0.75], [0.875]]

    def test_printing_it_shows_no_number_that_was_found(self) -> None:
        for shown in (repr(result()), str(result()), f"{result()}"):
            assert shown == "MembershipResult('a prompt', 2 prompts, NOT PRIVATE)"

    def test_every_way_out_says_that_it_is_not_private(self) -> None:
        found = result(claim=Claim(1.0, 1e-5, "add_remove"))
        told = json.loads(json.dumps(found.to_dict(with_scores=True)))
        assert (told["private"], told["epsilon"], told["notice"]) == (False, "infinity", NOTICE)
        assert found.is_private is False
        assert found.summary().endswith(NOTICE)
        assert told["claimed"]["epsilon"] == 1.0
        assert told["claimed"]["allows"]["auc"] == found.claim.auc
        assert told["member_scores"] == [[0.75], [0.875]]
        assert not {"member_scores", "nonmember_scores"} & set(found.to_dict())

    def test_its_numbers_are_those_of_the_scores(self) -> None:
        told = result().to_dict()
        assert told["auc"] == 7 / 8
        assert told["tpr_at_1_percent_fpr"] == 0.5
        assert told["mean_member_score"] == 0.8125
        assert told["mean_nonmember_score"] == pytest.approx(0.421875)
        assert (told["prompts"], told["members_per_prompt"], told["nonmembers_per_prompt"]) == (2, 1, 2)
        assert told["auc_band"][0] <= told["auc"] <= told["auc_band"][1]


def test_nothing_of_the_package_below_takes_an_audit_for_a_release() -> None:
    package = Path(langchain_dpicl.__file__).parent
    above = {package / "audit", package / "cli"}
    below = [path for path in package.rglob("*.py") if above.isdisjoint(path.parents)]
    assert len(below) > 100
    assert [path.name for path in below if "langchain_dpicl.audit" in path.read_text()] == []


class TestWhatIsRefused:
    def test_a_holder_of_private_examples_is(self) -> None:
        private = PrivateExamples([{"text": CANARY, "label": "card"}], public_size=100)
        with pytest.raises(PrivateAccessError, match="own records"):
            membership_attack(private, Remembering().target(), num_records=1)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "broken",
        [{"text": CANARY}, {"text": CANARY, "label": CANARY}, {"text": 7, "label": "card"}, {"label": "card"}, CANARY],
        ids=["no label", "another label", "no text", "no text field", "no record"],
    )
    def test_a_broken_record_is_without_a_word_of_it(self, broken: Any) -> None:
        with pytest.raises(RecordError, match="Index and value are hidden") as caught:
            membership_attack([*PEOPLE, broken], Remembering().target(), num_records=4)
        assert CANARY not in told_by(caught.value)

    def test_too_few_records_are_counted(self) -> None:
        with pytest.raises(ConfigurationError, match="at least 61 with distinct texts, found 60"):
            attacked(Remembering().target(), num_nonmembers=57)
        with pytest.raises(ConfigurationError, match=r"at least 21 of every label .* found 20"):
            attacked(Remembering().target(), num_nonmembers=17, nonmembers="same_label")

    @pytest.mark.parametrize(
        "options",
        [
            {"num_records": 0},
            {"num_prompts": 0},
            {"num_members": 5},
            {"num_nonmembers": 0},
            {"nonmembers": "some"},
        ],
        ids=str,
    )
    def test_numbers_out_of_range_are(self, options: Any) -> None:
        spy = Remembering()
        with pytest.raises(ConfigurationError):
            attacked(spy.target(), **options)
        assert spy.built_of == []

    @pytest.mark.parametrize(
        "answer",
        [lambda texts: np.zeros((len(texts), 2)), lambda texts: np.full((len(texts), 3), np.nan)],
        ids=["too few labels", "nan"],
    )
    def test_rows_that_are_none_are(self, answer: Callable[[Sequence[str]], Any]) -> None:
        with pytest.raises(ConfigurationError, match="target 'odd'"):
            attacked(Target("odd", LABELS, "nothing", lambda _: answer))


def told_by(error: BaseException) -> str:
    """All that an escaping error carries: words, chain, and locals of the package's own frames."""
    shown = []
    seen: list[BaseException | None] = [error]
    for one in seen:
        if one is None:
            continue
        shown.append(repr(one))
        seen += [link for link in (one.__cause__, one.__context__) if link not in seen]
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if "langchain_dpicl" in frame.f_code.co_filename:
                shown.append(repr(frame.f_locals))
    return "\n".join(shown)


class TestFailures:
    MINE = tuple({**person, "text": f"{CANARY} {person['text']}"} for person in PEOPLE)

    def attack(self, error: Callable[[str], Exception], *, at: str) -> BaseException:
        def build(records: Sequence[Record]) -> AskTarget:
            def ask(texts: Sequence[str]) -> Any:
                raise error(texts[0])

            if at == "build":
                raise error(records[0]["text"])
            return ask

        target = Target("failing", LABELS, "nothing", build)
        with pytest.raises(Exception) as caught:
            membership_attack(self.MINE, target, num_records=4, num_nonmembers=5, num_prompts=1, progress=False)
        return caught.value

    @pytest.mark.parametrize("at", ["build", "ask"])
    def test_anybodys_error_is_told_by_its_kind_alone(self, at: str) -> None:
        found = self.attack(KeyError, at=at)
        assert isinstance(found, ConfigurationError)
        assert "KeyError" in str(found)
        assert "target.build" in str(found)
        assert CANARY not in told_by(found)

    @pytest.mark.parametrize("at", ["build", "ask"])
    def test_the_packages_own_errors_arrive_without_the_frames_they_come_from(self, at: str) -> None:
        found = self.attack(lambda _: ModelCallError("the line is down"), at=at)
        assert isinstance(found, ModelCallError)
        assert str(found) == "the line is down"
        assert CANARY not in told_by(found)

    def test_an_interrupt_is_passed_on(self) -> None:
        def build(records: Sequence[Record]) -> AskTarget:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            attacked(Target("stopped", LABELS, "nothing", build))


def test_a_process_without_stderr_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    attacked(Remembering().target(), progress=None)


def test_a_bar_is_shown_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    attacked(Remembering().target(), progress=True)
    assert "membership: remembering" in capsys.readouterr().err
    attacked(Remembering().target(), progress=False)
    assert capsys.readouterr().err == ""
