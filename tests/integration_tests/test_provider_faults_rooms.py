"""A provider that fails for the sake of ONE record: every front room goes on as without it, and tells nobody.

An abort would give the record away: it happens with it and never without. So runs on neighbouring data sets are compared,
through a real client and a server on this machine: errors, types of results, ledger lines, public requests. No rate of
errors has to be estimated: it is zero on both sides, whatever the coins.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    Budget,
    DPFewShotPromptTemplate,
    DPFreeFormRunnable,
    DPVotingRunnable,
    KeywordAnswers,
    LabelAnswers,
    Noise,
    PrivateExamples,
    PromptPATELabeler,
    Rows,
)
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import RetryPolicy
from langchain_dpicl.exceptions import ModelCallError
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from langchain_dpicl.privacy.mechanisms.release_plan import PoissonSlots, ReleasePlan
from tests.canary import RECORD, canaries_in, describe
from tests.live import LABELS, Servers, give_up_soon, openai_model
from tests.loopback_provider import (
    Fault,
    Hook,
    Received,
    echoing_400,
    hang_up,
    html,
    huge,
    rate_limited,
    server_error,
    slow,
    truncated,
)

pytestmark = [pytest.mark.loopback, pytest.mark.usefixtures("free_prices")]

TRIGGER = "unspeakable"
QUERIES = ("is my card there ?", "is the transfer there ?")
RETRY = RetryPolicy(max_attempts=2, first_wait=0.0, max_wait=0.0)
PLAIN = tuple(f"{RECORD} my card number {number} was declined" for number in range(5))
USUAL = f"{RECORD} the transfer is pending"
NEIGHBOURS = {
    "replaced": (*PLAIN, f"{RECORD} {TRIGGER} things"),
    "added twice": (*PLAIN, USUAL, f"{TRIGGER} {RECORD}", f"{RECORD} so {TRIGGER}"),
    "none but such": (f"{RECORD} {TRIGGER} things",) * 6,
    "no record at all": (),
}
FAULTS: dict[str, Hook] = {
    "content filter that echoes": echoing_400(),
    "busy without end": rate_limited(),
    "500": server_error(),
    "hangs up": hang_up(),
    "a page of HTML": html(),
    "cut off": truncated(),
    "a megabyte": huge(megabytes=1),
}


class Scene:
    """One room over one data set, on a provider of its own kind."""

    dialect = "openai"

    def __init__(self, servers: Servers, texts: tuple[str, ...], fault: Hook | None) -> None:
        self.served = servers.served(dialect=self.dialect)
        self.store = InMemoryStore()
        self.texts = texts
        self.kept: list[Any] = []
        if fault is not None:
            self.served.script(fault, when=TRIGGER)

    def spending(self) -> dict[str, Any]:
        return {"budget": Budget(epsilon=1e6, delta=1e-4, store=self.store), "epsilon": 1e5}

    def options(self, **more: Any) -> dict[str, Any]:
        return {**self.spending(), "noise_multiplier": 2.0, "num_slots": 6, **more}

    def examples(self) -> PrivateExamples:
        listed = [{"text": text, "queue": LABELS[place % 2]} for place, text in enumerate(self.texts)]
        return PrivateExamples(listed, label_key="queue", labels=LABELS, public_size=6)

    def votes(self) -> TextVoteBackend:
        return TextVoteBackend(openai_model("ChatOpenAI", self.served.url), retry=RETRY)

    def act(self) -> list[Any]:
        """Returns what comes out, without what the noise decides."""
        raise NotImplementedError


class Voting(Scene):
    def act(self) -> list[Any]:
        made = DPVotingRunnable.from_private_examples(
            self.examples(),
            llm=self.votes(),
            max_queries=2,
            answers=LabelAnswers(calibrate=False, abstain_below=0.3),
            **self.spending(),
            rows=Rows(units=6),
            noise=Noise(multiplier=2.0),
        )
        self.kept = [made, *map(made.with_receipts().invoke, QUERIES)]
        return [sorted(found.model_dump()) for found in self.kept[1:]]


class FreeForm(Scene):
    def act(self) -> list[Any]:
        made = DPFreeFormRunnable.from_private_examples(
            self.examples(),
            llm=self.votes(),
            max_queries=2,
            budget=Budget(epsilon=1e6, delta=1e-4, store=self.store),
            epsilon=1e5,
            rows=Rows(units=6),
            noise=Noise(multiplier=2.0),
            answers=KeywordAnswers(keywords=("card", "transfer", "declined"), num_keywords=1, max_tokens=1),
        )
        self.kept = [made, *map(made.with_receipts().invoke, QUERIES)]
        return [(sorted(found.model_dump()), len(found.keywords)) for found in self.kept[1:]]


class Labelling(Scene):
    def act(self) -> list[Any]:
        made = PromptPATELabeler.from_private_examples(
            self.examples(),
            llm=self.votes(),
            public_inputs=QUERIES,
            max_queries=2,
            budget=Budget(epsilon=1e6, delta=1e-4, store=self.store),
            epsilon=1e5,
            rows=Rows(units=6),
            noise=Noise(multiplier=2.0),
            answers=LabelAnswers(calibrate=False, abstain_below=0.3),
        )
        pool = made.run(progress=False)
        self.kept = [made, pool, pool.to_json()]
        return [len(json.loads(pool.to_json())["entries"]), made.queries_left]


class Generation(Scene):
    dialect = "vllm"

    def act(self) -> list[Any]:
        made = DPFewShotPromptTemplate.from_private_examples(
            self.examples(),
            llm=LangChainBackend(openai_model("OpenAI", self.served.url), retry=RETRY),
            example_prompt=PromptTemplate.from_template("text: {text}\nqueue: {queue}"),
            suffix="text: {input}\nqueue:",
            instruction="Questions of bank customers.",
            budget=Budget(epsilon=1e6, delta=1e-4, store=self.store),
            epsilon=1e5,
            rows=Rows(slots=3, shots=2),
            max_tokens=2,
            noise=Noise("gumbel", multiplier=2.0),
        )
        self.kept = [made, made.examples]
        return [sorted(example) for example in made.examples]


ROOMS = [Voting, FreeForm, Labelling, Generation]
every_room = pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)


def is_public(request: Received) -> bool:
    return RECORD.encode() not in request.raw and TRIGGER.encode() not in request.raw


def seen(scene: Scene) -> dict[str, Any]:
    """What a caller sees of a run, and how often the provider is asked with public text, but for what noise decides."""
    result: Any = None
    error = ""
    try:
        result = scene.act()
    except Exception as fault:
        error = f"{type(fault).__name__}: {fault} {canaries_in(describe(fault))}"
    lines = [(line.kind, line.body.get("count"), line.body.get("component")) for line in scene.store.records()]
    public = sum(map(is_public, scene.served.received))
    # How soon a text ends is noise, and with it how many tickets go back and how often the public prompt is asked.
    is_text = isinstance(scene, Generation)
    return {
        "error": error,
        "result": result,
        "lines": [line for line in lines if not (is_text and line[0] in {"commit", "give_back"})],
        "public requests": None if is_text else public,
    }


@pytest.fixture(scope="module")
def usual_of(servers: Servers) -> Callable[[type[Scene]], dict[str, Any]]:
    """What is seen of a room whose records are all answered: no fault of the tests is met then."""

    @functools.cache
    def usual(room: type[Scene]) -> dict[str, Any]:
        found = seen(room(servers, (*PLAIN, USUAL), None))
        assert found["error"] == ""
        assert [kind for kind, *_ in found["lines"]].count("reserve") >= 1
        return found

    return usual


@every_room
@pytest.mark.parametrize("fault", FAULTS)
def test_one_record_that_the_provider_refuses_is_seen_nowhere(
    servers: Servers, usual_of: Callable[[type[Scene]], dict[str, Any]], room: type[Scene], fault: str
) -> None:
    assert seen(room(servers, NEIGHBOURS["replaced"], FAULTS[fault])) == usual_of(room)


@every_room
@pytest.mark.parametrize("neighbour", [name for name in NEIGHBOURS if name != "replaced"])
def test_how_many_records_are_refused_is_seen_nowhere(
    servers: Servers, usual_of: Callable[[type[Scene]], dict[str, Any]], room: type[Scene], neighbour: str
) -> None:
    assert seen(room(servers, NEIGHBOURS[neighbour], echoing_400())) == usual_of(room)


@pytest.mark.parametrize("room", [Voting, Labelling], ids=lambda room: room.__name__)
def test_one_record_that_takes_too_long_is_seen_nowhere_but_in_the_time(
    servers: Servers,
    usual_of: Callable[[type[Scene]], dict[str, Any]],
    room: type[Scene],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = usual_of(room)
    scene = room(servers, NEIGHBOURS["replaced"], slow(600.0))
    give_up_soon(monkeypatch, scene.served)
    assert seen(scene) == usual


EXTRAS = "chatcmpl-of-one-record"


def numbered(request: Received) -> Fault:
    """The usual answer, with an id, a fingerprint, counts and headers that hang on the request."""
    mark = f"{EXTRAS}-{len(request.raw)}"

    def spoil(body: bytes) -> bytes:
        answer = json.loads(body)
        counts = {"prompt_tokens": 7_654_321, "completion_tokens": 1, "total_tokens": 7_654_322}
        return json.dumps(
            {**answer, "id": mark, "system_fingerprint": mark, "service_tier": mark, "usage": counts}
        ).encode()

    return Fault(headers={"x-request-id": mark, "openai-processing-ms": "7654321"}, spoil=spoil)


@every_room
def test_what_comes_with_an_answer_is_in_nothing_that_leaves(
    servers: Servers, usual_of: Callable[[type[Scene]], dict[str, Any]], room: type[Scene]
) -> None:
    """Ids and fingerprints that change with every answer, as of a model that was changed silently, have no effect."""
    usual = usual_of(room)
    scene = room(servers, (*PLAIN, USUAL), None)
    scene.served.script(numbered, when=RECORD)
    assert seen(scene) == usual
    assert scene.kept
    dumped = [thing.model_dump() for thing in scene.kept if hasattr(thing, "model_dump")]
    lines = [line.to_dict() for line in scene.store.records()]
    everything = repr((scene.kept, dumped, lines, [vars(thing) for thing in scene.kept if hasattr(thing, "__dict__")]))
    assert EXTRAS not in everything
    assert "7654321" not in everything


@every_room
def test_a_public_outage_aborts_on_every_data_set_alike(servers: Servers, room: type[Scene]) -> None:
    """An abort is decided by public calls, which are made in every run whatever the records."""
    outcomes = []
    for texts in ((*PLAIN, USUAL), NEIGHBOURS["none but such"], ()):
        scene = room(servers, texts, None)
        scene.served.script(server_error(), when=is_public)
        with pytest.raises(ModelCallError) as caught:
            scene.act()
        outcomes.append((str(caught.value), [line.kind for line in scene.store.records()]))
        assert RECORD not in str(caught.value)
    assert outcomes[1:] == outcomes[:1] * 2


def test_the_comparison_sees_a_room_that_lets_a_failed_row_through(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: a release is refused where a row is empty, as a check of the rows would do."""
    bound = ReleasePlan.bound

    def strict(self: Any, rows: Any, *given: Any, **options: Any) -> Any:
        if len(rows) and not np.asarray(rows).any(axis=1).all():
            raise ModelCallError("a row failed")
        return bound(self, rows, *given, **options)

    monkeypatch.setattr(ReleasePlan, "bound", strict)
    monkeypatch.setattr(PoissonSlots, "draw", lambda self, n, *, rng: tuple((unit,) for unit in range(n)))
    usual = seen(Voting(servers, (*PLAIN, USUAL), None))
    assert usual["error"] == ""
    assert seen(Voting(servers, NEIGHBOURS["replaced"], echoing_400())) != usual
