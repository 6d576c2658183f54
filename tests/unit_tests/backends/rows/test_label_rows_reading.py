"""What one row of scores says about labels, and which first tokens tell labels apart."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from langchain_dpicl.backends.langchain.logprobs import LOST
from langchain_dpicl.backends.rows import label_rows
from langchain_dpicl.backends.rows.label_rows import (
    LEAST_WEIGHT,
    NO_LABEL,
    calibrate_contextually,
    check_verbalizers,
    per_label,
    shares,
    tokens_of_bytes,
    tokens_of_vocabulary,
)
from langchain_dpicl.exceptions import ConfigurationError
from tests.row_strategies import AWKWARD

ANYTHING = st.lists(st.one_of(st.sampled_from(AWKWARD), st.floats(), st.floats(-40, 0)), min_size=2, max_size=6)
LIKELIHOODS = st.lists(st.floats(-300, 0), min_size=3, max_size=3)
INF, NAN = math.inf, math.nan


def is_probability_row(row: list[float]) -> bool:
    return all(0.0 <= value <= 1.0 for value in row) and math.fsum(row) <= 1.0 + 1e-12


def softmax(row: list[float]) -> list[float]:
    """That of one row alone."""
    alone: list[float] = label_rows.softmax(np.array([row]))[0].tolist()
    return alone


def log_of_probabilities(row: list[float]) -> list[float]:
    """That of one row alone."""
    alone: list[float] = label_rows.log_of_probabilities(np.array([row]))[0].tolist()
    return alone


@pytest.mark.parametrize("read", [label_rows.softmax, label_rows.log_of_probabilities])
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40).flatmap(
        lambda width: st.lists(
            st.lists(st.floats(-40, 40) | st.sampled_from(AWKWARD), min_size=width, max_size=width),
            min_size=1,
            max_size=12,
        )
    )
)
def test_a_row_reads_alike_to_the_last_bit_alone_and_among_others(read: Any, rows: list[list[float]]) -> None:
    assert read(np.array(rows)).tobytes() == b"".join(read(np.array([row])).tobytes() for row in rows)


class TestSoftmax:
    def test_divides_likelihoods_by_those_of_all_texts(self) -> None:
        assert softmax([math.log(0.2), math.log(0.1), math.log(0.1)]) == pytest.approx([0.5, 0.25, 0.25])

    def test_what_is_impossible_or_no_number_counts_nothing(self) -> None:
        assert softmax([-2.0, -INF, -2.0]) == [0.5, 0.0, 0.5]
        assert softmax([NAN, -7.0, INF]) == [0.0, 1.0, 0.0]
        assert softmax([NAN, -INF, INF]) == [0.0, 0.0, 0.0]

    def test_tiny_likelihoods_keep_their_ratio(self) -> None:
        assert softmax([-5000.0, -5000.0 + math.log(3.0)]) == pytest.approx([0.25, 0.75])

    def test_numbers_whose_sum_overflows_are_numbers_all_the_same(self) -> None:
        assert softmax([-1.7e308, -1.7e308, -1.7e308 / 2]) == [0.0, 0.0, 1.0]
        assert softmax([1.7e308, -1.7e308]) == [1.0, 0.0]

    @settings(max_examples=60, deadline=None)
    @given(ANYTHING)
    def test_any_row_becomes_a_distribution_or_zeros(self, row: list[float]) -> None:
        found = softmax(row)
        assert len(found) == len(row)
        assert is_probability_row(found)
        is_possible = any(map(math.isfinite, row))
        assert math.fsum(found) == pytest.approx(1.0 if is_possible else 0.0)

    @settings(max_examples=60, deadline=None)
    @given(LIKELIHOODS)
    def test_is_that_of_scipy(self, row: list[float]) -> None:
        assert softmax(row) == pytest.approx(special.softmax(row).tolist(), abs=1e-12)


class TestKept:
    def test_leaves_probabilities_as_they_are(self) -> None:
        assert log_of_probabilities([math.log(0.5), math.log(0.125), -INF]) == pytest.approx(
            [0.5, 0.125, 0.0], rel=1e-15
        )

    def test_a_vote_is_one_and_no_vote_is_zeros(self) -> None:
        assert log_of_probabilities([-INF, 0.0]) == [0.0, 1.0]
        assert log_of_probabilities([-INF, -INF]) == [0.0, 0.0]

    def test_more_than_everything_is_scaled_down(self) -> None:
        assert log_of_probabilities([0.0, 0.0, math.log(0.5)]) == pytest.approx([0.4, 0.4, 0.2])
        assert log_of_probabilities([7.0, NAN, INF]) == [1.0, 0.0, 0.0]

    @settings(max_examples=60, deadline=None)
    @given(ANYTHING)
    def test_any_row_becomes_a_sub_probability(self, row: list[float]) -> None:
        assert len(log_of_probabilities(row)) == len(row)
        assert is_probability_row(log_of_probabilities(row))


class TestShares:
    def test_are_parts_of_the_labels_common_mass(self) -> None:
        assert shares([(0, 0.1), (2, 0.2), (0, 0.1)], 3) == pytest.approx([0.5, 0.0, 0.5])

    def test_a_probability_above_one_counts_as_one(self) -> None:
        assert shares([(0, 4.0), (1, 1.0)], 2) == [0.5, 0.5]

    def test_no_mass_is_zeros(self) -> None:
        assert shares([], 2) == [0.0, 0.0]
        assert shares([(0, 0.3), (1, 0.1), (NO_LABEL, 0.3)], 2) == pytest.approx([0.75, 0.25])
        assert shares([(0, 0.1), (NO_LABEL, 0.3), (1, 0.2), (NO_LABEL, 0.1)], 2) == [0.0, 0.0]
        assert shares([(0, 0.0), (1, NAN), (1, -1.0), (0, INF)], 2) == [0.0, 0.0]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 2), st.one_of(st.sampled_from(AWKWARD), st.floats())), max_size=6))
    def test_any_report_becomes_a_distribution_or_zeros(self, reported: list[tuple[int, float]]) -> None:
        found = shares(reported, 3)
        assert is_probability_row(found)
        has_mass = any(0.0 < value < INF for _, value in reported)
        assert math.fsum(found) == pytest.approx(1.0 if has_mass else 0.0)


def test_the_texts_of_a_label_add_up() -> None:
    assert per_label(np.array([[0.1, 0.2, 0.3, 0.4]]), (0, 1, 1, 0), 3)[0].tolist() == pytest.approx([0.5, 0.5, 0.0])


class TestCalibrated:
    def test_divides_by_the_mean_of_the_content_free_rows(self) -> None:
        # means 0.75 and 0.25: 0.6 / 0.75 = 0.8 and 0.4 / 0.25 = 1.6
        assert calibrate_contextually([0.6, 0.4], [[0.9, 0.1], [0.6, 0.4]], is_exact=True) == pytest.approx(
            [1 / 3, 2 / 3]
        )

    def test_failed_content_free_rows_are_left_out(self) -> None:
        with_failed = calibrate_contextually([0.6, 0.4], [[0.0, 0.0], [0.75, 0.25], [0.0, 0.0]], is_exact=True)
        assert with_failed == calibrate_contextually([0.6, 0.4], [[0.75, 0.25]], is_exact=True)
        assert with_failed == pytest.approx([1 / 3, 2 / 3])

    def test_without_an_answered_content_free_row_nothing_changes(self) -> None:
        assert calibrate_contextually([0.25, 0.25], [], is_exact=True) == [0.25, 0.25]
        assert calibrate_contextually([0.25, 0.25], [[0.0, 0.0]], is_exact=True) == [0.25, 0.25]

    def test_an_abstaining_row_stays_zeros(self) -> None:
        assert calibrate_contextually([0.0, 0.0], [[0.9, 0.1]], is_exact=True) == [0.0, 0.0]

    def test_a_label_that_content_free_rows_do_not_report_counts_the_least_that_they_do(self) -> None:
        # 0.2 / 0.25 = 0.8, 0.5 / 0.75 = 2 / 3 and 0.3 / 0.25 = 1.2
        found = calibrate_contextually([0.2, 0.5, 0.3], [[0.0, 0.75, 0.25]], is_exact=False)
        assert found == pytest.approx([0.3, 0.25, 0.45])

    def test_where_one_label_alone_is_reported_nothing_changes(self) -> None:
        assert calibrate_contextually([0.25, 0.75], [[0.0, 1.0]], is_exact=False) == pytest.approx([0.25, 0.75])

    def test_a_label_that_is_reported_with_next_to_nothing_counts_one_in_a_million(self) -> None:
        # 0.25 / 1e-6 and 0.75 / 1
        found = calibrate_contextually([0.25, 0.75], [[1e-9, 1.0]], is_exact=False)
        assert found == pytest.approx([1.0, 3e-6], rel=1e-5)

    def test_content_free_rows_whose_mean_is_below_all_numbers_raise_nothing(self) -> None:
        assert calibrate_contextually([0.25, 0.75], [[5e-324, 0.0], [0.0, 5e-324]], is_exact=False) == [0.25, 0.75]

    def test_an_exact_likelihood_is_divided_by_as_it_is(self) -> None:
        assert calibrate_contextually([0.25, 0.75], [[1e-9, 1.0]], is_exact=True)[1] == pytest.approx(3e-9)
        assert calibrate_contextually([0.25, 0.75], [[0.0, 1.0]], is_exact=True) == pytest.approx([1.0, 0.0])

    @pytest.mark.parametrize("is_exact", [True, False])
    @settings(max_examples=60, deadline=None)
    @given(own=ANYTHING, free=st.lists(ANYTHING, max_size=3))
    def test_stays_a_distribution_whatever_the_rows(self, is_exact: bool, own: list[float], free: list[list]) -> None:
        rows = [softmax((row * 3)[: len(own)]) for row in free]
        found = calibrate_contextually(
            log_of_probabilities(own), [row for row in rows if len(row) == len(own)], is_exact=is_exact
        )
        assert is_probability_row(found)
        assert any(found) == any(log_of_probabilities(own))

    @settings(max_examples=60, deadline=None)
    @given(LIKELIHOODS, st.lists(LIKELIHOODS, min_size=1, max_size=3))
    def test_is_the_diagonal_matrix_of_the_paper(self, own: list[float], free: list[list[float]]) -> None:
        """Second source: W = diag(p_cf)^-1 applied to the softmax of scipy, in the log domain."""
        base = np.maximum(special.softmax(free, axis=1).mean(axis=0), LEAST_WEIGHT)
        expected = special.softmax(special.log_softmax(own) - np.log(base))
        found = calibrate_contextually(softmax(own), [softmax(row) for row in free], is_exact=True)
        assert found == pytest.approx(expected.tolist(), abs=1e-9)


class TestVerbalizers:
    def test_are_one_list_of_texts_for_each_label(self) -> None:
        assert check_verbalizers([["a", "b", "a"], ("c",)]) == (("a", "b"), ("c",))

    @pytest.mark.parametrize(
        "wrong",
        [
            "ab",
            ["card", "cash"],
            [["card"], "cash"],
            [["card"], []],
            [["card"]],
            [],
            [["card"], [""]],
            [["card"], [" \n"]],
            [["card"], [b"cash"]],
            [["card"], [None]],
            [["card"], ["ca\ud800sh"]],
            None,
        ],
        ids=repr,
    )
    def test_that_are_none_are_refused(self, wrong: object) -> None:
        with pytest.raises(ConfigurationError, match="one list of non-empty texts"):
            check_verbalizers(wrong)

    @pytest.mark.parametrize("other", ["card", " card", "card\n"])
    def test_that_two_labels_share_are_refused(self, other: str) -> None:
        with pytest.raises(ConfigurationError, match="'card' for two of them"):
            check_verbalizers([["card"], ["cash", other]])


def cut(pattern: str) -> Callable[[str], list[bytes]]:
    """A tokenizer that cuts where the pattern does."""
    return lambda text: [token.encode() for token in re.findall(pattern, text)]


def vocabulary(*texts: str) -> list[tuple[int, str]]:
    return list(enumerate(texts))


class TestTokensOfAVocabulary:
    def test_are_those_that_begin_texts_of_one_label_alone(self) -> None:
        known = vocabulary("ca", " card", " cas", "cash", " cash ", "a", " machine", "", " ", "\n", "cards")
        assert tokens_of_vocabulary([["card"], ["cash machine"]], known) == {
            0: NO_LABEL, 1: 0, 2: 1, 3: 1, 4: 1,  # "ca" may be either label, though "cash" is a token
        }  # fmt: skip

    def test_case_and_white_space_in_front_do_not_count(self) -> None:
        known = vocabulary("CARD", "\tCar", "Stra", "STRASS", " Straß")
        assert tokens_of_vocabulary([[" card"], ["Straße"]], known) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}

    def test_texts_of_one_label_may_begin_alike(self) -> None:
        assert tokens_of_vocabulary([["card", "cards"], ["fee"]], vocabulary("card", "fee")) == {0: 0, 1: 1}

    @pytest.mark.parametrize(
        ("labels", "missing"),
        [
            ([["card"], ["card payment"]], r"\('card',\), \('card payment',\)"),
            ([["Card"], ["cARD"]], r"\('Card',\), \('cARD',\)"),
            ([["fee"], ["unheard of"]], r"\[\('unheard of',\)\]"),
        ],
    )
    def test_labels_without_a_token_of_their_own_are_refused_by_name(
        self, labels: list[list[str]], missing: str
    ) -> None:
        known = vocabulary("card", " card", "CARD", "c", " pay", "fee")
        with pytest.raises(ConfigurationError, match=missing) as caught:
            tokens_of_vocabulary(tuple(map(tuple, labels)), known)
        assert 'votes="text"' in str(caught.value)

    def test_a_label_that_is_read_in_a_form_nobody_writes_alone_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"for \[\['us'\]\]"):
            tokens_of_vocabulary([["us"], ["use"], ["home"]], vocabulary("us", "US", "USE", "home"))

    def test_words_that_begin_any_answer_are_no_labels(self) -> None:
        known = vocabulary(" a", " as", " As", "as", " ast", " or", " ord", "a", "A", "I")
        found = tokens_of_vocabulary([["asthma"], ["order"], ["invoice", "I"]], known)
        assert found == {3: 0, 4: 0, 6: 1, 7: 0, 9: 2} | dict.fromkeys((0, 1, 2, 5, 8), NO_LABEL)
        whole = vocabulary(" i", " I", " important", " trivial", "In", " im")  # "important" is not written in parts
        expected = {2: 0, 3: 1} | dict.fromkeys((0, 1, 5), NO_LABEL)
        assert tokens_of_vocabulary([["important"], ["trivial"]], whole) == expected
        parted = vocabulary(" Out", " outage", " Billing")  # "Outage" is " Out|age", whatever "outage" is
        assert tokens_of_vocabulary([["Outage"], ["Billing"]], parted) == {0: 0, 1: 0, 2: 1}
        tokens, known = vocabulary(" Out", " Outa", " Bill"), cut(r" \w{4}")
        assert tokens_of_vocabulary([["Outage"], ["Billing"]], tokens, known) == {0: NO_LABEL, 1: 0, 2: 1}

    def test_parts_of_characters_are_listed_where_tokens_are_bytes(self) -> None:
        labels = [["返品"], ["配送"], ["連絡"]]
        found = tokens_of_vocabulary(labels, [(text.encode(), text) for text in ("返", "配", "連")])
        assert (found[b"\xe8"], found[b" \xe9\x85"], found[b"\xe9"], found[LOST]) == (0, 1, NO_LABEL, NO_LABEL)
        only_listed = tokens_of_vocabulary(
            labels, [(b"\xe8\xbf\x94", "返"), (b"x", "配"), (b"y", "連")], has_parts=False
        )
        assert only_listed == {"返".encode(): 0, b"x": 1, b"y": 2}  # no engine is asked for others
        by_number = tokens_of_vocabulary(labels, vocabulary("返", "配", "連", "\ufffd", " \ufffd"))
        assert by_number == {0: 0, 1: 1, 2: 2, 3: NO_LABEL, 4: NO_LABEL}

    def test_another_word_is_no_label_though_that_of_one_label_alone_is_a_token(self) -> None:
        found = tokens_of_vocabulary([["Anger"], ["Anxiety"]], vocabulary("an", " An", "anger", " Anger", "Anx"))
        assert (found[0], found.get(1, NO_LABEL), found[2], found[4]) == (NO_LABEL, NO_LABEL, 0, 1)

    @pytest.mark.parametrize("other", ["Inpatient", "Input data"])
    def test_a_token_is_no_label_that_may_begin_another_whose_word_is_no_token(self, other: str) -> None:
        tokens = vocabulary(" In", "IN", " Inp", " Out")
        with pytest.raises(ConfigurationError, match=r"for \[\['In'\]\]"):
            tokens_of_vocabulary([["In"], [other], ["Out"]], tokens)
        found = tokens_of_vocabulary([["In", "Outside"], [other]], tokens)
        assert found == {0: NO_LABEL, 1: NO_LABEL, 2: 1, 3: 0}

    def test_a_text_that_is_a_token_begins_with_it_though_its_first_word_is_one_too(self) -> None:
        found = tokens_of_vocabulary([["Q1"], ["Q2"], ["I"]], vocabulary("Q", "Q1", "Q2", "I"))
        assert found == {0: NO_LABEL, 1: 0, 2: 1, 3: 2}

    def test_another_text_may_serve_a_label(self) -> None:
        known = vocabulary("card", "fee", "pay")
        assert tokens_of_vocabulary([["card", "fee"], ["card payment", "payment"]], known) == {0: NO_LABEL, 1: 0, 2: 1}


class TestTokensOfBytes:
    def test_are_all_beginnings_in_four_spellings_with_a_space_and_without(self) -> None:
        found = tokens_of_bytes([[" Mc"], ["no"]])
        expected = {b"M": 0, b"Mc": 0, b"m": 0, b"mc": 0, b"MC": 0, b"n": 1, b"no": 1, b"N": 1, b"No": 1, b"NO": 1}
        assert found == expected | {b" " + token: place for token, place in expected.items()}

    def test_beginnings_that_labels_share_are_no_labels(self) -> None:
        """Left out, they would let what is reported beside them decide alone: always another label."""
        found = tokens_of_bytes([["bill"], ["BIG"]])
        assert {found[token] for token in (b"b", b"bi", b"B", b"Bi", b" bi", b"BI")} == {NO_LABEL}
        assert found[b"bil"] == found[b" Bill"] == found[b"BIL"] == 0
        assert found[b"big"] == found[b" BIG"] == 1

    def test_words_that_begin_any_answer_are_no_labels(self) -> None:
        found = tokens_of_bytes([["asthma"], ["invoice"], ["order"], ["Theft"], ["Atm"]])
        words = (" a", " A", "A", " as", " As", "As", " i", " I", "I", " in", "In", " or", "Or", " the", " at")
        assert {found[word.encode()] for word in words} == {NO_LABEL}
        written = (b"The", b" The", b"At", b" At")  # as rows show the labels; behind a space they begin any sentence
        assert [found[word] for word in written] == [3, NO_LABEL, 4, NO_LABEL]
        one_letter = tokens_of_bytes([["Invoice"], ["Accident"]])
        assert [one_letter[word] for word in (b"I", b"A", b"i", b" In", b"In")] == [NO_LABEL, NO_LABEL, 0, NO_LABEL, 0]
        cut_off = tokens_of_bytes([["Outage"], ["Normal"], ["Overdue"], ["Upgrade"], ["Downtime"], ["Offline"]])
        words = (b" Out", b" No", b"No", b" Over", b" over", b" Up", b" Down", b" Off")
        assert [cut_off[word] for word in words] == [0, NO_LABEL, 1, 2, 2, 3, 4, 5]
        assert tokens_of_bytes([["Onboarding"], ["Fee"]])[b" On"] == NO_LABEL
        assert [found[token] for token in (b"as", b" AS", b" ast", b"in", b"IN", b" Inv", b" ord", b"the", b" theft")] == [
            *[0] * 3, *[1] * 3, 2, *[3] * 2
        ]  # fmt: skip

    def test_such_a_word_counts_where_it_is_the_first_of_a_label(self) -> None:
        found = tokens_of_bytes([["no"], ["in progress"], ["other"]])
        assert [found[token] for token in (b" no", b" No", b"No", b" in", b"In", b" Other")] == [0, 0, 0, 1, 1, 2]

    def test_the_letter_a_is_not_the_article(self) -> None:
        found = tokens_of_bytes([[" A"], [" B"], ["i1"]])
        words = {token for token, place in found.items() if place == NO_LABEL}
        assert words == {b" a", b"I", b" I"}
        assert set(found) - words - {b"I1", b" I1"} == {
            *(b"A", b" A", b"a", b"B", b" B", b"b", b" b", b"i", b" i", b"i1", b" i1"),
        }  # fmt: skip
        assert tokens_of_bytes([["A"], ["B"]], cut(r" ?\w"))[b" a"] == NO_LABEL

    def test_a_part_of_a_character_counts_where_no_other_label_begins_so(self) -> None:
        found = tokens_of_bytes([["返品"], ["配送"], ["連絡"]])  # e8 bf 94, e9 85 8d, e9 80 a3
        assert [found[token] for token in (b"\xe8", b" \xe8\xbf", b"\xe9\x85", b"\xe9\x80")] == [0, 0, 1, 2]
        assert found[b"\xe9"] == found[b" \xe9"] == found[LOST] == NO_LABEL
        assert LOST not in tokens_of_bytes([["card"], ["cash"]])  # of which no part is lost
        known = tokens_of_bytes([["返品"], ["配送"]], lambda text: [text.encode()[:2], text.encode()[2:]])
        assert [known[token] for token in (b"\xe8\xbf", b"\xe9\x85", b"\xe8", b" \xe9")] == [0, 1, NO_LABEL, 1]

    def test_labels_count_in_the_form_in_which_models_write_them(self) -> None:
        decomposed = [["U\u0308belkeit"], ["O\u0308dem"], ["Schmerz"]]  # as files of macOS have it
        found = tokens_of_bytes(decomposed)
        assert [found[token.encode()] for token in (" Übel", "Öd", " U\u0308bel", "ÜB")] == [0, 1, 0, 0]
        found = tokens_of_bytes([["ılıman"], ["ilaç"], ["Straße"]])
        assert [found[token.encode()] for token in (" İl", " Ilı", " Straß", " Strass")] == [1, 0, 2, 2]
        assert found[b" Il"] == NO_LABEL

    def test_no_token_is_empty_or_white_space(self) -> None:
        assert not {b"", b" ", b"\n"} & set(tokens_of_bytes([["\ncard "], [" cash"]]))

    @pytest.mark.parametrize(
        "labels",
        [
            [["card"], ["card payment"]],
            [["card fee"], ["card payment"]],
            [["top-up"], ["top-down"]],
            [["card_arrival"], ["card_linking"]],
            [["4.5"], ["4.2"]],
            [["Q1"], ["Q2"]],
            [["A10"], ["A11"], ["B20"]],
            [["B2B"], ["B2C"]],
            [["3D"], ["3E"]],
            [["24h"], ["24d"]],
            [["gpt4"], ["gpt3"]],
            [["1001"], ["1002"]],
            [["1st"], ["1er"]],
            [["#1"], ["#2"]],
            [["第1"], ["第2"]],
            [["card"], ["CARD"]],
            [["payment"], ["card fee", "card charge"], ["card"]],
        ],
        ids=repr,
    )
    def test_labels_that_no_first_word_tells_apart_are_refused(self, labels: list[list[str]]) -> None:
        with pytest.raises(ConfigurationError, match=r"first tokens distinguish the labels.*votes=.text.*tokenizer="):
            tokens_of_bytes(labels)

    @pytest.mark.parametrize(
        "labels",
        [
            [["(A)"], ["(B)"]],
            [["top up"], ["to pay", "pay"]],
            [["カード"], ["現金"]],
            [[digit] for digit in "0123456789"],
            [["-1"], ["0"], ["1"]],
            [["B2B"], ["C2C"]],
            [["3D"], ["2D"]],
            [["24h"], ["25h"]],
            [["gpt4"], ["claude3"]],
            [["1001"], ["1012"]],
            [["1st"], ["2nd"]],
        ],
        ids=repr,
    )
    def test_labels_that_differ_in_their_first_piece_are_taken(self, labels: list[list[str]]) -> None:
        assert set(tokens_of_bytes(labels).values()) - {NO_LABEL} == set(range(len(labels)))

    def test_a_token_that_runs_into_the_second_word_counts_where_it_is_reported(self) -> None:
        assert tokens_of_bytes([["pay now"], ["cash"]])[b" pay now"] == 0

    def test_a_known_tokenizer_says_where_the_first_token_ends(self) -> None:
        labels = [["24h"], ["25h"]]
        assert set(tokens_of_bytes(labels, cut(r" ?\d\d|\w+")).values()) - {NO_LABEL} == {0, 1}
        with pytest.raises(ConfigurationError, match=r"\('24h',\), \('25h',\).*or take votes=.text.$"):
            tokens_of_bytes([("24h",), ("25h",)], cut(r" ?\d|\w+"))
        assert tokens_of_bytes([["Q1"], ["Q2"]], cut(r" ?\w+"))[b"Q"] == NO_LABEL

    def test_what_is_shorter_than_a_known_first_token_is_another_word(self) -> None:
        found = tokens_of_bytes([["asthma"], ["fee"]], cut(r" \w{3}|\w{2}"))
        lower = [token for token in found if found[token] == 0 and token.islower()]
        assert lower == [b"as", b"ast", b"asth", b"asthm", b"asthma", b" ast", b" asth", b" asthm", b" asthma"]
        assert found[b"As"] == 0  # a word by itself, but the tokenizer begins "Asthma" with it
        assert found[b" as"] == found[b" f"] == NO_LABEL  # left out, they would let what is beside them decide alone
        found = tokens_of_bytes([["High"], ["Low"]], cut(r" ?\w+"))
        assert [found[token] for token in (b"Hi", b" Hi", b"High", b" Lo")] == [NO_LABEL, NO_LABEL, 0, NO_LABEL]

    def test_what_a_tokenizer_with_a_space_before_any_text_leaves_open_is_guessed(self) -> None:
        found = tokens_of_bytes([["asthma"], ["fee"]], lambda text: cut(r" \w{3}| ")(f" {text}"))
        own = [token for token in found if found[token] != NO_LABEL]
        assert [token for token in own if token.endswith((b"s", b"st"))] == [b"as", b"ast", b" ast", b"Ast", b" Ast"]

    def test_a_first_token_that_spells_another_text_leaves_the_guess(self) -> None:
        found = tokens_of_bytes([["asthma"], ["invoice"]], lambda text: cut(r" ?\w{4}|\W")(text.lower()))
        own = [token for token in found if found[token] != NO_LABEL]
        assert [token for token in own if token.endswith((b"s", b"st"))] == [b"Ast", b" Ast"]
        assert found[b" Asth"] == found[b"AST"] == found[b"asth"] == 0

    def test_a_label_needs_a_token_as_it_is_written_with_a_space_in_front_or_without(self) -> None:
        """Chat models write none; rows show "card"."""

        def letters_but_of(*words: str) -> Callable[[str], list[bytes]]:
            return lambda text: [(text if text in words else re.match(" ?.", text)[0]).encode()]

        labels = [["card"], ["fee", "cash"]]
        found = tokens_of_bytes(labels, letters_but_of("card", " card", " cash"))
        assert [found[token] for token in (b"card", b" card", b" cash", b"f", b"c")] == [0, 0, 1, 1, 1]
        assert tokens_of_bytes(labels, letters_but_of("card"), is_chat=True)[b"card"] == 0
        assert tokens_of_bytes(labels, letters_but_of(" card"))[b" card"] == 0
        for words, is_chat in (((" card",), True), (("Card", " Card", "CARD", " CARD"), False)):
            with pytest.raises(ConfigurationError, match="'card'"):
                tokens_of_bytes(labels, letters_but_of(*words), is_chat=is_chat)
        assert tokens_of_bytes(labels, cut(r" |\w+"))[b"card"] == 0  # the space is a token of its own
        labels, over = [["Overdraft"], ["Overdue"]], cut(r" ?(?:Over|\w+)")  # whatever "overdraft" begins with
        with pytest.raises(ConfigurationError, match=r"'Overdraft'.*'Overdue'"):
            tokens_of_bytes(labels, over)
        with pytest.raises(ConfigurationError, match=r"'Overdraft'.*'Overdue'"):
            tokens_of_vocabulary(labels, vocabulary(" Over", " overdraft", " overdue"), over)
        with pytest.raises(ConfigurationError, match="'card'"):
            tokens_of_vocabulary(
                [["card"], ["cash"]], vocabulary(" card", "ca", " cash"), letters_but_of(" card"), is_chat=True
            )

    def test_no_other_spelling_takes_the_first_token_of_a_label_as_it_is_written(self) -> None:
        found = tokens_of_bytes([["I"], ["II"], ["No"], ["Normal"]], cut(r" ?(?:I+|No(?!r)|[A-Z][a-z]+|\w)"))
        tokens = (b"I", b" I", b"II", b"Ii", b" No", b" Nor", b" Normal", b"N")  # "Ii" is "I|i"
        assert [found[token] for token in tokens] == [0, 0, 1, 1, 2, NO_LABEL, 3, NO_LABEL]
        assert tokens_of_bytes([["no"], ["Normal"]], cut(r" ?\w+"))[b"No"] == 0  # "Normal" is not written in parts
