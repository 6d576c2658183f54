"""Released votes of a pool, cut anew for free; and the default threshold."""

from __future__ import annotations

from typing import Any

import pytest

from langchain_dpicl import LabelledPool, PrivateExamples
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.released import PoolEntry
from tests.labelling_doubles import CARD, GAUSSIAN, MUTE, NOISES, PLAIN, WIRE, labeler


def pool(*votes: dict[str, float] | None, **named: Any) -> LabelledPool:
    entries = [PoolEntry({"text": f"line {i}"}, None, "rejected", found) for i, found in enumerate(votes)]
    given = {"label_key": "queue", "labels": ("card", "transfer"), "plan": {}, **named}
    return LabelledPool(
        entries, shown={"card": "Card", "transfer": "Transfer"}, report={"epsilon": 1.0, "delta": 1e-5}, **given
    )


@pytest.mark.parametrize(("least", "labels"), [(0.0, ["card", "transfer"]), (5.5, ["card", None]), (9.5, [None, None])])
def test_a_lower_threshold_labels_more_and_a_higher_one_less(least: float, labels: list[str | None]) -> None:
    cut = pool({"card": 9.0, "transfer": 1.0}, {"card": -1.0, "transfer": 5.0}).with_threshold(least)
    assert [entry.label for entry in cut.entries] == labels
    assert [entry.status for entry in cut.entries] == ["labelled" if label else "rejected" for label in labels]
    assert cut.report["epsilon"] == 1.0
    assert cut.with_threshold(0.0).examples[0] == {"text": "line 0", "queue": "Card"}


def test_votes_that_name_no_label_make_none() -> None:
    (entry,) = pool({"card": 1.0, "transfer": 2.0, "other": 7.0}).with_threshold(0.0).entries
    assert (entry.label, entry.status) == (None, "rejected")


def test_entries_without_votes_stay_and_a_chosen_prompt_is_dropped() -> None:
    before = pool({"card": 9.0, "transfer": 1.0}, None, student={"demonstrations": []})
    before = before.with_entry(PoolEntry({"text": "given"}, "transfer", "public"))
    after = before.with_threshold(1.0)
    assert after.entries[1:] == before.entries[1:]
    assert after.student is None


def test_a_pool_without_votes_or_a_threshold_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="gaussian"):
        pool(None).with_threshold(1.0)
    with pytest.raises(ConfigurationError, match="votes"):
        pool({"card": 1.0, "transfer": 0.0}).with_threshold(float("nan"))


def test_a_labeler_s_pool_is_cut_as_the_labeler_would_have_cut_it() -> None:
    made = labeler(noise=GAUSSIAN, public_inputs=[CARD, WIRE, MUTE])
    found = made.run()
    assert [entry.status for entry in found.entries] == ["labelled", "labelled", "rejected"]
    assert found.with_threshold(made.plan.threshold or 0.0).entries == found.entries
    assert not found.with_threshold(1e6).labelled


@pytest.mark.parametrize(("labels", "share"), [(("a", "b"), 0.25), (("a", "b", "c", "d"), 0.125)])
def test_by_default_a_label_needs_half_of_what_chance_gives(labels: tuple[str, ...], share: float) -> None:
    records = [{"text": "x", "queue": labels[0]}]
    private = PrivateExamples(records, label_key="queue", labels=labels, public_size=40)
    made = labeler(private, noise=NOISES["gumbel"], answers=PLAIN.replace(abstain_below="auto"))
    assert made.plan.release.constants == (share * made.plan.expected_rows,)
    assert labeler(noise=GAUSSIAN, answers=PLAIN.replace(abstain_below="auto")).plan.threshold == 0.25 * 20
    assert labeler(noise=GAUSSIAN, answers=PLAIN.replace(abstain_below="never")).plan.threshold is None


def test_teachers_that_say_nothing_label_nothing_by_default() -> None:
    made = labeler(public_inputs=[MUTE], answers=PLAIN.replace(abstain_below="auto"))
    assert [entry.status for entry in made.run().entries] == ["rejected"]
