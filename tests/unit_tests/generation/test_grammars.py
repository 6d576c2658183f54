"""Public grammars: what may come next, what is forced and free, how a cut text is closed."""

from __future__ import annotations

import gc
import json
import pickle
import re
import sys
import weakref
from collections.abc import Sequence
from functools import reduce
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.exceptions import CapabilityError, ConfigurationError
from langchain_dpicl.generation.grammars import Grammar, Matcher, whole_part

MODEL = EmbeddedModel()
TEXTS = [MODEL.token_bytes(token) for token in MODEL.vocabulary()]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "city": {"type": "string"}},
    "required": ["name", "city"],
}


class Ids:
    """An engine whose keys are the places of its texts; the last one ends the text."""

    name = "ids"
    max_top_k = None

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = list(texts)
        self.eos = len(texts)
        self.reads = 0

    def vocabulary(self) -> Sequence[int]:
        self.reads += 1
        return range(len(self.texts) + 1)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eos else self.texts[token]

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")


class Decoder(Ids):
    """An engine that decodes, and tells no bytes."""

    token_bytes = None  # type: ignore[assignment]

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.texts[token] for token in tokens if token != self.eos).decode("utf-8", "replace")


ALPHABET = Ids([bytes([byte]) for byte in range(256)])


def words(*texts: str) -> FakeBackend:
    return FakeBackend(lambda prompt, prefix: {}, vocabulary=texts)


def push_text(matcher: Matcher, text: str) -> Matcher:
    for token in MODEL.encode(text):
        matcher.push(token)
    return matcher


def force(matcher: Matcher, model: Any = MODEL) -> str:
    tokens = matcher.forced()
    for token in tokens:
        matcher.push(token)
    return model.decode(tokens)


def offered(matcher: Matcher, model: Any = MODEL) -> set[str]:
    return {model.decode([model.vocabulary()[column]]) for column in np.flatnonzero(matcher.allowed())}


class TestTheSkeletonOfJson:
    def test_costs_no_release_and_the_fields_cost_one_per_token(self) -> None:
        matcher = Grammar.json_schema(PERSON).bind(MODEL).start()
        written, releases = force(matcher), 0
        for field in (["John", " Smith", '"'], [" Rome", '"']):
            for piece in field:
                assert matcher.forced() == ()
                push_text(matcher, piece)
                written, releases = written + piece, releases + 1
            written += force(matcher)
        assert written == '{"name": "John Smith", "city": " Rome"}'
        assert releases == 5
        assert matcher.is_complete()

    def test_is_spelled_as_the_engine_spells_text(self) -> None:
        tokens = Grammar.json_schema(PERSON).bind(MODEL).start().forced()
        assert list(tokens) == MODEL.encode('{"name": "')

    def test_of_a_pydantic_model_is_that_of_its_schema(self) -> None:
        class Review(pydantic.BaseModel):
            label: Literal["good"]
            stars: Literal[5]

        grammar = Grammar.json_schema(Review)
        assert grammar.to_dict()["schema"]["properties"]["stars"]["const"] == 5
        matcher = grammar.bind(MODEL).start()
        assert force(matcher) == '{"label": "good", "stars": 5}'
        assert matcher.is_complete()

    def test_keeps_the_order_of_the_fields(self) -> None:
        turned = {**PERSON, "properties": dict(reversed(PERSON["properties"].items()))}
        assert MODEL.decode(Grammar.json_schema(turned).bind(MODEL).start().forced()) == '{"city": "'

    def test_is_left_to_choice_where_objects_are_open(self) -> None:
        both = [Grammar.json_schema(PERSON, closed=closed).bind(MODEL).start() for closed in (True, False)]
        closed, opened = (push_text(matcher, '{"name": "a", "city": "b"') for matcher in both)
        assert MODEL.decode(closed.forced()) == "}"
        assert opened.forced() == ()
        assert offered(opened) >= {"}", ","}

    def test_is_not_closed_where_schemas_are_intersected(self) -> None:
        part = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "allOf": [part]}
        grammar = Grammar.json_schema(schema)
        assert grammar.to_dict()["schema"] == schema
        assert not push_text(grammar.bind(MODEL).start(), '{"a": 1, "b": 2').is_stuck()

    def test_closes_inner_objects_but_no_field_that_is_called_like_a_keyword(self) -> None:
        inner = {"type": "object", "properties": {"allOf": {"type": "integer"}}}
        found = Grammar.json_schema({"type": "array", "items": inner}).to_dict()["schema"]
        assert found["items"] == {**inner, "additionalProperties": False}
        assert "additionalProperties" not in inner  # the caller's schema is left alone

    def test_holds_for_whole_texts_drawn_at_random(self) -> None:
        schema = {
            "type": "object",
            "properties": {
                "kind": {"enum": ["spam", "ham"]},
                "note": {"type": "string", "maxLength": 12},
                "tags": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            },
            "required": ["kind", "note", "tags"],
        }
        bound, rng = Grammar.json_schema(schema).bind(MODEL), np.random.default_rng(1)
        for _ in range(5):
            matcher, tokens = bound.start(), []
            while not matcher.is_complete():
                forced = matcher.forced()
                step = forced or (int(rng.choice(np.flatnonzero(matcher.allowed()))),)
                for token in step:
                    matcher.push(token)
                tokens += step
                assert len(tokens) < 400
            found = json.loads(MODEL.decode(tokens))
            assert list(found) == ["kind", "note", "tags"]
            assert found["kind"] in {"spam", "ham"}
            assert len(found["tags"]) <= 2


