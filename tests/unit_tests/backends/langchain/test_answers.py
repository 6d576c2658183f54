"""Which choice an answer names: the table, the order of the rules, and that nothing raises."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langchain_dpicl.backends.langchain.texts import ChoiceNames
from langchain_dpicl.exceptions import ConfigurationError

CHOICES = ("card", "card payment", "cash machine", "Transfer", "C++", "1", "no idea", "N/A")
NAMES = ChoiceNames(CHOICES)


def named(text: object) -> str | None:
    place = NAMES.named(text)
    return None if place is None else CHOICES[place]


@pytest.mark.parametrize(
    ("answer", "choice"),
    [
        # the choice itself, in any dress
        ("card", "card"),
        (" card\n", "card"),
        ("CARD", "card"),
        ("transfer", "Transfer"),
        ("\uff43\uff41\uff52\uff44", "card"),  # full-width letters
        ("cash\n machine", "cash machine"),
        ("cash\u00a0machine", "cash machine"),
        ("c++", "C++"),
        ("n/a", "N/A"),
        ("1", "1"),
        ("No idea", "no idea"),
        # quotes, Markdown, marks
        ("**card**", "card"),
        ("`card`", "card"),
        ('"card".', "card"),
        ("\u201ccard\u201d", "card"),
        ("_card_", "card"),
        ("- card", "card"),
        ("# card", "card"),
        ("> card", "card"),
        ("(card)", "card"),
        ("<card>", "card"),
        ("card!!!", "card"),
        ("card?", "card"),
        ("1.", "1"),
        ("```\ncard\n```", "card"),
        ("```text\ncard\n```", "card"),
        ("---\n\ncard", "card"),
        ('{"label": "card"}', "card"),
        # a short beginning with a colon
        ("Label: card", "card"),
        ("Label:card", "card"),
        ("**Label:** card payment", "card payment"),
        ("The correct label is: **Card**.", "card"),
        ("Answer:\ncard", "card"),
        ("Queue: C++", "C++"),
        # the longer one where one begins another
        ("card payment", "card payment"),
        ("card payment, as it failed", "card payment"),
        ("Queue: card payment fee", "card payment"),
        # goes on after the choice
        ("card, as it was declined", "card"),
        ("card (a debit one)", "card"),
        ("card\n\nTicket: the next one\nQueue: Transfer", "card"),
        ("card\nTransfer", "card"),
        ("card: that is the one", "card"),
        ("card card", "card"),
        # the beginning of one choice alone
        ("cash", "cash machine"),
        ("Cash.", "cash machine"),
        ("no", "no idea"),
    ],
)
def test_a_choice_is_found_in_many_dresses(answer: str, choice: str) -> None:
    assert named(answer) == choice


@pytest.mark.parametrize(
    "answer",
    [
        # nothing
        "",
        " \n\t",
        "...",
        "```\n```",
        "\x00",
        "\ud800",
        # something else
        "loan",
        "I'm sorry, but I can't help with that.",
        "I would say card",
        "The answer is card",
        "not card",
        "5",
        # two
        "card or Transfer",
        "card/Transfer",
        "card, Transfer",
        "Transfer (not card)",
        "Queue: card or Transfer",
        "card: rather Transfer",
        "Not card: Transfer",
        # no whole word
        "cards",
        "card payments",
        "cardholder",
        "card_payment",
        "card-holder",
        "ca",
        "c",
        "10",
        "1.5",
        "-1",
        "1%",
        "1,000",
        "+1",
        # look-alikes and hidden characters
        "\u0441ard",  # Cyrillic es
        "c\u0430rd",  # Cyrillic a
        "car\u217e\u200b",
        "ca\u200brd",
        "card\u200b",
        "card\u0301",
        "\u202ecard",
        "\U000e0063ard",
        # too far away
        "Let me think about which of these it is: card",
        # no text
        None,
        7,
        b"card",
        ["card"],
    ],
)
def test_anything_else_names_nothing(answer: object) -> None:
    assert named(answer) is None


def test_the_order_of_the_choices_does_not_matter() -> None:
    backwards = ChoiceNames(CHOICES[::-1])
    for answer in ("card payment fee", "cash", "card", "Queue: 1", "loan"):
        place = backwards.named(answer)
        assert (None if place is None else CHOICES[::-1][place]) == named(answer)


def test_a_beginning_of_two_choices_names_none() -> None:
    names = ChoiceNames(["card payment", "card arrival", "transfer out"])
    assert names.named("card") is None
    assert names.named("transfer") == 2


def test_a_choice_that_holds_others_is_meant_when_it_is_said_whole() -> None:
    names = ChoiceNames(["card", "cash", "card or cash", "Label: other"])
    assert [names.named(text) for text in ("card or cash", "Card or cash.", "Label: other")] == [2, 2, 3]


def test_choices_of_marks_alone_are_named_by_themselves() -> None:
    names = ChoiceNames(["+", "-", "?"])
    assert [names.named(text) for text in ("+", " - ", "?", "!")] == [0, 1, 2, None]


@pytest.mark.parametrize(
    "script", [("\u5361", "\u73b0\u91d1"), ("\u043a\u0430\u0440\u0442\u0430", "\u0434\u0435\u043d\u044c\u0433\u0438")]
)
def test_other_scripts_are_read_like_ours(script: tuple[str, str]) -> None:
    names = ChoiceNames(script)
    quoted = [before + script[0] + after for before, after in ("「」", "『』", "｢｣", "【】", "《》", "〈〉", "〔〕")]
    marked = [script[0] + mark for mark in "。،؛؟۔।"]
    turned = [f"\u200f{script[0]}\u200e", f"\u2067{script[0]}\u2069.", f"\u202b{script[0]}\u202c", f"\u061c{script[0]}"]
    assert {names.named(f"X：{text}") for text in (f"**{script[0]}**\u3002", *quoted, *marked, *turned)} == {0}
    assert names.named(f"{script[1]}, {script[0]}") is None
    assert names.named(script[0] + script[1]) is None


@pytest.mark.parametrize("own", ["《书》", "【书】", "كيف؟", "नहीं।", "why?", '"(x)"'])
def test_a_choice_may_carry_marks_that_are_peeled(own: str) -> None:
    names = ChoiceNames([own, "film"])
    answers = [
        f"**{own}**",
        f"_{own}_",
        f'"{own}"',
        f"Label: {own}",
        f"**标签：** {own}, as it is",
        f"“{own}”.",
        f"- {own}",
    ]
    assert [names.named(answer) for answer in answers] == [0] * len(answers)


@pytest.mark.parametrize(
    "choices",
    [["Card", "card"], ["card", " card"], ["a b", "a  b"], ["\uff21", "a"], ["card", ""], [], "card", ["a", 1]],
)
def test_choices_that_could_not_be_told_apart_are_refused(choices: object) -> None:
    with pytest.raises(ConfigurationError, match="verbalizers"):
        ChoiceNames(choices)  # type: ignore[arg-type]


pieces = st.sampled_from(
    [
        *CHOICES,
        "card",
        ":",
        "**",
        "`",
        "\n",
        " ",
        ".",
        "-",
        "#",
        ">",
        "(",
        '"',
        "or",
        "not",
        "\ud800",
        "\u200b",
        "\u0301",
    ]
)
answers = st.one_of(st.text(), st.lists(pieces, max_size=12).map("".join), st.lists(pieces).map(" ".join))


@settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(answers)
def test_no_answer_raises(answer: str) -> None:
    assert named(answer) in {None, *CHOICES}


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6), st.text(max_size=20))
def test_every_choice_names_itself(choices: list[str], answer: str) -> None:
    try:
        names = ChoiceNames(choices)
    except ConfigurationError:
        return
    assert [names.named(choice) for choice in choices] == list(range(len(choices)))
    assert names.named(answer) in {None, *range(len(choices))}


def test_ten_thousand_mixed_answers_do_not_raise() -> None:
    """The seed is fixed: the same 10,000 answers each time; every choice is named by some, and none by many."""
    pick = random.Random(5)
    parts = [*CHOICES, ":", "**", "`", "\n", " ", ".", ",", "-", "or", "Label", "\ud800", "\u200b", "\u0301", "\x00"]
    found = [named("".join(pick.choice(parts) for _ in range(pick.randrange(8)))) for _ in range(10_000)]
    assert {None, *CHOICES} == set(found)
    assert found.count(None) > 2_000


@pytest.mark.parametrize("long", ["card " * 10**6, "." * 10**6 + "x", "\n" * 10**6, "*- " * 10**6, "\ufdfa" * 10**5])
def test_long_answers_are_read_in_little_time(long: str) -> None:
    """A step for each pair of characters would take hours."""
    started = time.process_time()
    assert named(long) in {None, "card"}
    assert time.process_time() - started < 60.0
