"""Generation end to end on a fake engine: what leaves, what is charged, what survives a failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from langchain_dpicl import Decoding, FewShotTask, GenerationTask, Noise, Rows
from langchain_dpicl.backends.fake import FakeBackend, scripted, word_copier
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler, get_privacy_budget_callback
from langchain_dpicl.exceptions import (
    ConfigurationError,
    DPICLError,
    ModelCallError,
    PrivacyBudgetExceededError,
    PrivacyBudgetMismatchError,
    RunInterruptedError,
)
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import NoiseName, OpenLabel
from langchain_dpicl.privacy.private_examples import PrivateExamples
from tests.doubles import WORDS, SpyBackend
from tests.full_doubles import FullFake

RECORDS = [{"text": "my card was declined", "topic": "card"}] * 200 + [
    {"text": "my transfer is late", "topic": "transfer"}
] * 200
LABELS = ("card", "transfer")


def private_examples(records: Any = RECORDS, **options: Any) -> PrivateExamples:
    given = {"label_key": "topic", "labels": LABELS, "public_size": {"card": 200, "transfer": 200}, **options}
    return PrivateExamples(records, **given)


def engine(**options: Any) -> SpyBackend:
    return SpyBackend(word_copier(WORDS), vocabulary=WORDS, **options)


def roomy(room: int) -> SpyBackend:
    spy: Any = engine()
    spy.room = room
    return spy


def handler(epsilon: float = 1e4, delta: float = 1e-5, **options: Any) -> PrivacyBudgetCallbackHandler:
    return PrivacyBudgetCallbackHandler(epsilon=epsilon, delta=delta, **options)


def synthesizer(private: PrivateExamples, **options: Any) -> DemonstrationSynthesizer:
    given: dict[str, Any] = {
        "llm": engine(),
        "budget": handler(),
        "epsilon": 2000.0,
        "noise": Noise(multiplier=0.05),
        "max_tokens": 6,
        "task": GenerationTask(record_prompt="{topic}: {text}"),
        "instruction": "Messages.",
        **options,
    }
    return DemonstrationSynthesizer.from_private_examples(private, **given)


def test_what_most_records_agree_on_comes_out() -> None:
    released = synthesizer(private_examples()).run()
    assert [dict(example) for example in released.examples] == [
        {"text": "my card was declined", "topic": "card"},
        {"text": "my transfer is late", "topic": "transfer"},
    ]


def test_async_generation_gives_the_same() -> None:
    released = asyncio.run(synthesizer(private_examples()).arun())
    assert {example["text"] for example in released.examples} == {"my card was declined", "my transfer is late"}


@pytest.mark.parametrize("mechanism", ["gumbel", "gaussian", "permute_and_flip"])
@pytest.mark.parametrize("rows", [Rows(units=20), Rows(slots=20, shots=2)], ids=str)
@pytest.mark.parametrize("redraw_every", [1, 4, 6])
def test_every_design_generates(mechanism: NoiseName, rows: Rows, redraw_every: int) -> None:
    made = synthesizer(
        private_examples(),
        noise=Noise(mechanism, multiplier=0.05),
        rows=rows.replace(redraw_every=redraw_every),
    )
    assert made.run().examples[0]["text"] == "my card was declined"


def test_a_label_reads_its_own_records_only() -> None:
    spy = engine()
    synthesizer(private_examples(), llm=spy).run()
    for prompts in spy.private_prompts:
        for prompt in prompts:
            own = "card" if prompt.endswith("card:") else "transfer"
            other = "transfer" if own == "card" else "card"
            assert f"{other}: my" not in prompt


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_noise_is_calibrated_to_the_share(adjacency: str) -> None:
    budget = handler(epsilon=4.0, adjacency=adjacency)
    made = synthesizer(private_examples(), budget=budget, epsilon=2.0, noise=None)
    assert 1.9 < made.plan.epsilon <= 2.0
    assert made.plan.delta == pytest.approx(5e-6)
    report = made.run().report
    assert report["epsilon"] <= 2.0
    assert report["adjacency"] == adjacency


def test_nothing_is_charged_or_called_until_it_runs() -> None:
    budget, spy = handler(epsilon=4.0), engine()
    synthesizer(private_examples(), llm=spy, budget=budget, epsilon=2.0, noise=None)
    assert spy.private_prompts == []


def worded(template: Any) -> dict[str, Any]:
    return {"task": GenerationTask(record_prompt=template)}


FAULTS: dict[str, Callable[[], dict[str, Any]]] = {
    "epsilon 0": lambda: {"epsilon": 0.0},
    "epsilon below 0": lambda: {"epsilon": -1.0},
    "epsilon nan": lambda: {"epsilon": float("nan")},
    "no epsilon": lambda: {"epsilon": None, "noise": None},
    "delta 0": lambda: {"noise": Noise(delta=0.0)},
    "delta above 1 / (10 * public_size)": dict,
    "no tokens": lambda: {"max_tokens": 0},
    "more tokens than the model has room for": lambda: {"llm": roomy(5)},
    "a longer open label": lambda: {
        "llm": roomy(6),
        "private": private_examples(label_key=None, labels=None, public_size=400, fields=["topic"]),
        "task": GenerationTask(open_label=OpenLabel("topic", max_tokens=7)),
    },
    "no shots": lambda: {"shots_per_label": 0},
    "more rows than units": lambda: {"rows": Rows(units=201)},
    "rows by name": lambda: {"rows": "units"},
    "mechanism": lambda: {"noise": "laplace"},
    "fixed samples with labels": lambda: {"rows": Rows(sampling="fixed")},
    "a partition": lambda: {"rows": Rows(slots=2, sampling="partition")},
    "redraw after the end": lambda: {"rows": Rows(redraw_every=7)},
    "temperature of an index": lambda: {"decoding": Decoding(temperature=0.5)},
    "top_k of the largest": lambda: {"noise": "gaussian", "decoding": Decoding(top_k=3)},
    "top_p of the largest": lambda: {"noise": "gaussian", "decoding": Decoding(top_p=0.5)},
    "top_p of logits": lambda: {"noise": "recentered_clip", "decoding": Decoding(top_p=0.5)},
    "empty stop": lambda: {"decoding": Decoding(stop=("",))},
    "text first": lambda: worded("{text} {topic}"),
    "no label field": lambda: worded("{text}"),
    "another field": lambda: worded("{other} {topic} {text}"),
    "format spec": lambda: worded("{topic} {text:>9}"),
    "attribute": lambda: worded("{topic.x} {text}"),
    "open brace": lambda: worded("{topic} {text"),
    "a number as template": lambda: worded(5),
    "a number as instruction": lambda: {"instruction": 5},
    "bytes as instruction": lambda: {"instruction": b"x"},
    "two instructions": lambda: {"instruction": "a", "task": GenerationTask("b")},
    "a task of another kind": lambda: {"task": FewShotTask("a", "b")},
    "words of evolution": lambda: {"task": GenerationTask(hints=("be brief",))},
    "no name": lambda: {"component": ""},
    "open and declared label": lambda: {"task": GenerationTask(open_label=OpenLabel("topic"))},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_public_faults_raise_before_any_charge_or_private_call(fault: str) -> None:
    spy, budget = engine(), handler(delta=3e-4 if fault == "delta above 1 / (10 * public_size)" else 1e-5)
    with pytest.raises(ConfigurationError):
        synthesizer(**{"private": private_examples(), "budget": budget, "llm": spy, **FAULTS[fault]()})
    assert spy.private_prompts == []
    assert budget.report().to_dict()["shares"] == []


class Cutting(SpyBackend):
    """Would cut prompts of more than 20 words."""

    def check_public(self, prompt: str) -> None:
        if self.count_tokens(prompt) > 20:
            raise ModelCallError("a public prompt of at most 20 tokens")


WRITTEN = "{topic}: {text}"
ROOM: dict[str, tuple[int, GenerationTask]] = {
    "a declared label": (19, GenerationTask(record_prompt=WRITTEN)),
    "a listed label": (17, GenerationTask(record_prompt=WRITTEN, open_label=OpenLabel("topic", values=("a", "a b c")))),
    "a written label": (16, GenerationTask(record_prompt=WRITTEN, open_label=OpenLabel("topic", max_tokens=4))),
}


@pytest.mark.parametrize("kind", ROOM)
def test_a_public_prompt_that_the_engine_would_cut_is_refused_before_any_charge(kind: str) -> None:
    most, task = ROOM[kind]
    open_ = {"label_key": None, "labels": None, "public_size": 400, "fields": ["topic"]} if task.open_label else {}
    llm = Cutting(word_copier(WORDS), vocabulary=WORDS)
    for words in (most, most + 1):
        budget, private = handler(), private_examples(**open_)
        with pytest.raises(ModelCallError, match="at most 20") if words > most else contextlib.nullcontext():
            synthesizer(private, llm=llm, budget=budget, task=task, instruction="word " * words)
        assert bool(budget.report().to_dict()["shares"]) == (words == most)
    assert not llm.calls


def test_a_share_that_does_not_fit_binds_nothing() -> None:
    private = private_examples()
    with pytest.raises(PrivacyBudgetExceededError):
        synthesizer(private, budget=handler(epsilon=0.1), epsilon=0.5, noise=None)
    assert synthesizer(private, budget=handler(epsilon=1.0), epsilon=0.5, noise=None).run().examples


@pytest.mark.parametrize("error", [ConnectionError("x"), KeyboardInterrupt(), RuntimeError("y")], ids=repr)
@pytest.mark.parametrize("redraw_every", [1, 3])
def test_whatever_stops_a_run_loses_nothing_released(error: BaseException, redraw_every: int) -> None:
    class Flaky(SpyBackend):
        calls_left = 7

        def top_tokens(self, prompt: str, prefix: Any, *, top_k: int) -> Any:
            self.calls_left -= 1
            if self.calls_left == 0:
                raise error
            return super().top_tokens(prompt, prefix, top_k=top_k)

    made = synthesizer(
        private_examples(), llm=Flaky(word_copier(WORDS), vocabulary=WORDS), rows=Rows(redraw_every=redraw_every)
    )
    with pytest.raises((RunInterruptedError, type(error))) as caught:
        made.run()
    kept = made.demonstrations
    assert caught.value.run is made
    released = made.run()
    assert released.examples[: len(kept)] == tuple(kept)
    assert len(released.examples) == 2


def test_fewer_declared_units_than_the_default_rows_give_fewer_rows() -> None:
    private = private_examples(public_size={"card": 18, "transfer": 200})
    assert synthesizer(private).plan.design.num_slots == 18


def test_a_text_does_not_end_before_it_begins() -> None:
    spy = SpyBackend(scripted({"": 0.5, "\n": 0.4, " my": 0.1}, {"": 0.9, " my": 0.1}), vocabulary=[*WORDS, "\n"])
    assert [example["text"] for example in synthesizer(private_examples(), llm=spy).run().examples] == ["my", "my"]


def test_the_budget_is_found_in_the_config_and_in_the_context() -> None:
    budget = handler()
    assert synthesizer(private_examples(), budget={"callbacks": [budget]}).run().examples
    with get_privacy_budget_callback(epsilon=1e4, delta=1e-5):
        assert synthesizer(private_examples(), budget=None).run().examples


def test_another_budget_is_refused() -> None:
    private, spy = private_examples(), engine()
    synthesizer(private).run()
    with pytest.raises(PrivacyBudgetMismatchError):
        synthesizer(private, budget=handler(), llm=spy)
    assert spy.private_prompts == []


def test_an_exhausted_budget_is_refused_with_requested_and_remaining() -> None:
    private, budget, spy = private_examples(), handler(epsilon=3.0), engine()
    synthesizer(private, budget=budget, epsilon=2.0, noise=None).run()
    with pytest.raises(PrivacyBudgetExceededError) as caught:
        synthesizer(private, budget=budget, epsilon=2.0, noise=None, llm=spy)
    assert caught.value.requested == pytest.approx(2.0)
    assert caught.value.remaining == pytest.approx(1.0, abs=0.11)
    assert spy.private_prompts == []


def test_noise_too_small_for_the_share_is_refused() -> None:
    with pytest.raises(PrivacyBudgetExceededError):
        synthesizer(private_examples(), epsilon=0.5)


def test_a_short_text_gives_its_tickets_back_and_a_block_does_not() -> None:
    for redraw_every, left in ((1, 2), (6, 0)):
        budget = handler()
        made = synthesizer(
            private_examples(),
            budget=budget,
            rows=Rows(redraw_every=redraw_every),
            decoding=Decoding(stop=("declined", "late")),
        )
        made.run()
        share = made.share
        template = next(t.template for t in made.plan.tickets())
        if left:
            assert share.reserve(template, label="card", count=left).unburnt == left
        with pytest.raises(PrivacyBudgetExceededError):
            share.reserve(template, label="card", count=1)


def test_a_stop_string_ends_the_text_and_is_cut() -> None:
    released = synthesizer(private_examples(), decoding=Decoding(stop=(" was", " is"))).run()
    assert [example["text"] for example in released.examples] == ["my card", "my transfer"]


def test_a_stop_string_that_begins_with_a_space_is_found_at_the_start_too() -> None:
    """A token brings the space before its word; it is stripped from the text, and paid for up to the stop alone."""
    made = synthesizer(private_examples(), decoding=Decoding(stop=(" my card",)))
    assert [example["text"] for example in made.run().examples] == ["my transfer is late"]
    template = next(ticket.template for ticket in made.plan.tickets())
    assert made.share.reserve(template, label="card", count=4).unburnt == 4


def test_the_text_ends_with_the_model_and_at_the_cap() -> None:
    assert synthesizer(private_examples(), max_tokens=2).run().examples[0]["text"] == "my card"


@pytest.mark.parametrize(("end", "stop"), [("", ()), ("\n", ()), ("\nS", ("\n",)), ("\nS", ("\nS",))])
def test_a_text_that_is_cut_inside_a_character_ends_before_it(end: str, stop: tuple[str, ...]) -> None:
    letters: list[Any] = [bytes([byte]) for byte in "日本".encode()[:4] + end.encode()]
    llm = FakeBackend(scripted(*({letter: 1.0} for letter in letters)), vocabulary=list(dict.fromkeys(letters)))
    written = Decoding(candidates="all", stop=stop)
    made = synthesizer(private_examples(), llm=llm, max_tokens=len(letters), decoding=written)
    assert made.run().examples[0]["text"] == "日"


@pytest.mark.parametrize("failing_call", [1, 2, 4, 7])
@pytest.mark.parametrize("redraw_every", [1, 3])
def test_an_outage_keeps_the_charge_and_what_was_released_and_resumes(failing_call: int, redraw_every: int) -> None:
    spy, budget = engine(fail_public_call=failing_call), handler()
    made = synthesizer(private_examples(), llm=spy, budget=budget, rows=Rows(redraw_every=redraw_every), max_tokens=7)
    with pytest.raises(RunInterruptedError) as caught:
        made.run()
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    kept = made.demonstrations
    sessions = len(spy.private_prompts)
    released = caught.value.run.run()
    assert released.examples[: len(kept)] == tuple(kept)
    assert len(released.examples) == 2
    assert len(spy.private_prompts) > sessions
    # Every token drew its own ticket: never more sessions than tickets.
    assert len(spy.private_prompts) <= sum(ticket.max_count for ticket in made.plan.tickets())


@pytest.mark.parametrize("sampling", ["poisson", "disjoint"])
def test_a_text_whose_only_ticket_burnt_without_a_token_is_left_out(
    sampling: Any, caplog: pytest.LogCaptureFixture
) -> None:
    llm = FullFake(word_copier(WORDS), vocabulary=WORDS, public_fails_at=1)
    rows = Rows(slots=10, sampling=sampling, redraw_every="run" if sampling == "poisson" else None)
    made = synthesizer(private_examples(), llm=llm, rows=rows)
    with pytest.raises(RunInterruptedError):
        made.run()
    found = made.run().examples
    assert made.is_finished
    assert [example["topic"] for example in found] == (["transfer"] if sampling == "poisson" else ["card", "transfer"])
    assert made.run() == made.result  # a finished run says it once
    said = "1 of 2 demonstrations are left out: each is empty, or its tickets were lost, or used by another run."
    assert caplog.text.count(said) == (sampling == "poisson")
    assert all(example["text"] for example in found)


def test_demonstrations_stream_as_they_are_made() -> None:
    made = synthesizer(private_examples())
    stream = made.stream()
    assert next(stream)["topic"] == "card"
    assert len(made.demonstrations) == 1
    assert [example["topic"] for example in stream] == ["transfer"]


def test_several_shots_per_label_compose() -> None:
    one = synthesizer(private_examples()).plan
    three = synthesizer(private_examples(), shots_per_label=3, epsilon=9000.0).plan
    assert three.epsilon > 1.5 * one.epsilon
    made = synthesizer(private_examples(), shots_per_label=3, epsilon=9000.0).run()
    assert [example["topic"] for example in made.examples] == ["card", "transfer"] * 3


class TestNothingDependsOnTheRecords:
    """Neighbouring and extreme data sets run the same path."""

    @pytest.mark.parametrize(
        "records",
        [
            [],
            RECORDS[:1],
            RECORDS[:200],
            [{"text": "", "topic": "card"}] * 30,
            [{"text": "{q.secret} {0} %s $x \x00 \u202e", "topic": "card"}] * 30,
            [{"text": "my " * 5000, "topic": "transfer"}] * 10,
        ],
        ids=["none", "one", "one label", "empty texts", "braces", "huge"],
    )
    @pytest.mark.parametrize("design", [Rows(), Rows(slots=50, shots=3)], ids=str)
    def test_any_records_give_the_same_plan_and_the_same_type_of_result(self, records: Any, design: Rows) -> None:
        made = synthesizer(private_examples(records), rows=design)
        reference = synthesizer(private_examples(), rows=design)
        assert made.plan == reference.plan
        released = made.run()
        assert [example["topic"] for example in released.examples] == ["card", "transfer"]
        assert released.plan == reference.run().plan

    def test_one_user_owning_everything_is_one_row(self) -> None:
        spy = engine()
        records = [{**record, "user": "u1"} for record in RECORDS]
        private = private_examples(records, unit_key="user")
        synthesizer(private, llm=spy, rows=Rows(units=200)).run()
        assert max(len(prompts) for prompts in spy.private_prompts) <= 1

    def test_removing_a_unit_keeps_the_rates_and_forgets_the_text(self) -> None:
        spy = engine()
        private = private_examples([{"text": "my CANARY", "topic": "card"}, *RECORDS])
        made = synthesizer(private, llm=spy, rows=Rows(units=200))
        before = made.plan
        private.remove(0)
        made.run()
        assert made.plan == before
        assert not [p for prompts in spy.private_prompts for p in prompts if "CANARY" in p]


class TestOpenLabels:
    def films(self) -> PrivateExamples:
        return PrivateExamples(
            [{"text": "my card was declined", "topic": "declined"}] * 200, fields=("topic",), public_size=200
        )

    def test_a_label_drawn_from_a_public_list_is_never_a_record_s(self) -> None:
        made = synthesizer(
            self.films(),
            task=GenerationTask(
                record_prompt="{topic}: {text}", open_label=OpenLabel("topic", values=("alpha", "beta"))
            ),
            shots_per_label=4,
            epsilon=9e3,
        )
        assert {example["topic"] for example in made.run().examples} <= {"alpha", "beta"}

    @pytest.mark.parametrize("values", [(), ("alpha", "alpha"), ("alpha", "")])
    def test_a_public_list_holds_each_label_once(self, values: Any) -> None:
        task = GenerationTask(record_prompt="{topic}: {text}", open_label=OpenLabel("topic", values=values))
        with pytest.raises(ConfigurationError, match=r"OpenLabel\.values: .* distinct non-empty texts"):
            synthesizer(self.films(), task=task, epsilon=9e3)

    def test_a_generated_label_is_released_token_by_token_and_charged(self) -> None:
        # The label is the first word after "topic", which the records agree on.
        made = synthesizer(
            self.films(),
            task=GenerationTask(record_prompt="topic {topic}\nmy {text}", open_label=OpenLabel("topic", max_tokens=2)),
            max_tokens=3,
        )
        segments = {ticket.template: ticket.max_count for ticket in made.plan.tickets()}
        assert sorted(segments.values()) == [2, 3]
        example = made.run().examples[0]
        assert set(example) == {"text", "topic"}


class TestGaussianDecoding:
    @pytest.mark.parametrize(
        "decoding",
        [Decoding(temperature=0.01), Decoding(temperature=1.0, top_k=1), Decoding(temperature=1.0, top_p=1e-6)],
        ids=str,
    )
    def test_sharp_sampling_is_argmax(self, decoding: Decoding) -> None:
        made = synthesizer(private_examples(), noise=Noise("gaussian", multiplier=0.05), decoding=decoding)
        assert made.run().examples[0]["text"] == "my card was declined"


def test_a_top_k_engine_caps_the_public_candidates_and_shows_it() -> None:
    spy = SpyBackend(word_copier(WORDS), max_top_k=4)
    made = synthesizer(private_examples(), llm=spy, decoding=Decoding(candidates=100))
    assert made.plan.candidates == 5
    assert made.run().plan["public_top_k"] == 4


def test_the_whole_vocabulary_can_be_the_domain_and_needs_an_engine_that_has_it() -> None:
    assert (
        synthesizer(private_examples(), decoding=Decoding(candidates="all")).run().examples[0]["text"]
        == "my card was declined"
    )
    with pytest.raises(ConfigurationError, match="top tokens only"):
        synthesizer(
            private_examples(), llm=SpyBackend(word_copier(WORDS), max_top_k=4), decoding=Decoding(candidates="all")
        )


def test_a_token_no_record_wants_needs_the_public_list() -> None:
    """With candidates from the public prompt a private-only token cannot leave, whatever the records say."""

    def private_only(prompt: str, prefix: tuple[bytes, ...]) -> dict[str, float]:
        return {" secret": 1.0} if "my" in prompt else {" public": 0.6, " other": 0.4}

    spy = SpyBackend(private_only, vocabulary=[" public", " other", " secret"])
    made = synthesizer(private_examples(), llm=spy, decoding=Decoding(candidates=2), max_tokens=3)
    assert "secret" not in " ".join(example["text"] for example in made.run().examples)


def test_components_declared_in_a_plan_cost_less_together_and_run_after_it() -> None:
    private, budget = private_examples(), handler(epsilon=10.0)
    with budget.plan():
        first = synthesizer(private, budget=budget, epsilon=2.0, noise=None)
        second = synthesizer(private, budget=budget, epsilon=2.0, noise=None)
        with pytest.raises(DPICLError):
            first.run()
    assert first.run().examples
    assert second.run().examples
    assert 10.0 - budget.remaining_epsilon < 3.7


@pytest.mark.parametrize("kind", [FakeBackend, FullFake])
def test_characters_of_several_tokens_are_written_whole(kind: type[FakeBackend]) -> None:
    """Noise chooses among tokens that begin a character, and inside one among those that go on with it."""
    begins, ends = "返".encode()[:2], "返".encode()[2:]

    def answers(_: str, prefix: tuple[bytes, ...]) -> dict[bytes, float]:
        if prefix[-1:] == (begins,):
            return {b"b": 0.6, b"\xe8": 0.3, ends: 0.1}
        return {ends: 0.6, begins: 0.3, b"b": 0.1}

    llm = kind(answers, vocabulary=[ends, b"\xe8", b"b", begins])
    text = synthesizer(private_examples(), llm=llm, max_tokens=6).run().examples[0]["text"]
    assert text == "返返返"


def test_the_same_component_name_and_plan_is_the_same_share() -> None:
    private, budget = private_examples(), handler()
    first = synthesizer(private, budget=budget, component="letters")
    first.run()
    spent = budget.remaining_epsilon
    second = synthesizer(private, budget=budget, component="letters")
    assert budget.remaining_epsilon == spent
    # Short texts gave 2 of 6 tickets per label back; what was burnt stays burnt.
    with pytest.raises(PrivacyBudgetExceededError):
        second.run()


def test_progress_is_shown_when_asked_for_and_silent_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    synthesizer(private_examples()).run()
    assert capsys.readouterr().err == ""
    synthesizer(private_examples()).run(progress=True)
    shown = capsys.readouterr().err
    assert "private generation" in shown
    assert "2/2 demonstrations" in shown


def test_an_engine_that_always_ends_gives_no_text() -> None:
    made = synthesizer(private_examples(), llm=FakeBackend(scripted(), vocabulary=WORDS))
    with pytest.raises(
        PrivacyBudgetExceededError, match=r"2 demonstrations, found none; remaining tickets: 10"
    ) as told:
        made.run()
    assert (told.value.requested, told.value.remaining) == (2, 10)
    with pytest.raises(PrivacyBudgetExceededError):
        asyncio.run(made.arun())
    assert made.result.examples == ()