LANGUAGES = st.lists(st.text('ab é è😀"\\/', min_size=1, max_size=6), min_size=1, max_size=5, unique=True)


def follows(language: list[str], raw: bytes) -> bool:
    return any(text.encode().startswith(raw) for text in language)


class TestAgainstAllTextsOfAFiniteLanguage:
    """The oracle is the list of texts itself: prefixes decide, no parser."""

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(LANGUAGES, st.data())
    def test_allowed_is_what_some_text_goes_on_with(self, language: list[str], data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(language)).encode()
        so_far = whole_part(text[: data.draw(st.integers(0, len(text)))])
        matcher = Grammar.choices(language).bind(MODEL).start(MODEL.encode(so_far.decode()))
        found = matcher.allowed()
        is_held = MODEL.encode(" ")[0] if not matcher.forced() else -1  # a blank left to the next token
        for token, raw in enumerate(TEXTS):
            expected = (
                so_far.decode() in language if token == MODEL.eos else bool(raw) and follows(language, so_far + raw)
            )
            if token == is_held and expected and not found[token]:
                assert {raw[:1] for raw in (TEXTS[c] for c in np.flatnonzero(found))} == {b" "}
            else:
                assert found[token] == expected, raw
        assert (matcher.allowed_of(range(len(TEXTS))) == found).all()
        for token in {*np.flatnonzero(found).tolist(), *range(0, len(TEXTS), 50)} - {is_held}:
            assert matcher._may_follow(token) == found[token]  # byte by byte, as tokens are pushed

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(LANGUAGES, st.data())
    def test_forced_is_what_all_texts_share(self, language: list[str], data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(language))
        so_far = text[: data.draw(st.integers(0, len(text)))]
        rest = [other[len(so_far) :] for other in language if other.startswith(so_far)]
        shared = next(
            n for n in range(99, -1, -1) if len({other[:n] for other in rest}) == 1 and min(map(len, rest)) >= n
        )
        matcher = Grammar.choices(language).bind(ALPHABET).start(list(so_far.encode()))
        raw = b"".join(map(ALPHABET.token_bytes, matcher.forced()))
        # Single bytes leave no choice inside a character whose first byte is shared.
        assert whole_part(raw).decode() == rest[0][:shared]
        after = push_all(matcher, matcher.forced())
        assert after.is_complete() == (rest == [rest[0]])

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(LANGUAGES, st.data())
    def test_closing_ends_any_text(self, language: list[str], data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(language))
        so_far = MODEL.encode(text[: data.draw(st.integers(0, len(text)))])
        found = Grammar.choices(language).bind(MODEL).start(so_far).closing()
        assert found is not None
        assert MODEL.decode([*so_far, *found]) in language


