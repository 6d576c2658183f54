"""Keywords occur as whole words, in any case and spelling; reading a text is total, takes linear time and has an end."""

from __future__ import annotations

import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_dpicl.backends.rows.answer_rows import MOST_CHARACTERS, MOST_PARTS, STOP_WORDS, Keywords
from langchain_dpicl.exceptions import ConfigurationError

HOSTILE = ("", " ", "\x00card\x00", "\ud800 card", "\u202ecard", "card" * 9000, "\u0300" * 9000, "{0.__class__}", "\n")


def found(keyword: str, text: object) -> bool:
    return bool(Keywords([keyword]).bits(text)[0])


class TestWhatOccurs:
    @pytest.mark.parametrize(
        ("keyword", "text"),
        [
            ("card", "card"),
            ("card", "My CARD."),
            ("Card", "a card-holder"),
            ("card", "**card**"),
            ("card", "(card)"),
            ("straße", "STRASSE"),
            ("\ufb01sh", "a fish"),
            ("ｃａｒｄ", "card"),
            ("café", "CAFE\u0301!"),
            ("card", "ca\u00adrd"),
            ("new york", "New\u00a0York"),
            ("new york", "new \n\t york"),
            ("new  york", "in new york city"),
            ("e-mail", "an E-Mail"),
            ("c++", "I like C++."),
            ("$5", "costs $5"),
            ("don't", "I DON'T know"),
            ("हिन्दी", "यह हिन्दी है"),
            ("42", "it is 42"),
            ("\u0130stanbul", "\u0130STANBUL"),
            ("信用卡", "请挂失信用卡并补办新卡"),
            ("カード", "新しいｶｰﾄﾞを注文"),
            ("atm卡", "我的ATM卡丢了"),
            ("บัตร", "อายัดบัตรเครดิต"),
        ],
        ids=ascii,
    )
    def test_a_keyword_is_found_as_whole_words_whatever_case_width_and_composition(
        self, keyword: str, text: str
    ) -> None:
        assert found(keyword, text)

    @pytest.mark.parametrize(
        ("keyword", "text"),
        [
            ("card", "cardboard"),
            ("card", "discard"),
            ("card", "my_card"),
            ("card", "card2"),
            ("card", "cards"),
            ("new york", "new, york"),
            ("new york", "york new"),
            ("new york", "new yorker"),
            ("new york", "new"),
            ("e-mail", "email"),
            ("हि", "हिन्दी"),
            ("卡新", "新卡"),
            ("บัต", "บัตั"),
            ("cafe", "café"),
            ("card", "ca\u200brd"),
            ("card", ""),
        ],
        ids=ascii,
    )
    def test_parts_of_words_and_words_apart_are_not_found(self, keyword: str, text: str) -> None:
        assert not found(keyword, text)

    def test_bits_are_in_the_order_of_the_domain_and_overlap(self) -> None:
        keywords = Keywords(["york", "boat", "new york", "new"])
        assert keywords.bits("to new york").tolist() == [1.0, 0.0, 1.0, 1.0]
        assert keywords.bits("york, york").tolist() == [1.0, 0.0, 0.0, 0.0]
        assert keywords.words == ("york", "boat", "new york", "new")
        assert len(keywords) == 4
        assert repr(keywords) == "Keywords(4 of them, 'york' first)"

    def test_the_end_of_what_is_read_is_where_it_is_said_to_be(self) -> None:
        assert found("card", " " * (MOST_CHARACTERS - 4) + "card")
        assert not found("card", " " * (MOST_CHARACTERS - 3) + "card")


