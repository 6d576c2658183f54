"""The embedded model: a distribution, row by row, that reads and leaks its demonstrations and builds reproducibly."""

from __future__ import annotations

import copy
import hashlib
import json
import lzma
import pickle
import re
import sys
import threading
from importlib import resources
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from langchain_dpicl import DemonstrationSynthesizer, EmbeddedLLM, PrivacyBudgetCallbackHandler, PrivateExamples
from langchain_dpicl.backends import sync_async
from langchain_dpicl.backends.embedded import EmbeddedModel, Induction, ModelTables, Segment, answers, load_tables
from langchain_dpicl.exceptions import ConfigurationError
from tests.contracts.backend import ChoiceContract, Coupled, NextTokenContract, TextContract, same_bits
from tests.durable import no_room

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "benchmarks"))

import build_embedded
from build_embedded import SOURCES, Recipe, Source, TracedFile, trace_sources

RECORD = "My name is Zofia Quintero and my card ending 4471 was charged £318.42 in Reykjavik on 9 May."
OTHER = "Why has the transfer of €77.10 to Benedikt Oyelowo in Tampere not arrived since 3 June?"
MODEL = EmbeddedModel()


def prompt_of(*records: str) -> str:
    return "".join(f"Question: {record}\n\n" for record in records) + "Question:"


class TestNextTokens(NextTokenContract):
    unknown_token = -1

    def make(self):
        return MODEL


class TestChoices(ChoiceContract):
    def make(self):
        return MODEL


class TestText(TextContract):
    def make(self):
        return MODEL


async def test_awaited_rows_are_there_where_the_system_has_no_room_for_a_thread(monkeypatch):
    monkeypatch.setattr(sync_async, "_POOLS", {})
    prompts = [prompt_of(RECORD), prompt_of(OTHER)]
    domain = [token for token, _ in MODEL.top_tokens(prompts[0], [], top_k=5)]
    with no_room():
        assert await MODEL.atop_tokens(prompts[0], [], top_k=5) == MODEL.top_tokens(prompts[0], [], top_k=5)
        assert await MODEL.acomplete(prompts, max_tokens=2) == MODEL.complete(prompts, max_tokens=2)
        found = await MODEL.ascore_choices(prompts, [" a", " b"])
        rows = await MODEL.open(prompts, []).ascore(domain)
    assert same_bits(found, MODEL.score_choices(prompts, [" a", " b"]))
    assert same_bits(rows, MODEL.open(prompts, []).score(domain))


def test_the_contract_notices_a_last_bit_that_knows_the_batch():
    with pytest.raises(AssertionError):
        TestNextTokens().test_a_row_does_not_know_how_many_stand_beside_it(Coupled(MODEL))