def push_all(matcher: Matcher, tokens: Sequence[Any]) -> Matcher:
    for token in tokens:
        matcher.push(token)
    return matcher


class TestForcedText:
    def test_is_free_wherever_alternatives_of_a_pattern_leave_one_way(self) -> None:
        matcher = Grammar.regex("The answer is (yes|no|not known)[.]").bind(MODEL).start()
        assert force(matcher) == "The answer is"  # the blank is left to " yes"
        assert offered(matcher) >= {" y", " yes", " n", " no", " not"}
        assert " " not in offered(matcher)
        assert force(push_text(matcher, " y")) == "es."
        assert matcher.is_complete()

    def test_keeps_its_last_blank_where_the_vocabulary_has_no_word_for_each_continuation(self) -> None:
        grammar = Grammar.regex("is (yes|no)")
        for texts, expected in [((" y", " n"), "is"), ((" y", " no"), "is ")]:
            model = words("i", "s", " ", "y", "e", "n", "o", "yes", *texts)
            assert model.decode(grammar.bind(model).start().forced()) == expected

    def test_stops_at_whole_characters(self) -> None:
        matcher = Grammar.choices(["né", "nè"]).bind(MODEL).start()
        assert force(matcher) == "n"
        assert {"é", "\ufffd"} == offered(matcher)  # the whole letter, and the byte both letters begin with

    def test_goes_on_inside_a_character_that_was_begun(self) -> None:
        matcher = Grammar.choices(["né", "nè", "日本"]).bind(ALPHABET).start()
        matcher.push(0xE6)
        assert b"".join(map(ALPHABET.token_bytes, matcher.forced())) == "日本".encode()[1:]

    def test_is_also_what_the_vocabulary_alone_leaves(self) -> None:
        model = words("cat", "dog", "s")
        matcher = Grammar.regex("(cat|cow|bull)s?").bind(model).start()
        assert matcher.forced() == (b"cat",)
        push_all(matcher, [b"cat"])
        assert matcher.forced() == ()  # "s", or the end: a choice
        assert offered(matcher, model) == {"s", ""}

    def test_is_not_text_that_may_end_before(self) -> None:
        matcher = push_all(Grammar.regex("a(bc)?").bind(ALPHABET).start(), b"a")
        assert matcher.forced() == ()
        assert not matcher.is_complete()
        matcher.push(ord("b"))
        assert matcher.forced() == (ord("c"),)

    def test_may_be_long(self) -> None:
        matcher = Grammar.regex("(ab){400}c").bind(ALPHABET).start()
        assert bytes(matcher.forced()) == b"ab" * 400 + b"c"

    def test_is_spelled_with_the_fewest_tokens_where_the_engine_does_not_encode(self) -> None:
        model = words("abc", "ab", "cde", "d", "e")
        assert Grammar.regex("abcde").bind(model).start().forced() == (b"ab", b"cde")
        model = words("ab", "cd", "abc", "d")  # two tokens either way: the longer one first
        assert Grammar.regex("abcd").bind(model).start().forced() == (b"abc", b"d")

    def test_is_spelled_by_the_engine_where_it_encodes(self) -> None:
        own, fewest = MODEL.encode("Cannot"), [TEXTS.index(b"Can"), TEXTS.index(b"not")]
        assert len(fewest) < len(own)
        assert list(Grammar.regex("Cannot").bind(MODEL).start().forced()) == own

    def test_leaves_the_matcher_where_it_was(self) -> None:
        matcher = Grammar.json_schema(PERSON).bind(MODEL).start()
        before = matcher.allowed().copy()
        assert matcher.forced() == matcher.forced() != ()
        assert (matcher.allowed() == before).all()


