"""Any payload becomes a valid row; a readable one becomes the right row."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langchain_dpicl.backends.langchain.logprobs import (
    EOS,
    LOST,
    first_position,
    next_token,
    positions,
    probability,
    to_rows,
)
from tests.scripted_models import chat_payload, legacy_payload


def is_valid(row: Any) -> bool:
    values = list(row.values())
    return (
        all(isinstance(key, bytes) for key in row)
        and all(type(value) is float and 0.0 <= value <= 1.0 for value in values)
        and float(np.sum(np.array(values))) <= 1.0 + 1e-12
    )


# Numbers as providers write them, and as they should never write them.
numbers = st.one_of(
    st.floats(-12.0, 0.0),
    st.floats(),
    st.integers(),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.sampled_from([-9999.0, -0.0, 1e-9, 10**400, -(10**400), math.inf, -math.inf, math.nan]),
)
texts = st.one_of(
    st.sampled_from(["", " a", "</s>", "\ufffd", "\ud800", "token_id:7", "bytes:\\xe2"]), st.text(max_size=3)
)
raw_bytes = st.one_of(
    st.none(),
    st.lists(st.integers(-2, 300) | st.booleans() | st.none(), max_size=4),
    st.binary(max_size=3),
    st.text(max_size=2),
)
entries = st.one_of(
    st.fixed_dictionaries({}, optional={"token": texts | numbers, "bytes": raw_bytes, "logprob": numbers}),
    numbers,
    st.dictionaries(texts, numbers, max_size=3),
)
tops = st.one_of(st.lists(entries, max_size=6), st.dictionaries(texts, numbers, max_size=6), numbers)
payloads = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "content": st.lists(st.fixed_dictionaries({}, optional={"top_logprobs": tops}) | entries, max_size=2)
            | numbers
        },
    ),
    st.fixed_dictionaries(
        {}, optional={"top_logprobs": st.lists(tops, max_size=2) | tops, "content": st.none() | numbers}
    ),
    entries,
    st.lists(tops, max_size=2),
)


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(payloads, texts | st.none(), st.sampled_from(["stop", "length", "content_filter", None, 3, ["stop"]]))
def test_any_payload_becomes_a_valid_row(payload: object, text: object, finish_reason: object) -> None:
    assert is_valid(next_token(payload, text=text, finish_reason=finish_reason))


def test_ten_thousand_mixed_payloads_become_valid_rows() -> None:
    """Every choice is independent and the seed is fixed: the same 10,000 cases each time, in about a second."""
    pick = random.Random(7)
    values = [-0.1, -3.0, 0.0, 1e-7, 2.0, -9999.0, math.nan, math.inf, -math.inf, True, None, "-1", 10**400, [], {}]
    tokens = ["", " a", "b", "</s>", "\ufffd", "\ud800", "x" * 5000, "token_id:7", None, 7, ["a"]]
    spelled = [None, [], [97], [97, 98], [226], [300], [-1], [True], b"a", b"\xff", "a", [None], 7]

    def one_entry() -> object:
        made = {"token": pick.choice(tokens), "bytes": pick.choice(spelled), "logprob": pick.choice(values)}
        for name in list(made):
            if pick.random() < 0.1:
                del made[name]
        return made if pick.random() < 0.95 else pick.choice(values)

    def one_payload() -> object:
        many = [one_entry() for _ in range(pick.randrange(6))]
        legacy = {str(pick.choice(tokens)): pick.choice(values) for _ in range(pick.randrange(6))}
        return pick.choice([chat(*many), {"content": many}, {"top_logprobs": [legacy]}, {"top_logprobs": legacy}, many])

    rows = [next_token(one_payload(), text="", finish_reason=pick.choice(["stop", "length"])) for _ in range(10_000)]
    assert all(map(is_valid, rows))
    assert sum(bool(row) for row in rows) > 4_000  # the readable parts were read


def chat(*found: object) -> dict[str, Any]:
    """What is written is the first entry, as of a server that reports it among the others."""
    written = found[0] if found and isinstance(found[0], dict) else {}
    return {"content": [{**written, "top_logprobs": list(found)}]}


def entry(token: object, logprob: object, **more: object) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, **more}


BROKEN: dict[str, object] = {
    "nothing": None,
    "an empty list": [],
    "an empty mapping": {},
    "no content": {"content": None},
    "empty content": {"content": []},
    "content of the wrong kind": {"content": "abc"},
    "a position without top logprobs": {"content": [{"token": "a", "logprob": -0.1}]},
    "NaN": chat(entry("a", math.nan)),
    "plus infinity": chat(entry("a", math.inf)),
    "minus infinity": chat(entry("a", -math.inf)),
    "far above zero": chat(entry("a", 3.0)),
    "minus 9999": chat(entry("a", -9999.0)),
    "a boolean": chat(entry("a", False)),
    "a number as text": chat(entry("a", "-0.5")),
    "no logprob": chat({"token": "a"}),
    "a token that is no text": chat(entry(7, -0.5)),
    "a lone surrogate": chat(entry("\ud800", -0.5)),
    "a token id": legacy_payload({"token_id:17": 0.5}),
    "entries of the wrong kind": chat(1, None, "a", ["a", -0.5]),
    "a legacy list of nothing": {"top_logprobs": [None]},
    "a list where a mapping belongs": [chat(entry("a", -0.5))],
}


@pytest.mark.parametrize("payload", BROKEN.values(), ids=list(BROKEN))
def test_an_unreadable_payload_gives_an_empty_row(payload: object) -> None:
    assert next_token(payload, text="a", finish_reason="length") == {}


@pytest.mark.parametrize(
    "shape",
    [
        chat_payload,
        legacy_payload,
        lambda tops: chat_payload(tops) | {"top_logprobs": None},
        lambda tops: chat_payload(tops)["content"],
        lambda tops: {"top_logprobs": [chat_payload(tops)["content"][0]["top_logprobs"]]},
    ],
    ids=["chat", "older", "completion with chat logprobs", "a list of places", "older with entries"],
)
def test_every_shape_reads_the_same_probabilities(shape: Any) -> None:
    found = next_token(shape({" card": 0.5, " cash": 0.25, "</s>": 0.125}))
    assert found == pytest.approx({b" card": 0.5, b" cash": 0.25, EOS: 0.125})


def test_only_the_first_position_is_read() -> None:
    payload = {"content": [*chat_payload({"a": 0.5})["content"], *chat_payload({"b": 0.5})["content"]]}
    assert next_token(payload) == pytest.approx({b"a": 0.5})


def test_a_written_token_that_a_server_leaves_out_of_the_likeliest_counts() -> None:
    """LMDeploy lists the others alone: the second likeliest label would win in every row."""
    others = [entry(" cash", math.log(0.04)), entry("\ufffd", math.log(0.01), bytes=[195])]
    read = {b" cash": 0.04, b"\xc3": 0.01}
    place = {**entry(" card", math.log(0.9)), "top_logprobs": others}
    assert next_token({"content": [place]}) == pytest.approx({b" card": 0.9, **read})
    listed = {**place, "top_logprobs": [entry(" card", math.log(0.9), bytes=list(b" card")), *others]}
    assert next_token({"content": [listed]}) == pytest.approx({b" card": 0.9, **read})
    drawn = {**entry(" fee", math.log(0.001)), "top_logprobs": others}  # at a temperature, from behind the list
    assert next_token({"content": [drawn]}) == pytest.approx(read)
    sure = {**entry(" card", 0.0), "top_logprobs": [entry(" cash", -9999.0)]}  # all others are masked
    assert next_token({"content": [sure]}) == {b" card": 1.0}
    tied = {
        **place,
        "top_logprobs": [entry(" cash", math.log(0.9)), entry(" fee", math.log(0.9) - 4)],
    }  # as of bfloat16
    found = next_token({"content": [tied]})
    assert found[b" card"] == found[b" cash"] > 10 * found[b" fee"]
    by_number = {**place, "top_logprobs": [entry("token_id:17", math.log(0.9)), *others]}
    assert next_token({"content": [by_number]}) == pytest.approx(read)
    half = {**entry("\ufffd", math.log(0.5), bytes=[196]), "top_logprobs": [*others, entry(" card", math.log(0.3))]}
    assert next_token({"content": [half]}) == pytest.approx({b" card": 0.3, **read, b"\xc4": 0.5})


def test_reported_bytes_win_over_the_text() -> None:
    found = next_token(chat(entry("\ufffd", math.log(0.5), bytes=list("é".encode()))))
    assert found == pytest.approx({"é".encode(): 0.5})


def test_bytes_of_the_wrong_kind_fall_back_to_the_text() -> None:
    for wrong in (None, "a", [300], [True], [1.5], [None]):
        assert next_token(chat(entry("a", math.log(0.5), bytes=wrong))) == pytest.approx({b"a": 0.5})


def test_tokens_without_text_and_spellings_of_the_end_add_up_to_the_end() -> None:
    payload = chat(
        entry("", math.log(0.25), bytes=[]), entry("", math.log(0.125), bytes=[]), entry("<|im_end|>", math.log(0.5))
    )
    assert next_token(payload) == pytest.approx({EOS: 0.875})


@pytest.mark.parametrize(
    "end",
    ["<|END_OF_TURN_TOKEN|>", "<turn|>", "<|eot|>", "<|eom_id|>", "<|user|>", "<seed:eos>", "[|endofturn|]", "[e~["],
)
def test_ends_of_many_families_are_known(end: str) -> None:
    """Else a demonstration would hold the marker, and go on behind it to its cap."""
    assert next_token(chat(entry(end, math.log(0.5)))) == pytest.approx({EOS: 0.5})


def test_further_spellings_of_the_end_can_be_given() -> None:
    assert next_token(chat(entry("<halt>", math.log(0.5))), eos_texts={"<halt>"}) == pytest.approx({EOS: 0.5})


def test_probabilities_above_one_in_sum_are_scaled_back_in_proportion() -> None:
    found = next_token(chat(entry("a", 0.0), entry("b", 0.0), entry("a", 0.0)))
    assert found == pytest.approx({b"a": 0.5, b"b": 0.5})  # each capped at 1 first
    assert sum(found.values()) <= 1.0


def test_logprobs_slightly_above_zero_are_certainty() -> None:
    assert probability(1e-7) == 1.0
    assert probability(0.01) == 0.0


def test_an_answer_that_ends_at_once_is_certain_of_the_end() -> None:
    for payload in (None, {"content": []}, {"content": None}, {"top_logprobs": []}):
        assert next_token(payload, text="", finish_reason="stop") == {EOS: 1.0}
    assert next_token(None, text="a", finish_reason="stop") == {}
    assert next_token(None, text="", finish_reason="length") == {}


def test_a_filtered_answer_abstains_whatever_it_holds() -> None:
    assert next_token(chat_payload({"a": 0.5}), text="", finish_reason="content_filter") == {}


def test_entries_are_read_up_to_the_largest_vocabulary() -> None:
    payload = chat(*([entry(f"t{i}", -5.0) for i in range(1_000)] * 301))
    assert len(first_position(payload)) == 300_000
    assert len(first_position({"top_logprobs": [{f"t{i}": -5.0 for i in range(300_001)}]})) == 300_000


def test_the_places_of_an_answer_are_told_apart() -> None:
    chatty = {"content": [*chat_payload({"a": 0.5})["content"], *chat_payload({"b": 0.5})["content"]]}
    older = {"tokens": ["a"], "top_logprobs": [{"a": -0.5}, {"b": -0.5}]}
    assert [(token["token"], len(found)) for token, found in positions(chatty, limit=2)] == [("a", 1), ("b", 1)]  # type: ignore[index]
    assert positions(older, limit=2) == [("a", [("a", -0.5)]), (None, [("b", -0.5)])]
    assert len(positions(chatty, limit=1)) == 1
    assert positions({"top_logprobs": [{"a": -1.0, "b": -2.0}]}, limit=1, most=1) == [(None, [("a", -1.0)])]


def test_placeholders_are_not_read_by_the_bytes_of_their_own_spelling() -> None:
    """vLLM reports the bytes of what it shows: of `token_id:7`, and of the sign for lost bytes."""
    for shown, expected in (("token_id:7", set()), ("\ufffd", {LOST}), ("\ufffda", {LOST})):
        assert next_token(chat(entry(shown, -0.5, bytes=list(shown.encode())))).keys() == expected


def test_a_part_of_a_character_is_read_as_its_bytes_or_as_lost() -> None:
    """Left out, it would let what is reported beside it decide alone which label a row names."""
    assert next_token(chat(entry("", math.log(0.5), bytes=[226]))) == pytest.approx({b"\xe2": 0.5})
    lost = [entry("\ufffd", math.log(0.25)), entry("\ufffd", math.log(0.5), bytes=list("\ufffd".encode()))]
    assert next_token(chat(*lost)) == pytest.approx({LOST: 0.75})
    assert next_token(legacy_payload({"bytes:\\xe2": 0.5})) == pytest.approx({LOST: 0.5})


@pytest.mark.parametrize(
    "number",
    [10**400, -(10**400), math.nan, math.inf, -math.inf, 1.0, None, "-1", [], 1j],
    ids=["huge", "minus huge", "NaN", "infinite", "minus infinite", "above 0", "nothing", "text", "list", "complex"],
)
def test_a_number_that_is_no_logprob_leaves_its_entry_out_and_keeps_the_others(number: object) -> None:
    assert next_token(chat(entry("a", math.log(0.5)), entry("b", number))) == {b"a": pytest.approx(0.5)}


def test_objects_that_raise_make_an_answer_unreadable_and_not_an_error() -> None:
    class Touchy(dict[str, Any]):
        def get(self, *args: object) -> object:
            raise ValueError("a private word")

    assert next_token(chat_payload({"a": 0.5}), text=Touchy(), finish_reason=Touchy()) != {}
    for payload in (Touchy(), {"content": [Touchy()]}, chat(Touchy())):
        assert next_token(payload) == {}


def test_rows_keep_order_and_count_missing_tokens_as_zero() -> None:
    rows = to_rows([{b"a": 0.5, b"b": 0.25}, {}, {b"c": 1.0}], [b"b", b"z", b"a"])
    assert rows.tolist() == [[0.25, 0.0, 0.5], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_a_domain_that_repeats_a_token_does_not_count_it_twice() -> None:
    assert to_rows([{b"a": 0.75}], [b"a", b"a"]).sum() == 0.75


def test_no_rows_and_no_domain_have_the_right_shapes() -> None:
    assert to_rows([], [b"a"]).shape == (0, 1)
    assert to_rows([{b"a": 0.5}], []).shape == (1, 0)