class TestTotality:
    @pytest.mark.parametrize("value", [None, 3, b"card", ["card"], object, {"card": 1}], ids=lambda v: type(v).__name__)
    def test_what_is_no_text_has_no_keywords(self, value: object) -> None:
        assert Keywords(["card"]).bits(value).tolist() == [0.0]

    @pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:9]))
    def test_hostile_texts_raise_nothing(self, text: str) -> None:
        bits = Keywords(["card", "other"]).bits(text)
        assert bits.dtype == np.float64
        assert set(bits.tolist()) <= {0.0, 1.0}

    def test_a_text_of_another_class_is_read_as_the_text_it_is(self) -> None:
        class Odd(str):
            __slots__ = ()

            def __getitem__(self, key: object) -> str:
                raise RuntimeError

            isascii = isalnum = casefold = lower = __iter__ = __getitem__  # type: ignore[assignment]

        assert found("card", Odd("a card"))

    @given(st.text(max_size=200))
    def test_any_text_gives_bits_that_its_composition_does_not_move(self, text: str) -> None:
        keywords = Keywords(["card", "new york", "é", "ß"])
        bits = keywords.bits(text)
        assert bits.shape == (4,)
        assert set(bits.tolist()) <= {0.0, 1.0}
        decomposed = unicodedata.normalize("NFD", text)
        assert np.array_equal(keywords.bits(decomposed), bits)

    @given(st.lists(st.text(alphabet="abc", min_size=1, max_size=2), min_size=1, max_size=30))
    def test_bits_are_what_a_plain_search_finds(self, words: list[str]) -> None:
        domain = ["a", "bb", "a b", "c c c", "ab ca"]
        plain = [float(f" {keyword} " in f" {' '.join(words)} ") for keyword in domain]
        assert Keywords(domain).bits(" ".join(words)).tolist() == plain

    @pytest.mark.parametrize("piece", ["\u0300\u0316", "\u0344\u0345", "e\u0301", "\U0001d15e"], ids=ascii)
    def test_no_long_run_of_marks_is_sorted_as_that_takes_quadratic_time(
        self, piece: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runs: list[int] = []

        def normalize(form: str, text: str) -> str:
            marks = "".join("m" if unicodedata.combining(one) else " " for one in text)
            runs.append(max(map(len, marks.split()), default=0))
            return unicodedata.normalize(form, text)

        watched = SimpleNamespace(**{**vars(unicodedata), "normalize": normalize})
        monkeypatch.setattr("langchain_dpicl.backends.rows.answer_rows.unicodedata", watched)
        Keywords(["card"]).bits(piece * 500)
        assert len(runs) == 2
        assert max(runs) <= 30


class TestDomains:
    @pytest.mark.parametrize(
        ("domain", "said"),
        [
            ("card", "found str"),
            (3, "found int"),
            (["card", 3], "type int"),
            ([], "found none"),
            (["card", ""], "'' with 0"),
            (["\u200d"], "with 0"),
            (["card", "CARD"], "'card' and 'CARD'"),
            (["new york", "new  york"], "read alike"),
            (["a " * (MOST_PARTS + 1)], f"with {MOST_PARTS + 1}"),
        ],
        ids=ascii,
    )
    def test_domains_that_are_none_are_refused_in_words(self, domain: object, said: str) -> None:
        with pytest.raises(ConfigurationError, match="expected") as caught:
            Keywords(domain)  # type: ignore[arg-type]
        assert said in str(caught.value)

    def test_words_of_public_texts_go_by_how_many_texts_have_them_then_by_length(self) -> None:
        texts = ["the CARD was lost, lost, lost", "a lost phone (number)", "Card: phone?"]
        assert Keywords.of_texts(texts, most=9).words == ("phone", "card", "lost", "number")
        assert Keywords.of_texts(texts, most=2).words == ("phone", "card")
        assert Keywords.of_texts(reversed(texts), most=9).words == ("phone", "card", "lost", "number")  # type: ignore[arg-type]

    def test_stop_words_are_left_out_and_can_be_others(self) -> None:
        assert Keywords.of_texts(["The boat and THE sea"], most=9).words == ("boat", "sea")
        assert Keywords.of_texts(["The boat and the sea"], most=9, stop_words=["Boat"]).words == ("and", "sea", "the")
        assert all(word == word.casefold() for word in STOP_WORDS)

    def test_its_own_words_occur_in_the_texts_it_came_from(self) -> None:
        texts = ["Élan vital: STRASSE 42", "naïve ﬁsh"]
        keywords = Keywords.of_texts(texts, most=20)
        assert np.maximum(*(keywords.bits(text) for text in texts)).tolist() == [1.0] * len(keywords)

    @pytest.mark.parametrize(
        "texts", [[], [""], ["the, of!"], ["信用卡丢了"], ["24 小时内补办信用卡 ATM"], "boat", [b"boat"]], ids=repr
    )
    def test_texts_without_words_are_refused(self, texts: object) -> None:
        with pytest.raises(ConfigurationError):
            Keywords.of_texts(texts, most=3)  # type: ignore[arg-type]

    @pytest.mark.parametrize("most", [0, -1, 2.0, True])
    def test_a_number_of_words_has_to_be_one(self, most: object) -> None:
        with pytest.raises(ConfigurationError, match="most"):
            Keywords.of_texts(["boat"], most=most)  # type: ignore[arg-type]