class TestAnswersDependOnReleasedTextAlone:
    def test_so_two_spellings_of_a_text_have_the_same_continuations(self) -> None:
        bound = Grammar.json_schema(PERSON).bind(MODEL)
        whole = MODEL.encode('{"name": "Jürgen')
        bytewise = [TEXTS.index(bytes([byte])) for byte in '{"name": "Jürgen'.encode()]
        assert len(bytewise) > len(whole)
        one, other = bound.start(whole), bound.start(bytewise)
        assert (one.allowed() == other.allowed()).all()
        assert one.forced() == other.forced()
        assert one.closing() == other.closing()

    def test_so_a_draft_is_resumed_at_every_token(self) -> None:
        bound = Grammar.json_schema(PERSON).bind(MODEL)
        running = bound.start()
        tokens = MODEL.encode('{"name": "Ann \\"Bo\\" Li", "city": "Ulm"}')
        for length, token in enumerate(tokens):
            resumed = bound.start(tokens[:length])
            assert (resumed.allowed() == running.allowed()).all()
            assert resumed.forced() == running.forced()
            running.push(token)
        assert running.is_complete()

    def test_so_matchers_of_one_grammar_do_not_touch_each_other(self) -> None:
        bound = Grammar.choices(["ab", "cd"]).bind(ALPHABET)
        first, second = bound.start(), bound.start()
        first.push(ord("a"))
        assert first.forced() == (ord("b"),)
        assert offered(second, ALPHABET) == {"a", "c"}


class TestTheEndOfTheText:
    def test_is_allowed_only_where_the_text_may_end(self) -> None:
        matcher = Grammar.regex("ab+").bind(MODEL).start()
        assert not matcher.allowed()[MODEL.eos]
        with pytest.raises(ConfigurationError, match="allowed"):
            matcher.push(MODEL.eos)
        push_text(matcher, "ab")
        assert matcher.allowed()[MODEL.eos]
        assert not matcher.is_complete()

    def test_is_not_what_unknown_tokens_are(self) -> None:
        matcher = push_all(Grammar.regex("ab*").bind(ALPHABET).start(), b"a")
        assert matcher.allowed_of([ALPHABET.eos, 999, "b", ord("b")]).tolist() == [True, False, False, True]

    def test_lets_nothing_follow(self) -> None:
        matcher = push_all(Grammar.regex("ab*").bind(ALPHABET).start(), [ord("a"), ALPHABET.eos])
        assert matcher.is_complete()
        assert not matcher.allowed().any()
        assert (matcher.forced(), matcher.closing()) == ((), ())
        assert not matcher.allowed_of([ord("b"), ALPHABET.eos]).any()
        with pytest.raises(ConfigurationError):
            matcher.push(ord("b"))

    def test_is_free_where_the_vocabulary_has_nothing_else(self) -> None:
        matcher = Grammar.regex("(ab|cd)+").bind(words("ab", "c")).start()
        assert not matcher.is_complete()
        assert push_all(matcher, [b"ab"]).is_complete() is False  # "ab" again, and "c"
        model = words("ab")
        matcher = Grammar.regex("ab(cd)*").bind(model).start([b"ab"])
        assert matcher.is_complete()


