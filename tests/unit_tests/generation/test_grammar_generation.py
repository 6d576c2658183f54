"""Demonstrations that follow a grammar: what it forces is free, what it leaves open released, what is cut closed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from langchain_dpicl import Decoding, GenerationTask, Noise, Rows
from langchain_dpicl.backends.embedded import EmbeddedModel
from langchain_dpicl.backends.fake import scripted, word_copier
from langchain_dpicl.exceptions import ConfigurationError, PrivacyBudgetExceededError, RunInterruptedError
from langchain_dpicl.generation.grammars import Grammar
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import LogitNoise
from langchain_dpicl.privacy.mechanisms.release_plan import GumbelMechanism
from langchain_dpicl.privacy.private_examples import PrivateExamples
from tests.doubles import WORDS, SpyBackend
from tests.full_doubles import FullFake
from tests.labelling_doubles import counts, house

pytestmark = pytest.mark.usefixtures("remembered_prices")

LETTERS = re.compile(r"my (card|transfer) (was|is) (declined|late|failed)")
MESSAGE = Grammar.regex(f" {LETTERS.pattern}")
"""Of the four words the first is forced; three are released."""
SIZE = 60
RECORD = '{"kind": "ham", "n": 73}'
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["spam", "ham", "eggs"]}, "n": {"type": "integer", "maximum": 99, "minimum": 10}},
    "required": ["kind", "n"],
}
CHARACTERS = sorted({*'{"}:, 0123456789', *"spamhegkindq"})


@pytest.fixture(autouse=True)
def releases(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The widths of everything that was released."""
    found: list[int] = []
    real = GumbelMechanism.release

    def release(self: GumbelMechanism, total: Any, *, rng: Any) -> Any:
        found.append(len(total.value))
        return real(self, total, rng=rng)

    monkeypatch.setattr(GumbelMechanism, "release", release)
    return found


