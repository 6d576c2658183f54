"""Votes for the nearest of public candidates: each row by itself, to the last bit, and nothing of a text shows."""

from __future__ import annotations

import asyncio
import copy
import pickle
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langchain_dpicl import Retrieval
from langchain_dpicl._opaque import OpaqueRows
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.rows.neighbour_rows import (
    Candidates,
    LocalEmbeddings,
    NearestRows,
    SimilarTexts,
    direction_of,
    nearest,
)
from langchain_dpicl.exceptions import ConfigurationError, ModelCallError, PrivateAccessError
from tests.evolution_doubles import Topical
from tests.unit_tests.test_private_frames import locals_of_ours

CANDIDATES = ("a card", "a boat", "a film")
ALONE = "LocalEmbeddings(topics=False)"
CANARY = "zx-near-canary card"


def made(embeddings: Any = None, **options: Any) -> tuple[NearestRows, Candidates]:
    source = NearestRows(Topical() if embeddings is None else embeddings, **options)
    return source, source.request_public(CANDIDATES).run()


def votes(source: NearestRows, units: Any, candidates: Candidates) -> list[list[float]]:
    found: list[list[float]] = source.ask(units, candidates).run().take()[:].tolist()
    return found


def test_a_text_votes_for_the_nearest_candidate_and_a_unit_for_those_of_its_texts() -> None:
    source, candidates = made()
    units = [("my card",), ("card card boat", "boat", "boat"), None, (), ("  ",)]
    assert votes(source, units, candidates) == [[1, 0, 0], [1, 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_with_several_neighbours_a_text_votes_for_each_of_them_once() -> None:
    source, candidates = made(neighbours=2)
    assert votes(source, [("card card boat",)], candidates) == [[1, 1, 0]]
    source, candidates = made(neighbours=9)
    assert votes(source, [("card",)], candidates) == [[1, 1, 1]]


def test_a_slice_of_votes_is_the_rows_of_some_units() -> None:
    source, candidates = made(neighbours=2)
    units = [("my card",), None, ("a boat", "a film"), ("card film",)]
    taken = source.ask(units, candidates).run().take()
    assert taken.shape == (4, 3)
    for first in range(5):
        for stop in range(5):
            np.testing.assert_array_equal(taken[first:stop], taken[:][first:stop])


def test_awaited_votes_are_the_same() -> None:
    source, candidates = made()
    units = [("my card",), None, ("a boat",)]
    found = asyncio.run(source.ask(units, candidates).arun()).take()
    assert found[:].tolist() == votes(*made()[:1], units, candidates)
    other = asyncio.run(source.request_public(CANDIDATES).arun())
    np.testing.assert_array_equal(other.directions, candidates.directions)


def test_a_text_is_embedded_once_and_forgotten_when_no_unit_has_it() -> None:
    embeddings = Topical()
    source, candidates = made(embeddings)
    for _ in range(3):
        votes(source, [("my card",), ("my card",), ("a ship",)], candidates)
    assert embeddings.asked.count("my card") == embeddings.asked.count("a ship") == 1
    votes(source, [("a ship",)], candidates)  # the unit with the card is gone
    assert len(source._held.reveal()) == 1
    votes(source, [("a ship",), ("my card",)], candidates)
    assert embeddings.asked.count("a ship") == 1
    assert embeddings.asked.count("my card") == 2
    source.forget()
    assert source._held.reveal() == {}


def test_what_is_kept_between_votes_holds_no_text_and_nothing_that_can_be_looked_up() -> None:
    (one, candidates), (other, _) = made(), made()
    for source in (one, other):
        votes(source, [(CANARY,)], candidates)
    kept, kept_by_other = list(one._held.reveal()), list(other._held.reveal())
    assert all(isinstance(name, bytes) and CANARY.encode() not in name for name in kept)
    assert kept != kept_by_other  # each has a key of its own


def test_a_text_that_cannot_be_embedded_votes_for_nothing_and_moves_nobody() -> None:
    source, candidates = made(Topical(failing=lambda text: "evil" in text))
    assert votes(source, [("card",), ("evil boat", "film"), ("boat",)], candidates) == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_a_fault_of_one_unit_stays_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    source, candidates = made()
    real = NearestRows.rows

    def broken(self: Any, units: Any, them: Any) -> Any:
        if any("evil" in text for unit in units if unit for text in unit.reveal()):
            raise MemoryError("evil")
        return real(self, units, them)

    monkeypatch.setattr(NearestRows, "rows", broken)
    assert votes(source, [("card",), ("evil boat",), ("boat",)], candidates) == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]


@given(
    rows=st.lists(st.lists(st.floats(-1e3, 1e3), min_size=7, max_size=7), min_size=2, max_size=40),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=60)
def test_a_row_is_the_same_alone_and_in_any_company(rows: list[list[float]], seed: int) -> None:
    """Products of whole numbers add exactly: no blocking and no order of a batch moves another row."""
    candidates = np.random.default_rng(seed).normal(size=(30, 7))
    candidates[3] = candidates[11]  # a tie
    public = Candidates(tuple(map(str, range(30))), np.array([direction_of(row) for row in candidates]))
    directions = np.array([direction_of(np.array(row)) for row in rows])
    together = nearest(directions, public, 3)
    alone = np.vstack([nearest(row[None], public, 3) for row in directions])
    np.testing.assert_array_equal(together, alone)
    near = directions.astype(np.int64) @ public.directions.astype(np.int64).T
    assert (np.take_along_axis(near, nearest(directions, public, 1), 1)[:, 0] == near.max(axis=1)).all()


@pytest.mark.parametrize(
    "vector", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0], []], ids=["zeros", "nan", "infinity", "nothing"]
)
def test_what_has_no_direction_is_zeros(vector: list[float]) -> None:
    assert not direction_of(np.array(vector)).any()