class TestVocabularies:
    def test_with_one_text_under_several_keys_allow_all_of_them_and_force_the_first(self) -> None:
        model = Ids([b"x", b"no", b"yes", b"no"])
        matcher = Grammar.choices(["no", "yes"]).bind(model).start()
        assert np.flatnonzero(matcher.allowed()).tolist() == [1, 2, 3]
        assert Grammar.choices(["no"]).bind(model).start().forced() == (1,)
        assert push_all(matcher, [3]).is_complete()

    def test_that_spell_one_way_twice_are_no_choice(self) -> None:
        matcher = Grammar.choices(["no", "yes"]).bind(Ids([b"no", b"no"])).start()
        assert matcher.forced() == (0,)

    def test_without_bytes_are_read_by_decoding_and_lose_half_characters(self) -> None:
        model = Decoder(["é".encode(), "é".encode()[:1], "é".encode()[1:], b"a"])
        matcher = Grammar.regex("[^x]+").bind(model).start()
        assert np.flatnonzero(matcher.allowed()).tolist() == [0, 3]

    def test_with_bytes_use_half_characters(self) -> None:
        model = Ids(["é".encode()[:1], "é".encode()[1:], b"a"])
        matcher = Grammar.regex("[aé]").bind(model).start()
        assert np.flatnonzero(matcher.allowed()).tolist() == [0, 2]
        matcher.push(0)
        assert not matcher.is_complete()
        assert matcher.forced() == (1,)
        assert push_all(matcher, [1]).is_complete()

    def test_offer_no_token_without_text_and_none_outside_utf8(self) -> None:
        model = Ids([b"", b"\xff", b"a\xff", b"a", b"a" * 300])
        matcher = Grammar.lark("start: /(?s:.)+/").bind(model).start()
        assert np.flatnonzero(matcher.allowed()).tolist() == [3]
        for token in (0, 1, 2, 4, 99, -1, "a", None):
            with pytest.raises(ConfigurationError):
                matcher.push(token)

    def test_offer_nothing_outside_utf8_even_to_grammars_of_bytes(self) -> None:
        rule = '%llguidance {"allow_invalid_utf8": true}\nstart: /(?-u:a[\\xf0-\\xff])/'
        matcher = Grammar.lark(rule).bind(Ids([b"a\xff", b"a\xf4", b"a"])).start()
        assert np.flatnonzero(matcher.allowed()).tolist() == [1, 2]

    def test_are_read_once_per_engine_and_do_not_keep_it_alive(self) -> None:
        model = Ids([b"a", b"b"])
        for pattern in ("a+", "b+", "a+"):
            Grammar.regex(pattern).bind(model)
        assert model.reads == 1
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None

    def test_of_engines_that_cannot_be_hashed_are_read_anew(self) -> None:
        class Unhashable(Ids):
            __hash__ = None  # type: ignore[assignment]

        model = Unhashable([b"a"])
        assert Grammar.regex("a").bind(model).start().forced() == (0,)

    def test_that_cannot_begin_a_text_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="ids can begin"):
            Grammar.regex("abc").bind(Ids([b"x"]))

    def test_show_a_dead_end(self) -> None:
        matcher = Grammar.regex("a(b|c)").bind(words("a", "x")).start([b"a"])
        assert matcher.is_stuck()
        assert (matcher.forced(), matcher.closing(), matcher.is_complete()) == ((), None, False)
        assert not Grammar.regex("ab?").bind(words("a")).start([b"a"]).is_stuck()


class TestEnginesOfTopTokens:
    MODEL = FakeBackend(lambda prompt, prefix: {" yes": 1.0}, max_top_k=3)

    def test_are_asked_about_the_tokens_they_report(self) -> None:
        matcher = Grammar.regex(" (yes|no)!").bind(self.MODEL).start()
        assert matcher.allowed_of([b" y", b" yes!", b"yes", b" maybe", b"", b" yes!!"]).tolist() == [
            *(True, True, False, False, False, False)
        ]
        matcher.push(b" yes")
        assert matcher.forced() == (b"!",)
        matcher.push(b"!")
        assert matcher.allowed_of([b"", b"!"]).tolist() == [True, False]
        assert matcher.is_complete()

    def test_have_no_mask(self) -> None:
        matcher = Grammar.regex("a").bind(self.MODEL).start()
        with pytest.raises(CapabilityError, match="allowed_of"):
            matcher.allowed()
        assert not matcher.is_stuck()

    def test_write_the_skeleton_and_close_in_one_key(self) -> None:
        bound = Grammar.json_schema(PERSON).bind(self.MODEL)
        assert bound.start().forced() == (b'{"name": "',)
        assert bound.start([b'{"name": "', b"Jo"]).closing() == (b'", "city": ""}',)