def characters_of_records(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
    """Continues as the prompt's records do that begin like the text so far, else evenly."""
    text = b"".join(prefix).decode()
    records = [line.removeprefix("q: ") for line in prompt.split("\n") if line.startswith("q: ")]
    following = [record[len(text)] for record in records if record.startswith(text) and len(record) > len(text)]
    share = 0.9 / len(following) if following else 0.0
    even = (0.1 if following else 1.0) / (len(CHARACTERS) + 1)
    return {item: even + share * following.count(item) for item in [*CHARACTERS, ""]}


ENGINES: dict[str, Any] = {
    "whole vocabulary": lambda words, vocabulary: SpyBackend(words, vocabulary=vocabulary),
    "public row in the batch": lambda words, vocabulary: FullFake(words, vocabulary=vocabulary),
    "top tokens": lambda words, vocabulary: SpyBackend(words, max_top_k=60),
}
engines = pytest.mark.parametrize("engine", list(ENGINES))


def writing(text: str = "my card was declined", **options: Any) -> DemonstrationSynthesizer:
    given: dict[str, Any] = {
        "llm": SpyBackend(word_copier(WORDS), vocabulary=WORDS),
        "budget": house(),
        "decoding": Decoding(grammar=MESSAGE),
        "max_tokens": 6,
        "rows": Rows(slots=10, shots=3),
        "noise": Noise(multiplier=0.03),
        "epsilon": 1e5,
        "task": GenerationTask(record_prompt="q: {text}"),
        "instruction": "Messages.",
        "component": "text",
        **options,
    }
    private = PrivateExamples([text] * SIZE, public_size=SIZE)
    return DemonstrationSynthesizer.from_private_examples(private, **given)


JSON = Decoding(candidates="all", grammar=Grammar.json_schema(SCHEMA))


def json_writing(engine: str, **options: Any) -> DemonstrationSynthesizer:
    given = {"max_tokens": 8, "decoding": JSON.replace(candidates=60) if engine == "top tokens" else JSON, **options}
    llm = given.pop("llm", None) or ENGINES[engine](characters_of_records, CHARACTERS)
    return writing(RECORD, llm=llm, **given)


def text_of(made: DemonstrationSynthesizer) -> str:
    (example,) = made.run().examples
    return example["text"]


# --- what is forced is free -----------------------------------------------------------------------------------------


@engines
def test_a_forced_token_is_no_release_and_burns_no_ticket(engine: str, releases: list[int]) -> None:
    budget = house()
    made = writing(llm=ENGINES[engine](word_copier(WORDS), WORDS), budget=budget)
    assert text_of(made) == "my card was declined"
    assert releases == [2, 2, 3]
    name = "text: 1 token on one sample"
    assert counts(budget) == {f"reserve {name}": 6, f"commit {name}": 3, f"give_back {name}": 3}


@engines
@pytest.mark.parametrize("redraw_every", [1, 3, 8])
def test_json_demonstrations_cost_what_is_open_in_them(engine: str, redraw_every: int, releases: list[int]) -> None:
    """Open are the kind, by one letter, and two digits."""
    made = json_writing(engine, rows=Rows(slots=10, shots=3, redraw_every=redraw_every))
    assert json.loads(text_of(made)) == {"kind": "ham", "n": 73}
    assert len(releases) == 3


@pytest.mark.parametrize("mechanism", ["recentered_clip", "difference_clip", "clip_and_blend"])
@pytest.mark.parametrize("engine", ["whole vocabulary", "public row in the batch"])
def test_logit_mechanisms_follow_a_grammar(engine: str, mechanism: str, releases: list[int]) -> None:
    made = json_writing(
        engine,
        noise=LogitNoise(mechanism, clip=12.0, multiplier=0.03),
        rows=Rows(slots=10, shots=3, redraw_every=8),
        decoding=JSON.replace(candidates=10),
    )
    assert json.loads(text_of(made)) == {"kind": "ham", "n": 73}
    assert len(releases) == 3


def test_rows_read_forced_text_as_well() -> None:
    """Without it the rows of this engine would not know where in the record they are."""
    spy = SpyBackend(characters_of_records, vocabulary=CHARACTERS)
    seen: list[bytes] = []
    real = spy._row

    def row(prompt: str, prefix: tuple[bytes, ...]) -> Any:
        seen.append(b"".join(prefix))
        return real(prompt, prefix)

    spy._row = row  # type: ignore[method-assign]
    text_of(json_writing("", llm=spy, rows=Rows(slots=10, shots=3, redraw_every=8)))
    assert list(dict.fromkeys(seen)) == [b'{"kind": "', b'{"kind": "ham", "n": ', b'{"kind": "ham", "n": 7']


@pytest.mark.parametrize("engine", ["whole vocabulary", "public row in the batch"])
def test_a_forced_text_that_could_be_spelled_in_several_ways_is_no_choice(engine: str, releases: list[int]) -> None:
    llm = ENGINES[engine](characters_of_records, [*CHARACTERS, '{"', "kind", '": "'])
    made = json_writing("", llm=llm, rows=Rows(slots=10, shots=3, redraw_every=8))
    assert json.loads(text_of(made)) == {"kind": "ham", "n": 73}
    assert len(releases) == 3


def test_a_text_that_is_forced_from_end_to_end_reads_no_record_and_takes_no_ticket(releases: list[int]) -> None:
    budget, spy = house(), SpyBackend(word_copier(WORDS), vocabulary=WORDS)
    made = writing(llm=spy, budget=budget, decoding=Decoding(grammar=Grammar.choices([" my card was late"])))
    assert text_of(made) == "my card was late"
    assert releases == []
    assert spy.private_prompts == []
    assert not counts(budget)


def test_records_do_not_move_what_is_forced_or_allowed(releases: list[int]) -> None:
    for text in ("my transfer is late", "up top failed top up", "", "{} %s \x00 my my my"):
        made = writing(text)
        assert LETTERS.fullmatch(text_of(made))
    assert releases == [2, 2, 3] * 4


# --- what is cut is closed ------------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_json_that_its_cap_cuts_still_parses(engine: str, max_tokens: int, releases: list[int]) -> None:
    made = json_writing(engine, max_tokens=max_tokens)
    found = json.loads(text_of(made))
    assert found["kind"] == "ham"
    assert 10 <= found["n"] <= 99
    assert max_tokens == 1 or 70 <= found["n"] <= 79
    assert len(releases) == max_tokens


@pytest.mark.parametrize("engine", list(ENGINES)[:2])
def test_a_text_ends_where_its_engine_has_no_room_for_what_is_forced(engine: str, releases: list[int]) -> None:
    llm = ENGINES[engine](characters_of_records, CHARACTERS)
    llm.room = 3
    assert json.loads(text_of(json_writing(engine, max_tokens=3, llm=llm)))["kind"]
    assert releases == []


def test_the_embedded_model_writes_json(releases: list[int]) -> None:
    schema = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}, "note": {"type": "string"}}}
    grammar = Grammar.json_schema({**schema, "required": ["mood", "note"]})
    record = '{"mood": "bad", "note": "the card was declined"}'
    made = writing(
        record,
        llm=EmbeddedModel(),
        decoding=Decoding(grammar=grammar),
        max_tokens=4,
        rows=Rows(slots=10, shots=3, redraw_every="run"),
        noise=Noise(multiplier=0.003),  # rows of this model are so unsure of a note that more could end it
    )
    found = json.loads(text_of(made))
    assert set(found) == {"mood", "note"}
    assert found["mood"] == "bad"
    assert len(releases) == 4