def test_directions_have_one_length_at_every_size() -> None:
    for size in (1e300, 1.0, 5e-324):
        whole = direction_of(np.array([size, size]))
        assert whole.tolist() == [741455.0, 741455.0]  # 2^20 over the root of 2


def test_rounding_at_most_doubles_the_length_of_a_direction() -> None:
    """At length 2^11 the worst has nearly 2^24 numbers; at length 4 it has 63, each rounded up from just above 1/2."""
    squares = [float(np.square(direction_of(np.ones(size), 4.0)).sum()) for size in range(1, 200)]
    assert max(squares) == squares[63 - 1] == 63.0
    assert not any(squares[64 - 1 :])
    rows = np.random.default_rng(5).normal(size=(300, 150)) ** 3
    assert max(float(np.square(direction_of(row, 4.0)).sum()) for row in rows) <= (2 * 4.0) ** 2


def test_nothing_of_a_text_shows_and_nothing_leaves_the_process() -> None:
    source, candidates = made()
    ask = source.ask([(CANARY,)], candidates)
    box = ask.run()
    for thing in (source, ask, box, source._held):
        assert "canary" not in repr(thing) + str(thing)
    assert copy.copy(source) is copy.deepcopy(source) is source
    with pytest.raises(PrivateAccessError):
        pickle.dumps(source)


def test_ctrl_c_goes_on_without_a_text() -> None:
    class Stopped(Topical):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            if any("canary" in text for text in texts):
                raise KeyboardInterrupt(texts)
            return super().embed_documents(texts)

    source, candidates = made(Stopped())
    with pytest.raises(KeyboardInterrupt) as caught:
        source.ask([(CANARY,)], candidates).run()
    assert "canary" not in f"{caught.value.args}{caught.value.__context__}{caught.value.__cause__}"