class TestClosing:
    @pytest.mark.parametrize(
        ("cut", "ending"),
        [
            ("", '{"name": "", "tags": [], "n": 0}'),
            ('{"name": "Jo', '", "tags": [], "n": 0}'),
            ('{"name": "Jo\\', '"", "tags": [], "n": 0}'),
            ('{"name": "", "tags": ["a', '"], "n": 0}'),
            ('{"name": "", "tags": ["a",', ' ""], "n": 0}'),
            ('{"name": "", "tags": [], "n": -', "0}"),
            ('{"name": "", "tags": [], "n": 12', "}"),
            ('{"name": "", "tags": [], "n": 12}', ""),
        ],
    )
    def test_closes_strings_lists_and_objects(self, cut: str, ending: str) -> None:
        tags = {"type": "array", "items": {"type": "string"}}
        properties = {"name": {"type": "string"}, "tags": tags, "n": {"type": "integer"}}
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        found = Grammar.json_schema(schema).bind(MODEL).start(MODEL.encode(cut)).closing()
        assert found is not None
        assert MODEL.decode(found) == ending
        json.loads(cut + MODEL.decode(found))

    @pytest.mark.parametrize("cut", ['{"name": "Jo', '{"name": "é\\u00', '{"name": "' + "x" * 30])
    def test_fills_what_a_schema_wants_of_a_string(self, cut: str) -> None:
        schema = {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 20}, "on": {"type": "string", "format": "date"}},
            "required": ["name", "on"],
        }
        found = Grammar.json_schema(schema).bind(MODEL).start(MODEL.encode(cut)).closing()
        assert found is not None
        value = json.loads(cut + MODEL.decode(found))
        assert len(value["name"]) >= 20
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", value["on"])

    @pytest.mark.parametrize(
        ("pattern", "cut"),
        [(r"[A-Z][a-z]+ [0-9]{2}\.", "Jo"), ("(apple|fig) pie", ""), ('"[^"]*" said (he|she)', '"Oh')],
    )
    def test_ends_a_pattern(self, pattern: str, cut: str) -> None:
        found = Grammar.regex(pattern).bind(MODEL).start(MODEL.encode(cut)).closing()
        assert found is not None
        assert re.fullmatch(pattern, cut + MODEL.decode(found))

    def test_takes_the_shortest_of_those_with_the_fewest_choices(self) -> None:
        closing = Grammar.choices(["apple pie", "fig", "banana"]).bind(MODEL).start([]).closing()
        assert MODEL.decode(closing or ()) == "fig"

    def test_gives_up_on_texts_that_are_far_from_an_end(self) -> None:
        assert Grammar.regex("[a-z]{1000}").bind(MODEL).start([]).closing() is None