def test_no_candidate_that_fits_ends_the_text_and_takes_no_ticket(releases: list[int]) -> None:
    """The model reports two tokens, and neither can follow."""
    budget = house()
    spy = SpyBackend(lambda prompt, prefix: {" up": 0.5, " top": 0.4, " card": 0.1}, max_top_k=2)
    made = writing(llm=spy, budget=budget, decoding=Decoding(grammar=Grammar.regex(" my (card|transfer)")))
    assert text_of(made) in {"my card", "my transfer"}  # closed by public rule
    assert releases == []
    assert spy.private_prompts == []
    assert not counts(budget)


@engines
def test_a_grammar_that_the_vocabulary_cannot_follow_to_its_end_ends_the_text(engine: str, releases: list[int]) -> None:
    """There are no digits; nothing is released for the place where one should stand."""
    budget = house()
    llm = ENGINES[engine](word_copier(WORDS), WORDS)
    made = writing(llm=llm, budget=budget, decoding=Decoding(grammar=Grammar.regex(" my (card|transfer) [0-9]{2}")))
    assert text_of(made).startswith("my card")
    assert len(releases) == 1
    name = "text: 1 token on one sample"
    assert counts(budget) == {f"reserve {name}": 6, f"commit {name}": 1, f"give_back {name}": 5}


def test_a_text_whose_grammar_can_go_on_ends_where_its_records_end(releases: list[int]) -> None:
    made = writing(decoding=Decoding(grammar=Grammar.regex("( [a-z]+)+")), max_tokens=6)
    assert text_of(made) == "my card was declined"
    assert len(releases) == 5  # the end is one of them: it was not forced


def test_a_grammar_of_blanks_without_end_lets_the_text_end(releases: list[int]) -> None:
    """With one candidate and no end beside it, blanks would be written without releases, far beyond the cap."""
    llm = SpyBackend(scripted(*({"\n": 0.6, "": 0.4},) * 9), vocabulary=["\n", "x"])
    made = writing(llm=llm, decoding=Decoding(grammar=Grammar.regex(r"\n*x?"), candidates=1), max_tokens=2)
    with pytest.raises(PrivacyBudgetExceededError):
        made.run()
    assert releases[0] == 2


# --- stop strings ---------------------------------------------------------------------------------------------------


def test_a_grammar_says_itself_where_a_text_ends() -> None:
    words = [*WORDS, "\n", "."]
    grammar = Grammar.choices([" my card\n was late.", " my card\n was declined."])
    written, llm = Decoding(grammar=grammar), SpyBackend(word_copier(words), vocabulary=words)
    made = writing(decoding=written, llm=llm)
    assert text_of(made) in {"my card\n was late.", "my card\n was declined."}
    assert made.run().plan["stop"] == []
    assert text_of(writing(decoding=written.replace(stop=("\n",)), llm=llm)) == "my card"
    assert writing(decoding=None).run().plan["stop"] == ["\n"]


# --- stops and what goes on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("redraw_every", [1, 2, 8])
@pytest.mark.parametrize("failing_call", [1, 2, 3])
def test_an_interrupted_text_goes_on_inside_its_grammar(
    failing_call: int, redraw_every: int, releases: list[int]
) -> None:
    spy = SpyBackend(characters_of_records, vocabulary=CHARACTERS, fail_public_call=failing_call)
    made = json_writing("", llm=spy, rows=Rows(slots=10, shots=3, redraw_every=redraw_every))
    with pytest.raises(RunInterruptedError):
        made.run()
    assert len(releases) == failing_call - 1
    before = list(made._items[0].tokens)
    assert spy.decode(before).startswith('{"kind": "' if failing_call < 2 else '{"kind": "ham", "n": ')
    found = json.loads(text_of(made))
    if redraw_every == 8 and failing_call > 1:  # its one ticket is gone: the rest is closed by public rule
        assert len(releases) == failing_call - 1
        assert found["kind"] == "ham"
    else:
        assert found == {"kind": "ham", "n": 73}
        assert len(releases) == 3


