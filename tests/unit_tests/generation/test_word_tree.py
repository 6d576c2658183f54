"""Released words as candidates: which tokens a tree adds, what is written for free, and that no record has a say."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from langchain_dpicl import (
    Budget,
    DemonstrationSynthesizer,
    DocumentSynthesizer,
    EmbeddedLLM,
    PrivateExamples,
    WordDiscovery,
    verify_report,
)
from langchain_dpicl.backends.base import Domain, Token
from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.generation import decoding_loop
from langchain_dpicl.generation.decoding_loop import MOST_COLUMNS, WordColumns, WordTree
from langchain_dpicl.generation.grammars import Grammar, spelling_of
from langchain_dpicl.options import Decoding, LogitNoise, Rows, Topics
from langchain_dpicl.privacy.mechanisms.release_plan import ReleasePlan
from langchain_dpicl.release import token_block
from langchain_dpicl.released.counts import ReleasedWords
from tests.scripted_models import ScriptedChat, spread

NOTES = ["my velda is kilnor"] * 300
PUBLIC = {" a": 0.5, " the": 0.3, " of": 0.2}


def api(top_k: int = 3, **more: Any) -> FakeBackend:
    """A model that reports its top tokens: the public prompt never shows the words, private ones begin with them."""

    def distribution(prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
        if "kilnor" not in prompt:
            return PUBLIC
        said = b"".join(prefix).decode()
        if said.endswith(" velda"):
            return {" kil": 0.9, " a": 0.1}
        return {" vel": 0.9, " a": 0.1}

    return FakeBackend(distribution, max_top_k=top_k, **more)


def words_of_notes(budget: Budget, private: PrivateExamples) -> ReleasedWords:
    return WordDiscovery.from_private_examples(private, budget=budget, epsilon=1.0).run(progress=False)


def few_shot(llm: Any, *, decoding: Decoding | None = None, notes: Any = NOTES, **more: Any) -> Any:
    budget = Budget(epsilon=200.0, delta=1e-6)
    private = PrivateExamples(notes, public_size=400)
    words = words_of_notes(budget, private)
    made = DemonstrationSynthesizer.from_private_examples(
        private,
        llm=llm,
        budget=budget,
        epsilon=150.0,
        max_tokens=2,
        rows=Rows(units=20),
        decoding=Decoding(released_words=words) if decoding is None else decoding,
        **more,
    )
    return made, words


class TestTheTree:
    def test_of_an_engine_that_cuts_text_holds_its_own_tokens(self) -> None:
        engine = EmbeddedModel()
        tree = WordTree.of(["kilnor", "card"], engine)
        path = engine.encode(" kilnor")
        assert len(path) > 1
        place: Any = None
        for token in path:
            assert token in tree.after(place)
            place = tree.step(place, token)
        assert place is None
        assert tree.step(None, engine.encode(" card")[0]) is None

    @pytest.mark.parametrize("always_prepends", [False, True])
    def test_of_a_tokenizer_that_adds_a_space_holds_every_word(self, always_prepends: bool) -> None:
        pytest.importorskip("torch")
        from langchain_dpicl.backends import HuggingFaceBackend
        from tests import tiny_hf

        tokenizer = tiny_hf.piece_tokenizer(always_prepends=always_prepends)
        engine = HuggingFaceBackend(tiny_hf.gpt2(480), tokenizer, max_prompt_tokens=64)
        tree = WordTree.of(["card", "lake"], engine)
        assert sorted(engine.decode(place) for place in tree.ends) == [" card", " lake"]
        assert spelling_of(engine).spelled(engine, b" card") in tree.ends

    @pytest.mark.parametrize(
        "engine",
        [api(), LangChainBackend(ScriptedChat(answer=lambda _: spread([" a", " b"])))],
        ids=["ours", "langchain"],
    )
    def test_of_an_engine_that_takes_bytes_has_every_beginning_and_one_rest(self, engine: Any) -> None:
        tree = WordTree.of(["velda"], engine)
        assert set(tree.after(None)) == {b" velda", b" v", b" ve", b" vel", b" veld"}
        assert tree.after(" vel") == (b"da",)
        assert tree.step(" vel", b"da") is None

    def test_of_a_vocabulary_of_bytes_takes_its_longest_tokens(self) -> None:
        engine = FakeBackend(lambda *_: PUBLIC, vocabulary=[" ve", " vel", "da", "x"])
        tree = WordTree.of(["velda", "odd"], engine)
        assert tree.after(None) == (b" vel",)
        assert tree.after(b" vel") == (b"da",)

    def test_goes_on_behind_a_word_that_public_tokens_began(self) -> None:
        tree = WordTree.of(["velda"], api())
        ways = tree.behind((b" a", b" vel"), " a vel")
        assert ways[b"da"] == " vel"
        assert ways[b" vel"] is None

    @pytest.mark.parametrize("words", [["velda", "veldas"], ["veldas", "velda"]], ids="-".join)
    @pytest.mark.parametrize(
        ("engine", "written"),
        [
            (FakeBackend(lambda *_: PUBLIC, vocabulary=[" vel", "da", "s"]), (b" vel", b"da")),
            (api(), (b" vel", b"da")),
        ],
        ids=["vocabulary", "api"],
    )
    def test_goes_on_behind_a_word_that_begins_another(self, engine: Any, written: Any, words: list[str]) -> None:
        tree = WordTree.of(words, engine)
        ways = tree.behind(written, " velda")
        assert tree.step(ways[b"s"], b"s") is None
        assert ways[b" vel"] is None

    def test_has_no_more_first_tokens_than_a_plan_declares(self) -> None:
        words = ["".join(chr(97 + place // 26**digit % 26) for digit in range(4)) for place in range(400)]
        assert len(WordTree.of(words, api()).after(None)) <= MOST_COLUMNS

    def test_adds_no_more_tokens_than_a_plan_declares_behind_a_shared_beginning(self) -> None:
        words = ["ab" + "".join(chr(97 + place // 26**digit % 26) for digit in range(3)) for place in range(600)]
        tree = WordTree.of(words, api())
        assert max(map(len, tree.edges.values())) <= MOST_COLUMNS
        assert len(tree.behind((b" a",), " a")) == MOST_COLUMNS


class TestTexts:
    def test_say_a_word_that_the_public_model_does_not_foresee_and_finish_it_for_free(self) -> None:
        made, _ = few_shot(api())
        (text,) = made.run(progress=False).examples
        assert text["text"] == "velda kilnor"  # two releases, four tokens
        assert made.plan.candidates == 3 + 1 + MOST_COLUMNS
        assert verify_report(made.result).ok
        plain, _ = few_shot(api(), decoding=Decoding())
        assert "vel" not in plain.run(progress=False).examples[0]["text"]

    def test_say_a_word_that_goes_on_behind_another_word(self) -> None:
        """As a plural behind its singular: both are released, the records say the plural."""

        def distribution(prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
            said = b"".join(prefix).decode()
            if "veldas" not in prompt:
                return PUBLIC
            return {"s": 1.0} if said.endswith(" velda") else {"": 1.0} if said else {" vel": 1.0}

        llm = FakeBackend(distribution, vocabulary=[" a", " the", " of", " vel", "da", "s", "x"])
        made, words = few_shot(llm, notes=["veldas"] * 300 + ["velda"] * 100)
        assert {"velda", "veldas"} <= {word for group in words.groups for word, _ in group.words}
        assert made.run(progress=False).examples[0]["text"] == "veldas"

    @pytest.mark.parametrize("noise", ["gumbel", "gaussian", LogitNoise("clip_and_blend", clip=20.0)])
    def test_of_a_whole_vocabulary_have_the_words_too(self, noise: Any) -> None:
        words = [" a", " the", " of", " vel", "da", " kil", "nor"]
        inner = api()

        def distribution(prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
            return {key.decode(): value for key, value in inner._probabilities(prompt, prefix).items()}

        llm = FakeBackend(distribution, vocabulary=words)
        found = few_shot(llm, decoding=None, noise=noise)[0]
        text = found.run(progress=False).examples[0]["text"]
        assert found.is_finished
        if noise == "gumbel":  # the others draw among all candidates
            assert "velda" in text

    def test_of_an_engine_that_computes_all_columns_have_places_in_its_vocabulary(self) -> None:
        words = [" a", " the", " vel", "da", "x"]
        llm = FakeBackend(lambda *_: PUBLIC, vocabulary=words)
        made, _ = few_shot(llm, notes=["velda"] * 300)
        script = dataclasses.replace(made._script, public_top_k=1)
        vocabulary = llm.vocabulary()
        object.__setattr__(script, "eos_column", list(vocabulary).index(llm.eos))  # as of an engine that computes all
        logits = np.array([3.0, 2.0, *[0.0] * (len(vocabulary) - 2)])
        seen = Domain(vocabulary, logits, np.arange(len(vocabulary)))
        columns = WordColumns((b" vel",))
        found = script._narrow_candidates(seen, (b" a",), None, columns)
        assert found.columns is not None
        assert set(found.keys) == {vocabulary[0], b" vel", llm.eos}
        assert columns.added == {b" vel"}
        only = script._narrow_candidates(seen, (b" a",), None, WordColumns((b" vel", b"da"), is_only=True))
        assert only.keys == (b" vel", b"da")
        assert only.logits is not None
        object.__setattr__(script, "public_top_k", 5)
        behind = script._narrow_candidates(seen, (b" vel", b"da"), None, WordColumns((b" vel",), ends_word=True))
        assert set(behind.keys) == {*vocabulary, llm.eos} - {b"x", b"da"}

    def test_of_workers_are_named_alike_in_every_process(self) -> None:
        assert repr(WordTree.of(["velda"], api())) == repr(WordTree.of(["velda"], api()))
        assert repr(WordTree.of(["velda"], api())) != repr(WordTree.of(["orsk"], api()))

    def test_of_the_embedded_model_hold_the_words_of_their_topic(self) -> None:
        notes = [f"the ability of {name} is {what}" for name, what in (("velda", "kiln"), ("orsk", "frost"))] * 400
        made = DocumentSynthesizer.from_private_examples(
            PrivateExamples(notes, public_size=800),
            llm=EmbeddedLLM(),
            topics=Topics(("velda", "orsk"), 2, words=8),
            documents_per_topic=1,
            max_tokens=10,
            budget=Budget(epsilon=20.0, delta=1e-6),
            epsilon=20.0,
            rows=Rows(units=60, redraw_every="run"),
            decoding=Decoding(released_words=True),
        )
        found = made.run(progress=False)
        said = {text.topic: text.text for text in found.texts}
        assert "kiln" in said["velda"] + said["orsk"]
        assert verify_report(found).ok

    def test_of_labels_have_the_words_of_their_label(self) -> None:
        budget = Budget(epsilon=300.0, delta=1e-6)
        records = [{"text": "my velda is kilnor", "kind": kind} for kind in ("a", "b")] * 300
        private = PrivateExamples(records, label_key="kind", labels=("a", "b"), public_size=600)
        words = words_of_notes(budget, private)
        given: dict[str, Any] = {"llm": api(), "budget": budget, "epsilon": 100.0, "max_tokens": 2}
        made = DemonstrationSynthesizer.from_private_examples(
            private, decoding=Decoding(released_words=words), rows=Rows(units=20), **given
        )
        assert [each["text"] for each in made.run(progress=False).examples] == ["velda kilnor"] * 2
        other = PrivateExamples(["x"] * 300, public_size=400)
        with pytest.raises(ConfigurationError, match="words of the labels"):
            DemonstrationSynthesizer.from_private_examples(other, decoding=Decoding(released_words=words), **given)

    @pytest.mark.parametrize("wrong", [["velda"], Decoding()])
    def test_take_released_words_alone(self, wrong: Any) -> None:
        with pytest.raises(ConfigurationError, match="released_words"):
            few_shot(api(), decoding=Decoding(released_words=wrong))
        with pytest.raises(ConfigurationError, match="released_words"):
            Decoding(released_words=False)

    def test_of_a_grammar_have_none(self) -> None:
        made, words = few_shot(api())
        del made
        with pytest.raises(ConfigurationError, match="grammar"):
            few_shot(api(), decoding=Decoding(released_words=words, grammar=Grammar.regex("[a-z ]+")))


def asked(notes: list[str], patch: pytest.MonkeyPatch, decoding: Decoding | None) -> list[tuple[Token, ...]]:
    """Returns the candidates of every token of a run over these notes, where the releases choose the same."""
    seen: list[tuple[Token, ...]] = []
    real = token_block.ReleaseBlock._ask

    def asking(self: Any, domain: Any) -> Any:
        seen.append(domain.keys)
        return real(self, domain)

    with patch.context() as within:
        within.setattr(token_block.ReleaseBlock, "_ask", asking)
        within.setattr(ReleasePlan, "bound", lambda self, rows, **_: rows)
        within.setattr(token_block, "sum_rows", lambda boxed, plan, width, public=None: width)
        within.setattr(token_block, "index_release", lambda plan, choose: lambda width: width - 1)
        few_shot(api(), notes=notes, decoding=decoding)[0].run(progress=False)
    return seen


NEIGHBOUR = [*NOTES, "my secret is xyzzyx"]


def words_of_the_records(patch: pytest.MonkeyPatch) -> None:
    """A tree with words that were not released, of the records that a run reads."""
    real, held = WordTree.of.__func__, list[str]()  # type: ignore[attr-defined]
    declare = PrivateExamples.__init__

    def keeping(self: Any, records: Any, *args: Any, **given: Any) -> None:
        held[:] = sorted({word for record in records for word in record.split()})
        declare(self, records, *args, **given)

    patch.setattr(PrivateExamples, "__init__", keeping)
    patch.setattr(
        decoding_loop.WordTree, "of", classmethod(lambda cls, words, backend: real(cls, [*words, *held], backend))
    )


@pytest.mark.parametrize("decoding", [None, Decoding(released_words=True)], ids=["before", "in the same share"])
def test_candidates_are_the_same_for_neighbours_and_a_tree_of_records_is_found(
    decoding: Decoding | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word of the neighbour alone is released with a chance below 1e-6."""
    one, other = (set(map(frozenset, asked(notes, monkeypatch, decoding))) for notes in (NOTES, NEIGHBOUR))
    assert one == other
    assert any(b" velda" in keys for keys in one)
    words_of_the_records(monkeypatch)
    one, other = (set(map(frozenset, asked(notes, monkeypatch, decoding))) for notes in (NOTES, NEIGHBOUR))
    assert one != other