@pytest.mark.parametrize("kind", [NearestRows, SimilarTexts])
@pytest.mark.parametrize("is_async", [False, True], ids=["run", "arun"])
def test_ctrl_c_unit_by_unit_leaves_no_row_of_those_before(
    kind: Any, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxes show nothing, and a debugger opens boxes: those that frames hold after a stop are empty."""
    packed = kind._packed

    def stops(self: Any, directions: Any) -> Any:
        calls.append(len(directions))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return packed(self, directions if len(calls) > 1 else None)

    calls: list[int] = []
    source = NearestRows(Topical()) if kind is NearestRows else SimilarTexts(Topical(), threshold=0.1)
    public: Any = CANDIDATES if kind is NearestRows else CANDIDATES[0]
    ask = source.ask([("my card",), ("a boat",)], source.request_public(public).run())
    monkeypatch.setattr(kind, "_packed", stops)
    with pytest.raises(KeyboardInterrupt) as caught:
        asyncio.run(ask.arun()) if is_async else ask.run()
    assert calls == [2, 1, 1]
    held = [value for value in locals_of_ours(caught.value) if not isinstance(value, str)]
    boxes = [box for value in held for box in (value if isinstance(value, list) else [value])]
    assert boxes
    assert not any(box._rows for box in boxes if isinstance(box, OpaqueRows))


def test_public_faults_raise() -> None:
    with pytest.raises(ConfigurationError, match="LangChain embeddings"):
        NearestRows(lambda text: [1.0])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="neighbours"):
        NearestRows(Topical(), neighbours=0)
    with pytest.raises(ModelCallError):
        NearestRows(Topical(failing=lambda text: text == "out")).request_public(["out"]).run()


# -- the embeddings that are ours --------------------------------------------------------------------------------


@pytest.mark.parametrize("topics", [True, False])
def test_local_embeddings_are_silent_deterministic_and_of_one_width(topics: bool) -> None:
    local = LocalEmbeddings(topics=topics)
    silent = SilentEmbeddings(local)
    texts = ["my card was declined", "", "\x00\ud800 ...", "MY CARD was declined"]
    rows = np.array(local.embed_documents(texts))
    width = 1024 if topics else 4096
    assert rows.shape == (4, silent.dimension) == (4, width + topics * 256)
    assert np.isfinite(rows).all()
    assert np.array_equal(rows[0][:width], rows[3][:width])  # words are compared without their case
    np.testing.assert_allclose(np.square(rows[0]).sum(), 1.0 + topics)  # each half has length 1
    assert not rows[1].any()
    assert "canary" not in repr(local)


def test_local_embeddings_put_texts_about_the_same_thing_together() -> None:
    about = {
        "bank": ["my card was declined at the shop", "the transfer to my account is late", "withdraw cash, fee"],
        "film": ["a film about a war hero", "who directed the comedy movie", "the actor played a king"],
    }
    texts = [text for group in about.values() for text in group]
    rows = np.array(LocalEmbeddings().embed_documents(texts))
    near = rows @ rows.T - 9 * np.eye(6)
    assert [int(best) // 3 for best in near.argmax(axis=1)] == [0, 0, 0, 1, 1, 1]


def test_local_embeddings_without_topics_tell_two_names_apart() -> None:
    question = "Which colour belongs to Kordarin? The colour of Kordarin is the"
    texts = [
        "Kordarin has a colour, the amber. A note from the bridge.",
        "The colour of Velmimon is the cobalt. A note from the bridge.",
        "Kordarin has a diet, the moss. A note from the bridge.",
    ]

    def nearest_to_question(local: LocalEmbeddings) -> int:
        rows = np.array([row / np.linalg.norm(row) for row in np.array(local.embed_documents([*texts, question]))])
        return int((rows[:3] @ rows[3]).argmax())

    assert nearest_to_question(LocalEmbeddings()) == 1  # the topic of a colour, in the question's wording
    assert nearest_to_question(LocalEmbeddings(topics=False)) == 0


@pytest.mark.parametrize("topics", [True, False])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Überempfindliche Zähne, résumé", unicodedata.normalize("NFD", "Überempfindliche Zähne, résumé")),
        ("ＡＴＭ Card", "ATM card"),
        ("Acme\u2122 card \u21165", "acme card 5"),
        ("پرداخت\u200cها", "پرداخت ها"),
        ("Lost card \u2764\ufe0f \U0001f600", "lost_card!"),
    ],
)
def test_forms_of_letters_do_not_count_in_local_embeddings(topics: bool, one: str, other: str) -> None:
    assert LocalEmbeddings(topics=topics).embed_query(one) == LocalEmbeddings(topics=topics).embed_query(other)


def test_vowel_signs_tell_words_apart_in_local_embeddings() -> None:
    one, other = np.array(LocalEmbeddings(topics=False).embed_documents(["दिन दान दुनी", "दीन दाना दून"]))
    assert one @ other < 0.5


@pytest.mark.parametrize("topics", [True, False])
@pytest.mark.parametrize(
    ("one", "near", "far"),
    [("บัตรของฉันหาย", "บัตรหายต้องทำอย่างไร", "โอนเงินล่าช้ามาก"), ("我的信用卡丢了", "信用卡丢失", "转账很慢")],
)
def test_local_embeddings_compare_texts_without_spaces(topics: bool, one: str, near: str, far: str) -> None:
    rows = np.array(LocalEmbeddings(topics=topics).embed_documents([one, near, far, one[::-1]]))
    similar, other, turned = rows[1:] @ rows[0]
    assert similar > 0.3 > other + 0.2
    assert turned < 0.5


@pytest.mark.parametrize("topics", [True, False])
def test_a_local_embedding_does_not_depend_on_what_else_was_embedded(topics: bool) -> None:
    text = "Kordarin has a colour, the amber."
    alone = LocalEmbeddings(topics=topics).embed_query(text)
    used = LocalEmbeddings(topics=topics)
    others = [f"{text} Kordarin"] * 20
    assert used.embed_documents([*others, text, *others])[20] == used.embed_query(text) == alone
    assert vars(used) == {"_topics": topics}  # nothing is kept


@pytest.mark.parametrize(
    ("topics", "name", "shown"), [(True, "LocalEmbeddings", "LocalEmbeddings()"), (False, ALONE, ALONE)]
)
def test_reports_and_copies_tell_the_two_local_embeddings_apart(topics: bool, name: str, shown: str) -> None:
    local = LocalEmbeddings(topics=topics)
    assert SimilarTexts(local, threshold=0.5).to_dict()["embeddings"] == name
    assert Retrieval(local, similarity_threshold=0.5, participations=1).to_dict()["embeddings"] == name
    assert repr(local) == shown
    copied = pickle.loads(pickle.dumps(local))  # noqa: S301
    assert (repr(copied), copied.embed_query("a card")) == (shown, local.embed_query("a card"))


def test_what_local_embeddings_compare_is_set_once() -> None:
    """Else a report would name what was not compared."""
    with pytest.raises(AttributeError):
        LocalEmbeddings().topics = False  # type: ignore[misc]
    with pytest.raises(ConfigurationError, match="topics: expected True or False, found 'no'"):
        LocalEmbeddings(topics="no")  # type: ignore[arg-type]


def test_a_class_of_ones_own_keeps_the_default_without_the_parents_init() -> None:
    class Own(LocalEmbeddings):
        def __init__(self) -> None:
            """Sets nothing."""

    assert Own().embed_query("a card") == LocalEmbeddings().embed_query("a card")
    assert (Own().model, repr(Own())) == ("Own", "Own()")