@pytest.mark.parametrize("stopped_at", range(1, 30))
def test_a_stop_between_forced_tokens_repeats_and_loses_none(
    stopped_at: int, releases: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = json_writing("public row in the batch")
    writer = sys.modules["langchain_dpicl.generation.decoding_loop"]._SegmentWriter
    real, calls = writer._append, [0]

    def append(self: Any, token: Any, block: Any) -> None:
        real(self, token, block)
        calls[0] += 1
        if calls[0] == stopped_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_append", append)
    if stopped_at <= len(RECORD):
        with pytest.raises(KeyboardInterrupt):
            made.run()
    assert json.loads(text_of(made)) == {"kind": "ham", "n": 73}
    assert len(releases) == 3
    assert calls[0] == len(RECORD)


def test_a_deal_goes_on_inside_a_grammar(releases: list[int]) -> None:
    spy = SpyBackend(characters_of_records, vocabulary=CHARACTERS, fail_public_call=3)
    budget = house()
    made = json_writing(
        "", llm=spy, rows=Rows(slots=10, shots=3, sampling="disjoint"), shots_per_label=2, budget=budget
    )
    with pytest.raises(RunInterruptedError):
        made.run()
    assert made._deals is not None
    assert made._deals.left(None, 0, 0) == 6
    assert [json.loads(example["text"]) for example in made.run().examples] == [{"kind": "ham", "n": 73}] * 2
    assert len(releases) == 6
    assert set(counts(budget).values()) == {1}
    assert spy.private_prompts[0] == spy.private_prompts[1]  # the same batch
    assert spy.private_prompts[1] != spy.private_prompts[2] or len(set(spy.private_prompts[0])) == 1


# --- with free public tokens ----------------------------------------------------------------------------------------


def test_free_tokens_stay_inside_the_grammar(releases: list[int]) -> None:
    """Private are two tokens, after which the public model writes; it likes no letter more than another."""
    engine = FullFake(characters_of_records, vocabulary=CHARACTERS)
    noise = LogitNoise("recentered_clip", clip=12.0, free_below=0.2, max_private_tokens=2, multiplier=0.01)
    made = json_writing("", llm=engine, rows=Rows(slots=20, shots=3, redraw_every="run"), noise=noise)
    found = json.loads(text_of(made))
    assert found["kind"] == "ham"
    assert 70 <= found["n"] <= 79
    assert len(releases) == 2
    assert engine.logit_calls == 2


# --- what is shown, what is refused ---------------------------------------------------------------------------------


def test_the_plan_of_a_release_shows_the_grammar() -> None:
    released = json_writing("whole vocabulary").run()
    assert released.plan["grammar"] == {"kind": "json_schema", "schema": {**SCHEMA, "additionalProperties": False}}
    assert json.loads(json.dumps(dict(released.plan)))["grammar"] == released.plan["grammar"]
    assert "grammar" not in writing(decoding=None).run().plan


def test_another_grammar_is_another_share() -> None:
    """A share of the same name is found again with what it has left only where all that is public is the same."""
    budget, private = house(), PrivateExamples(["my card was declined"] * SIZE, public_size=SIZE)
    options: dict[str, Any] = {"budget": budget, "component": "text", "epsilon": 1e5, "noise": Noise(multiplier=0.03)}
    options |= {"llm": SpyBackend(word_copier(WORDS), vocabulary=WORDS), "max_tokens": 6, "rows": Rows(units=10)}
    make = DemonstrationSynthesizer.from_private_examples
    make(private, decoding=Decoding(grammar=MESSAGE), **options).run()
    with pytest.raises(Exception, match="text"):
        make(private, decoding=Decoding(grammar=Grammar.regex(" my [a-z ]+")), **options).run()


UNFIT: dict[str, Any] = {
    "no text": lambda: writing(decoding=Decoding(grammar=Grammar.regex("("))),
    "no token": lambda: writing(decoding=Decoding(grammar=Grammar.regex("[0-9]+"))),
    "no grammar": lambda: writing(decoding=Decoding(grammar=" my [a-z]+")),
}


@pytest.mark.parametrize("unfit", list(UNFIT))
def test_a_grammar_that_cannot_be_followed_is_refused_before_any_charge(
    unfit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, spy = house(), SpyBackend(word_copier(WORDS), vocabulary=WORDS)
    real = DemonstrationSynthesizer.from_private_examples

    def build(private: Any, **options: Any) -> Any:
        return real(private, **{**options, "budget": budget, "llm": spy})

    monkeypatch.setattr(DemonstrationSynthesizer, "from_private_examples", build)
    with pytest.raises(ConfigurationError):
        UNFIT[unfit]()
    assert budget.report().to_dict()["shares"] == []
    assert spy.private_prompts == []
    assert spy.calls["public"] == 0


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, grammar = house(), Grammar.regex(" my (card|transfer|top)")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigurationError, match=r"langchain-dpicl\[grammar\]"):
        Grammar.regex(" my")
    with pytest.raises(ConfigurationError, match=r"langchain-dpicl\[grammar\]"):
        writing(decoding=Decoding(grammar=grammar), budget=budget)
    assert budget.report().to_dict()["shares"] == []
    assert writing(decoding=None, budget=budget).run().examples  # who asks for no grammar needs no extra