class TestRows:
    @pytest.mark.parametrize("size", [1, 2, 3, 40, 129])
    def test_rows_keep_their_bits_at_every_batch_size(self, size):
        prompts = [prompt_of(*[f"{RECORD} {number}"] * (number % 7)) for number in range(129)]
        vocabulary = MODEL.vocabulary()
        whole = MODEL.open(prompts, []).score(vocabulary)
        assert same_bits(MODEL.open(prompts[:size], []).score(vocabulary), whole[:size])

    def test_rows_keep_their_bits_beside_prompts_of_as_many_segments_and_of_others(self):
        prompts = [prompt_of(*[f"{RECORD} {number}"] * (1 + number % 3)) for number in range(6)]
        whole = MODEL.open(prompts, MODEL.encode(" card")).score(MODEL.vocabulary())
        for first in range(3):
            alike = MODEL.open(prompts[first::3], MODEL.encode(" card")).score(MODEL.vocabulary())
            assert same_bits(alike, whole[first::3])

    def test_every_token_has_positive_probability(self):
        rows = MODEL.open([prompt_of(RECORD), "", "Zqx"], MODEL.encode(" My name")).score(MODEL.vocabulary())
        assert rows.min() > 0

    @pytest.mark.parametrize("token", [-1, 12288, 2**70, b" card", " card", None, 1.5, (1, 2)])
    def test_what_is_no_token_scores_zero_and_cannot_be_pushed(self, token):
        session = MODEL.open([prompt_of(RECORD)], [])
        assert session.score([token]).tolist() == [[0.0]]
        with pytest.raises(ConfigurationError, match="token id"):
            session.push(token)

    def test_integers_of_any_type_are_tokens_and_stand_beside_what_is_none(self):
        domain = [*MODEL.encode(" My name is"), 2**70]
        rows = MODEL.open([prompt_of(RECORD)], []).score(domain)
        assert rows[0, -1] == 0
        assert same_bits(MODEL.open([prompt_of(RECORD)], []).score([*np.array(domain[:-1], np.int32), b""]), rows)
        assert same_bits(MODEL.open([prompt_of(RECORD)], []).score(domain[:-1]), rows[:, :-1])

    def test_spaces_at_the_end_of_a_prompt_are_ignored(self):
        assert same_bits(
            MODEL.open(["Question:   "], []).score(range(99)), MODEL.open(["Question:"], []).score(range(99))
        )

    def test_what_is_being_written_is_not_copied(self):
        written = MODEL.encode(" bananas and pears and bananas and")
        fresh = EmbeddedModel(induction=Induction(prior=float("inf")))
        with_written = MODEL.open(["Question:"], written).score(MODEL.vocabulary())
        assert np.allclose(
            with_written, fresh.open(["Question:"], written).score(MODEL.vocabulary()), rtol=1e-9, atol=1e-12
        )

    def test_an_infinite_prior_copies_nothing(self):
        deaf = EmbeddedModel(induction=Induction(prior=float("inf")))
        prefix = MODEL.encode(RECORD)[:6]
        name = MODEL.encode(" Quintero")[0]
        assert deaf.open([prompt_of(RECORD)], prefix).score([name])[0, 0] < 0.01
        assert MODEL.open([prompt_of(RECORD)], MODEL.encode(" My name is Zofia")).score([name])[0, 0] > 0.9

    def test_threads_share_a_model(self):
        prompts = [prompt_of(RECORD, OTHER)] * 3
        expected = MODEL.open(prompts, []).score(range(500))
        found: list = []
        threads = [
            threading.Thread(target=lambda: found.append(EmbeddedModel().open(prompts, []).score(range(500))))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert all(same_bits(rows, expected) for rows in found)


class TestReadingAndLeaking:
    def test_one_prompt_copies_its_record_verbatim(self):
        assert MODEL.complete([prompt_of(RECORD)], max_tokens=60) == [" " + RECORD]

    def test_membership_shows_when_nobody_adds_noise(self):
        """AUC of the likelihood of a record given a prompt that holds it, against one that does not; chance is 0.5.

        20 members against 20 others; an engine that does not read its prompt reaches 0.95 with probability < 1e-7.
        """
        records = [f"{RECORD} Case {number * 37 % 1000}-{number}." for number in range(20)]
        members = [prompt_of(OTHER, record, OTHER) for record in records]
        others = [prompt_of(OTHER, f"{RECORD} Case {number * 53 % 1000}-x.", OTHER) for number in range(20)]

        def auc(model):
            inside = [model.score_choices([p], [" " + r])[0, 0] for p, r in zip(members, records, strict=True)]
            outside = [model.score_choices([p], [" " + r])[0, 0] for p, r in zip(others, records, strict=True)]
            return (
                np.mean(np.subtract.outer(inside, outside) > 0) + np.mean(np.subtract.outer(inside, outside) == 0) / 2
            )

        assert auc(MODEL) > 0.95
        assert auc(EmbeddedModel(induction=Induction(prior=float("inf")))) < 0.85

    def test_labels_are_learnt_from_demonstrations_with_any_names(self):
        shown = [
            ("Where is the money I sent to my brother?", "zig"),
            ("The ATM gave me too little cash.", "zag"),
            ("My transfer to a friend is pending.", "zig"),
            ("I tried to withdraw cash and the machine kept it.", "zag"),
        ]
        asked = [
            ("I sent a transfer to the wrong person", 0),
            ("cash withdrawal at an ATM failed", 1),
            ("when will the transfer to my sister arrive", 0),
            ("no cash came out of the ATM", 1),
        ]
        shots = "".join(f"Question: {text}\nTopic: {label}\n\n" for text, label in shown)
        scores = MODEL.score_choices([f"{shots}Question: {text}\nTopic:" for text, _ in asked], [" zig", " zag"])
        assert scores.argmax(axis=1).tolist() == [label for _, label in asked]
        swapped = shots.replace("zig", "zog").replace("zag", "zig").replace("zog", "zag")
        scores = MODEL.score_choices([f"{swapped}Question: {text}\nTopic:" for text, _ in asked], [" zig", " zag"])
        assert scores.argmax(axis=1).tolist() == [1 - label for _, label in asked]

    def test_a_topic_outweighs_how_the_line_before_ends(self):
        shots = "Q: My transfer is late?\nA: money\n\nQ: The cat sleeps on the sofa.\nA: animals\n\n"
        scores = MODEL.score_choices([shots + "Q: Does the dog bark at the bird?\nA:"], [" money", " animals"])
        assert scores[0, 1] > scores[0, 0]

    def test_choices_are_scored_as_their_tokens_one_by_one(self):
        prompt = prompt_of(RECORD)
        total, session = 0.0, MODEL.open([prompt], [])
        for token in MODEL.encode(" My name is"):
            total += float(np.log(session.score([token])[0, 0]))
            session.push(token)
        assert MODEL.score_choices([prompt], [" My name is"])[0, 0] == pytest.approx(total)

    def test_a_space_may_stand_at_the_end_of_the_prompt_or_the_start_of_the_choice(self):
        shots = "Q: one\nA: number\n\nQ: two\nA:"
        assert same_bits(MODEL.score_choices([shots], [" number"]), MODEL.score_choices([shots + " "], ["number"]))


FIELDS = {
    "sports": [
        "The striker scored two goals in the second half of the match.",
        "She won the tennis final in straight sets.",
    ],
    "music": [
        "The band recorded a new album of songs last winter.",
        "An orchestra played the symphony at the concert.",
    ],
    "animals": ["The bird feeds its young in the nest.", "A herd of horses and some sheep grazed by the river."],
    "business": ["The company sold its shares to investors.", "Profits of the bank rose as sales grew."],
}
ASKED = [(text, place) for place, texts in enumerate(FIELDS.values()) for text in texts]
LABELS = [f" {label}" for label in FIELDS]


class TestAnswers:
    def test_a_label_means_what_stands_near_it(self):
        scores = MODEL.score_choices([f"Text: {text}\nTopic:" for text, _ in ASKED], LABELS)
        assert scores.argmax(axis=1).tolist() == [place for _, place in ASKED]

    def test_what_did_not_happen_is_no_word(self):
        words = [*MODEL._tables.words]
        assert [words[number] for number in MODEL._tables.words_of("It won't and doesn’t; she won.")] == [
            "it",
            "and",
            "she",
            "won",
        ]

    def test_a_question_without_content_prefers_no_label(self):
        for content_free in ("N/A", "", "[]"):
            (scores,) = MODEL.score_choices([f"Text: {content_free}\nTopic:"], LABELS)
            assert scores == pytest.approx(scores[0], abs=0.02)

    def test_an_example_speaks_for_its_answer_and_more_for_the_same_question(self):
        question = "The new engine is loud."
        none, other, same = MODEL.score_choices(
            [
                f"Text: {question}\nTopic:",
                f"Text: The sea was calm on Sunday.\nTopic: music\n\nText: {question}\nTopic:",
                f"Text: {question}\nTopic: music\n\nText: {question}\nTopic:",
            ],
            [" music"],
        )
        assert none + 1 < other < same - 1
        assert same > np.log(0.5)

    def test_answers_that_come_up_again_are_expected_to_be_all(self):
        def shown(times):
            return "".join(
                f"Text: {text}\nTopic: {label}\n\n" for label, texts in FIELDS.items() for text in texts[:times]
            )

        question = "Text: The goalkeeper caught the ball at the match.\nTopic:"
        once, twice = (np.exp(MODEL.score_choices([shown(times) + question], LABELS)).sum() for times in (1, 2))
        assert twice > 2 * once
        assert MODEL.complete([shown(2) + question], max_tokens=3, stop=["\n"]) == [" sports"]

    @pytest.mark.parametrize(
        ("prompt", "expected"),
        [
            ("Text: a long text of many words\nTopic:", True),
            ("Text: N/A\nTopic:", True),
            ("Text: \nTopic:", True),
            ("Topic: business\nText:", False),
            ("Text:", False),
            ("", False),
            ("Text: great\nTopic: fun\n\nText: sad\nTopic:", True),
            ("Topic: pets\nText: What is a joey?\n\nTopic: pets\nText:", False),
            ("Text: one two\nTopic: a b c d e f g\n\nText: a long text of many words\nTopic:", False),
            ("Text: a long text of many words\nTopic: al", True),
            ("When does the shop open?\nhours\n\nWhere is the shop, please?\n", True),
        ],
    )
    def test_a_short_field_is_answered_and_a_long_one_written(self, prompt, expected):
        *complete, present = [Segment.read(MODEL._tables, text) for text in prompt.split("\n\n")]
        assert answers(complete, present) is expected


class TestSums:
    PROMPTS = (
        prompt_of(RECORD, OTHER),
        "Text: The striker scored.\nTopic: sports\n\nText: The bird sang in the tree.\nTopic:",
        "News.\n\nTopic: music\nText: The band played on.\n\nTopic: music\nText:",
        "Zqx",
        "",
    )

    def test_rows_sum_to_one_whatever_was_pushed(self):
        session = MODEL.open(self.PROMPTS)
        for token in [*MODEL.encode(" sports and music and sports"), MODEL.eos]:
            rows = session.score(MODEL.vocabulary())
            assert rows.min() > 0
            assert (rows.sum(axis=1) <= 1).all()
            assert rows.sum(axis=1) == pytest.approx(1)
            session.push(token)

    def test_a_row_has_the_same_bits_alone_after_every_push(self):
        together = MODEL.open(self.PROMPTS)
        alone = [MODEL.open([prompt]) for prompt in self.PROMPTS]
        for token in MODEL.encode(" The striker scored two goals in Reykjavik"):
            rows = together.score(range(2000))
            assert all(
                same_bits(session.score(range(2000)), rows[place : place + 1]) for place, session in enumerate(alone)
            )
            for session in (together, *alone):
                session.push(token)

    @pytest.mark.parametrize("prompt", PROMPTS)
    def test_a_prompt_and_its_prefix_are_one(self, prompt):
        session, written = MODEL.open([prompt]), ""
        for token in MODEL.encode(" The educational bird sang in Reykjavik and sang"):
            session.push(token)
            written += MODEL.decode([token])
            longer = MODEL.open([prompt + written]).score(MODEL.vocabulary())
            assert np.allclose(session.score(MODEL.vocabulary()), longer, rtol=1e-6, atol=1e-12)

    @pytest.mark.parametrize("longest_match", [1, 2, 3])
    def test_a_short_match_lets_no_neighbour_in(self, longest_match):
        model = EmbeddedModel(induction=Induction(longest_match=longest_match))
        prompt, longer = "Topic: music\nText: The band", "Topic: music\nText: The band played on and on all night"
        together, alone = model.open([prompt, longer]), model.open([prompt])
        for token in model.encode(" and sang"):
            assert same_bits(together.score(range(3000))[:1], alone.score(range(3000)))
            together.push(token)
            alone.push(token)

    def test_a_short_match_still_copies_an_answer(self):
        prompt = "Text: The sea was calm.\nTopic of it: music\n\nText: The sea was calm.\nTopic of it:"
        for longest_match in (2, 3, 8):
            model = EmbeddedModel(induction=Induction(longest_match=longest_match))
            assert model.score_choices([prompt], [" music"])[0, 0] > np.log(0.5)

    @pytest.mark.parametrize(
        "wrong", [{"longest_match": 0}, {"prior": 0.0}, {"answer_prior": float("nan")}, {"answer_most": float("inf")}]
    )
    def test_numbers_that_give_no_rows_are_refused(self, wrong):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            Induction(**wrong)

    def test_generated_rows_have_the_same_bits_alone(self):
        together = MODEL.generate(self.PROMPTS)
        alone = [MODEL.generate([prompt]) for prompt in self.PROMPTS]
        for _ in range(6):
            _, rows = next(together)
            assert all(same_bits(next(steps)[1], rows[place : place + 1]) for place, steps in enumerate(alone))


class TestWriting:
    def test_a_text_is_about_its_label_and_repeats_no_word_for_long(self):
        for label, near in (
            ("sports", {"team", "game", "players", "sports", "football", "league", "games"}),
            ("music", {"music", "song", "band", "songs", "album", "musical"}),
        ):
            (text,) = MODEL.complete([f"Texts and their topics.\n\nTopic: {label}\nText:"], max_tokens=24)
            words = [word.strip(".,?!").lower() for word in text.split()]
            assert near & set(words), text
            assert max(words.count(word) for word in words if len(word) > 3) <= 4, text

    def test_sampling_follows_its_coins_and_needs_a_temperature(self):
        def draw(seed):
            coins = np.random.Generator(np.random.PCG64(seed))
            steps = islice(MODEL.generate(["The film is"], temperature=1.0, rng=coins), 12)
            return tuple(int(tokens[0]) for tokens, _ in steps)

        assert draw(1) == draw(1)
        assert len({draw(seed) for seed in range(8)}) > 4
        with pytest.raises(ConfigurationError, match="temperature"):
            next(MODEL.generate(["x"], temperature=-1))

    def test_sampling_matches_the_row(self):
        """500 draws of one token: the likeliest token's count is within 6 standard deviations (false alarm < 1e-6)."""
        prompt = "Word: number\n\nWord: digit\n\nWord: number\n\nWord:"
        token = MODEL.encode(" number")[0]
        probability = MODEL.open([prompt], []).score([token])[0, 0]
        coins = np.random.Generator(np.random.PCG64(5))
        draws, _ = next(MODEL.generate([prompt] * 500, temperature=1.0, rng=coins))
        assert 0.1 < probability < 0.9
        assert abs((draws == token).mean() - probability) < 6 * np.sqrt(probability * (1 - probability) / 500)

    def test_a_space_before_the_completion_is_not_repeated(self):
        shots = "Q: one\nA: number\n\nQ: one\nA:"
        assert MODEL.complete([shots], max_tokens=3) == [" number"]
        assert MODEL.complete([shots + " "], max_tokens=3) == ["number"]

    def test_every_text_survives_the_vocabulary(self):
        for text in ("", "naïve café £5", "\U0001f600\u0301\x00", "a\n\n\nb  c\t", "東京 42.50"):
            assert b"".join(MODEL.token_bytes(t) or b"\n\n" for t in MODEL.encode(text)).decode() == text

    def test_words_of_prompts_are_tokens(self):
        assert len(MODEL.encode("Question:")) == len(MODEL.encode(" topic:")) == len(MODEL.encode("label:")) == 2


class TestSharing:
    def test_copies_and_pickles_carry_no_tables(self):
        assert len(pickle.dumps(MODEL)) < 1000
        for clone in (pickle.loads(pickle.dumps(MODEL)), copy.deepcopy(MODEL)):  # noqa: S301
            assert same_bits(clone.open(["Q:"], []).score(range(50)), MODEL.open(["Q:"], []).score(range(50)))

    def test_the_shipped_data_is_small_and_is_what_the_manifest_says(self):
        data = resources.files("langchain_dpicl.backends") / "data"
        raw = (data / "model.npz").read_bytes()
        assert sum(len(item.read_bytes()) for item in data.iterdir()) < 9_000_000
        assert json.loads((data / "manifest.json").read_text())["sha256"] == hashlib.sha256(raw).hexdigest()


def manifest() -> dict[str, dict]:
    return json.loads((resources.files("langchain_dpicl.backends") / "data" / "manifest.json").read_text())


class TestSources:
    """The shipped tables are built from text whose repository, commit and licence are known, and NOTICE says so."""

    def test_the_manifest_names_the_works_of_every_corpus_file(self):
        for name, file in manifest()["corpus"].items():
            assert file["sources"], name
            for source in file["sources"]:
                assert all(source[field] for field in ("work", "repository", "licence")), name
                assert re.fullmatch(r"[0-9a-f]{40}|1:3\.0-37", source["commit"]), name

    def test_the_shipped_tables_were_built_from_the_files_that_were_traced(self):
        assert {name: file["sha256"] for name, file in manifest()["corpus"].items()} == {
            name: file.sha256 for name, file in SOURCES.items()
        }

    def test_every_work_stands_in_notice_with_repository_commit_and_licence(self):
        notice = (Path(__file__).parents[4] / "NOTICE").read_text()
        entries = [" ".join(entry.split()) for entry in notice.split("\n\n")]
        named = [source for file in manifest()["corpus"].values() for source in file["sources"]]
        works = [work for place, work in enumerate(named) if work not in named[:place]]  # WordNet has four files
        for work in works:
            told = [entry for entry in entries if work["commit"] in entry]
            assert len(told) == 1, work
            assert work["repository"] in told[0], work
            assert work["licence"] in told[0], work
        of_model = notice.partition("The benchmark ")[0]
        assert sorted(re.findall(r"[0-9a-f]{40}|1:3\.0-37", of_model)) == sorted(work["commit"] for work in works)

    def test_no_work_is_under_a_licence_that_forbids_what_users_do(self):
        licences = {source["licence"] for file in manifest()["corpus"].values() for source in file["sources"]}
        assert licences <= {"CC BY 4.0", "CC BY-SA 3.0", "CC BY-SA 4.0", "WordNet 3.0 license", "public domain"}

    @pytest.mark.parametrize("lacking", ["work", "repository", "commit", "licence"])
    def test_a_source_needs_repository_commit_and_licence(self, lacking):
        whole = {"work": "A book", "repository": "example.org/book", "commit": "0" * 40, "licence": "CC BY 4.0"}
        Source(**whole)
        with pytest.raises(ConfigurationError, match="repository"):
            Source(**{**whole, lacking: ""})

    def test_an_abbreviated_commit_is_refused(self):
        with pytest.raises(ConfigurationError, match="40"):
            Source(work="A book", repository="example.org/book", commit="0" * 10, licence="CC BY 4.0")

    def test_a_file_of_unnamed_works_is_refused(self):
        with pytest.raises(ConfigurationError, match="none"):
            TracedFile(sha256="0" * 64, sources=())

    def test_text_of_an_unknown_file_is_not_built_from(self, tiny_corpus, tmp_path):
        sources = known(tiny_corpus)
        del sources["books.txt.xz"]
        with pytest.raises(ConfigurationError, match=r"books\.txt\.xz: expected no such file"):
            build_embedded.build(tiny_corpus, tiny_corpus, tmp_path / "out", TINY, sources)
        assert not (tmp_path / "out").exists()

    def test_text_that_changed_since_it_was_traced_is_not_built_from(self, tiny_corpus):
        path = tiny_corpus / "books.txt.xz"
        changed = {path.name: TracedFile(sha256="0" * 64, sources=WORK)}
        with pytest.raises(ConfigurationError, match=f"expected sha256 {'0' * 64}"):
            trace_sources([path], changed)


WORK = (Source(work="Made up", repository="example.org/made-up", commit="0" * 40, licence="public domain"),)


def known(folder: Path) -> dict[str, TracedFile]:
    """Traces every file of a made-up corpus."""
    return {
        path.name: TracedFile(sha256=hashlib.sha256(path.read_bytes()).hexdigest(), sources=WORK)
        for path in (*build_embedded.corpus_files(folder), *(folder / name for name in build_embedded.WORDNET))
    }


TINY = Recipe(
    vocabulary=400,
    dimensions=4,
    clusters=3,
    rare=1,
    thresholds=(0.0, 0.0, 0.0),
    passage=4,
    class_words=2,
    neighbours=2,
    thinning=1.0,
)
SYNSETS = {
    "noun": [
        "  1 This line stands for the licence.",
        "00000001 05 n 01 animal 0 000 | a living thing that runs",
        "00000002 05 n 02 cat 0 house_cat 0 002 @ 00000001 n 0000 ;c 00000004 n 0000 | it sat on the mat",
        "00000003 05 n 01 dog 0 001 @ 00000001 n 0000 | it ran on the log",
        "00000004 05 n 01 zoology 0 000 | what is known of a cat and a dog",
    ],
    "verb": ["00000005 38 v 01 run 0 001 + 00000003 n 0101 01 + 02 00 | what a dog did"],
    "adj": ["00000006 00 a 01 long(p) 0 000 | not short"],
    "adv": ["00000007 02 r 01 home 0 000 | where the cat ran"],
}


@pytest.fixture(scope="module")
def tiny_corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    animals = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog ran home", "the bird sang"]
    long = " ".join(animals * 6)
    for name, documents in {
        "books": [*animals, long],
        "banking77": ["pay: my card failed", "pay: my card works"],
    }.items():
        with lzma.open(folder / f"{name}.txt.xz", "wt", encoding="utf-8") as handle:
            handle.write("\n\n".join(documents))
    for part, lines in SYNSETS.items():
        (folder / f"data.{part}").write_text("\n".join(lines) + "\n", encoding="latin-1")
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny")
    build_embedded.build(tiny_corpus, tiny_corpus, out, TINY, known(tiny_corpus))
    return ModelTables(out / "model.npz")


class TestBuild:
    def test_equal_input_gives_equal_bytes(self, tiny_corpus, tmp_path):
        for name in ("one", "two"):
            build_embedded.build(tiny_corpus, tiny_corpus, tmp_path / name, TINY, known(tiny_corpus))
        for file in ("model.npz", "manifest.json"):
            assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()

    def test_other_input_gives_other_bytes(self, tiny_corpus, tmp_path):
        build_embedded.build(tiny_corpus, tiny_corpus, tmp_path / "one", TINY, known(tiny_corpus))
        with lzma.open(tiny_corpus / "more.txt.xz", "wt") as handle:
            handle.write("one more document")
        build_embedded.build(tiny_corpus, tiny_corpus, tmp_path / "two", TINY, known(tiny_corpus))
        (tiny_corpus / "more.txt.xz").unlink()
        assert (tmp_path / "one" / "model.npz").read_bytes() != (tmp_path / "two" / "model.npz").read_bytes()

    def test_every_context_gives_a_distribution(self, tiny):
        words = tiny.encoding.encode_ordinary
        for text in ("", " the", " the cat", "the cat sat", " sat on the", " zebra quux zzz"):
            row = tiny.next_token(words(text)[-3:])
            assert row.min() > 0
            assert row.sum() == pytest.approx(1.0)

    def test_longer_contexts_sharpen(self, tiny):
        token = tiny.encoding.encode_ordinary
        the, on, sat, mat = (token(f" {word}") for word in ("the", "on", "sat", "mat"))
        after_two = tiny.next_token([*on, *the])[mat[0]]
        assert after_two > tiny.next_token(the)[mat[0]] > tiny.unigram[mat[0]]
        assert tiny.next_token(sat)[on[0]] > 0.3 > 5 * tiny.unigram[on[0]]

    def test_probabilities_agree_with_interpolated_kneser_ney_by_hand(self):
        """A second source: counts of "a b a c a b" in the plain formula, order 2."""
        stream = np.array([256, 1, 2, 1, 3, 1, 2, 256])
        recipe = Recipe(vocabulary=300, order=2, weights={})
        level = build_embedded.count_level({"x": stream}, 2, recipe)
        found = dict(zip(level.keys.tolist(), level.probabilities.tolist(), strict=True))
        assert found[1 * 300 + 2] == pytest.approx((2 - 0.75) / 3)
        assert found[1 * 300 + 3] == pytest.approx((1 - 0.75) / 3)
        assert level.backoff[level.contexts.tolist().index(1)] == pytest.approx(2 * 0.75 / 3)

    def test_labels_do_not_reach_the_ngrams(self, tiny):
        pay, colon = tiny.encoding.encode_ordinary("pay")[0], tiny.encoding.encode_ordinary(":")[0]
        assert tiny.next_token([256, pay])[colon] < 0.2
        assert build_embedded.with_headers(["pay: a: b", "pay: c"]) == ["Answer: a: b", "Article: c"]

    def test_byte_pairs_are_merged_most_frequent_first(self):
        tokens = build_embedded.learn_vocabulary({"abab": 10.0, "abc": 5.0, "\n\n": 99.0}, 260)
        assert tokens[256:] == [b"\n\n", b"ab", b"abab", b"abc"]

    def test_pruning_keeps_what_longer_ngrams_stand_on(self, tiny_corpus):
        streams = {"x": np.array([256, *([5, 6, 7, 8, 256] * 20), 5, 9, 256])}
        recipe = Recipe(vocabulary=300, weights={}, thresholds=(1e9, 1e9, 0.1))
        levels = [build_embedded.count_level(streams, order, recipe) for order in (2, 3, 4)]
        kept = build_embedded.prune(levels, build_embedded.unigrams(streams, recipe), recipe)
        for shorter, longer in pairwise(kept):
            assert set((longer.keys // 300).tolist()) <= set(shorter.keys.tolist())
        assert len(kept[2].keys) > 0

    def test_the_command_line_builds(self, tiny_corpus, tmp_path, monkeypatch):
        monkeypatch.setattr(build_embedded, "Recipe", lambda: TINY)
        monkeypatch.setattr(build_embedded, "SOURCES", known(tiny_corpus))
        build_embedded.main(["--corpus", str(tiny_corpus), "--wordnet", str(tiny_corpus), "--out", str(tmp_path)])
        assert (tmp_path / "model.npz").stat().st_size > 0


def test_tables_are_loaded_once():
    assert load_tables() is load_tables()


def test_a_checkpoint_is_not_continued_under_other_tables(tmp_path, monkeypatch):
    """A rebuilt vocabulary would read the ids that were paid for as other words."""
    private = PrivateExamples([{"text": "my card was declined"}] * 900, public_size=900)
    budget = PrivacyBudgetCallbackHandler(epsilon=8.0, delta=1e-6)

    def run():
        given = {"llm": EmbeddedLLM(), "budget": budget, "epsilon": 8.0, "max_tokens": 3, "component": "shots"}
        return DemonstrationSynthesizer.from_private_examples(private, checkpoint=tmp_path / "run.jsonl", **given)

    first = run().run()
    assert run().run() == first
    monkeypatch.setattr(EmbeddedModel, "tokenizer_fingerprint", "of other tables")
    with pytest.raises(ConfigurationError, match=r"another run's: differences in \['plan'\]"):
        run()