class TestTheGrammarItself:
    ALL = (
        Grammar.regex("a|b"),
        Grammar.choices(["a", "b"]),
        Grammar.lark('start: "a" | "b"'),
        Grammar.json_schema({"enum": ["a"]}),
    )

    @pytest.mark.parametrize("grammar", ALL, ids=[grammar.kind for grammar in ALL])
    def test_is_a_value(self, grammar: Grammar) -> None:
        again = Grammar(grammar.kind, grammar.source)
        assert again == grammar == pickle.loads(pickle.dumps(grammar))  # noqa: S301
        assert len({*self.ALL, again}) == 4
        assert json.loads(json.dumps(grammar.to_dict()))["kind"] == grammar.kind
        with pytest.raises(AttributeError):
            grammar.source = "c"  # type: ignore[misc]

    @pytest.mark.parametrize("text", ['say "no"', "a\\b", "new\nline", "sl/ash // x", "😀é", "{b} %json", "\t"])
    def test_takes_choices_to_the_letter(self, text: str) -> None:
        matcher = Grammar.choices([text]).bind(ALPHABET).start()
        assert bytes(matcher.forced()).decode() == text
        assert push_all(matcher, matcher.forced()).is_complete()

    @pytest.mark.parametrize("pattern", ["a/b", r"a\/b", 'q"//x', "#é"])
    def test_takes_patterns_that_look_like_lark(self, pattern: str) -> None:
        assert bytes(Grammar.regex(pattern).bind(ALPHABET).start().forced()).decode() == pattern.replace("\\", "")

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Grammar.regex("("),
            lambda: Grammar.regex(""),
            lambda: Grammar.choices(["half a pair \ud800"]),
            lambda: Grammar.regex(7),  # type: ignore[arg-type]
            lambda: Grammar.regex("(?=a)b"),
            lambda: Grammar.regex(r"(a)\1"),
            lambda: Grammar.regex(r"[^\s\S]"),
            lambda: Grammar.json_schema({"type": "nothing"}),
            lambda: Grammar.json_schema({"not": {"type": "string"}}),
            lambda: Grammar.json_schema({"enum": []}),
            lambda: Grammar.json_schema({"const": float("nan")}),
            lambda: Grammar.json_schema({"properties": 3, "anyOf": 4}),
            lambda: Grammar.json_schema(reduce(lambda inner, _: {"not": inner}, range(5_000), {})),
            lambda: Grammar("json_schema", '{"not":' * 5_000 + "{}" + "}" * 5_000),
            lambda: Grammar.json_schema("string"),  # type: ignore[arg-type]
            lambda: Grammar.json_schema(int),
            lambda: Grammar.json_schema({"x-guidance": 1, "type": "string"}),
            lambda: Grammar("json_schema", "{"),
            lambda: Grammar("choices", '["a", 3]'),
            lambda: Grammar("yaml", "a"),  # type: ignore[arg-type]
            lambda: Grammar.choices([]),
            lambda: Grammar.choices("ab"),
            lambda: Grammar.choices(["a", ""]),
            lambda: Grammar.lark("start: x"),
            lambda: Grammar.lark('start: "a'),
            lambda: Grammar.lark("start: <|end|>"),
        ],
    )
    def test_is_refused_where_it_cannot_be_read(self, make: Any) -> None:
        with pytest.raises(ConfigurationError):
            make()

    @pytest.mark.parametrize(
        "rule",
        ["start: <[65]>", "start: <[*]>", "start: a\na[max_tokens=2]: /[a-z]+/", "start: a\na[temperature=0.5]: /b/"],
    )
    def test_is_refused_where_it_is_about_tokens(self, rule: str) -> None:
        with pytest.raises(ConfigurationError, match="text alone"):
            Grammar.lark(rule)

    def test_may_spell_such_rules_as_text(self) -> None:
        matcher = Grammar.lark('start: "<[65]> max_tokens=2" // <[66]>\n').bind(ALPHABET).start()
        assert bytes(matcher.forced()) == b"<[65]> max_tokens=2"

    def test_that_outgrows_the_parser_is_a_public_fault(self) -> None:
        with pytest.raises(ConfigurationError, match="simplify the grammar"):
            Grammar.regex("a{300000}").bind(MODEL).start().forced()

    def test_prints_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(ConfigurationError):
            Grammar.regex("((")
        with pytest.raises(ConfigurationError):
            Grammar.regex("ab").bind(ALPHABET).start([ord("x")])
        assert capfd.readouterr() == ("", "")

    def test_names_the_extra_that_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(ConfigurationError, match=r"langchain-dpicl\[grammar\]"):
            Grammar.regex("never read before")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=4).map(str.encode), st.integers(0, 16))
def test_the_whole_part_of_a_cut_text_is_the_longest_that_decodes(raw: bytes, cut: int) -> None:
    part = raw[:cut]
    assert whole_part(part).decode() == part.decode("utf-8", "ignore")
