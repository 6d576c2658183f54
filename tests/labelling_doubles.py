"""Teachers for tests of labelling: an engine that is watched, small examples, and what a ledger says of a run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_dpicl import Budget, LabelAnswers, LabelledPool, Noise, PrivateExamples, PromptPATELabeler, Rows
from langchain_dpicl.backends.fake import FakeBackend
from langchain_dpicl.options import ConfidentGNMax
from langchain_dpicl.privacy.extensions.durable_writer import write_all_waiting
from langchain_dpicl.privacy.ledger.store import InMemoryStore
from tests.contracts.front_room import CANARY

LABELS = ("card", "transfer")
CARD, WIRE, MUTE = "my card is lost", "wire it abroad", "hmm"
# Noise so small that the votes decide; its cost is of no interest where this is used. Chance is of none either: of forty units each
# is in a sample with probability one half, and two votes are needed; fewer than three rows come with probability 1e-9.
QUIET = Noise(multiplier=0.05)
PLAIN = LabelAnswers(abstain_below=0.1, calibrate=False)
SURE = ConfidentGNMax(2.0, 0.05, 0.05)
# Units: a slot may be empty, and then it votes as the public model does.
FRESH, ONCE, FIXED = Rows(units=20), Rows(units=20, redraw_every="run"), Rows(slots=20, sampling="partition")
TEACHERS = {"fresh": FRESH, "one_sample": ONCE, "fixed": FIXED}
NOISES: dict[str, Noise | ConfidentGNMax] = {
    "gumbel": QUIET.replace(mechanism="gumbel"),
    "permute_and_flip": QUIET.replace(mechanism="permute_and_flip"),
    "gaussian": QUIET.replace(mechanism="gaussian"),
    "confident_gnmax": SURE,
}
GAUSSIAN = NOISES["gaussian"]


def by_query(prompt: str, prefix: tuple[bytes, ...]) -> Mapping[str, float]:
    """Knows cards; has nothing to say of what is mute, in a private prompt."""
    query = prompt.rsplit("text: ", 1)[-1]
    if MUTE in query and CANARY in prompt:
        return {}
    card = 0.9 if "card" in query else 0.1
    return {" card": card, " transfer": 1 - card}


class Spy(FakeBackend):
    """Remembers what it was asked (never do this outside a test), and does what a test wants before it answers."""

    def __init__(self, distribution: Any = by_query, **options: Any) -> None:
        super().__init__(distribution, vocabulary=[" card", " transfer"], **options)
        self.private: list[tuple[str, ...]] = []
        self.public: list[str] = []
        self.at_public: Callable[[], object] = lambda: None
        self.at_private: Callable[[], object] = lambda: None

    def score_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
        if any(CANARY in prompt for prompt in prompts):
            self.private.append(tuple(prompts))
            self.at_private()
        else:
            self.public += prompts
            self.at_public()
        return super().score_choices(prompts, choices)

    async def ascore_choices(self, prompts: Sequence[str], choices: Sequence[str]) -> Any:
        await asyncio.sleep(0)
        return self.score_choices(prompts, choices)

    @property
    def asked(self) -> list[str]:
        """The inputs that private prompts ended in, call by call."""
        return [prompts[0].rsplit("text: ", 1)[-1].removesuffix("\nqueue:") for prompts in self.private]


def fails(*errors: BaseException) -> Callable[[], None]:
    """Raises one error a call while there are some; `None` lets a call pass."""
    left = list(errors)

    def step() -> None:
        if left and (error := left.pop(0)) is not None:
            raise error

    return step


def examples(**options: Any) -> PrivateExamples:
    records = [{"text": f"{CANARY} {i}", "queue": LABELS[i % 2]} for i in range(40)]
    return PrivateExamples(records, **{"label_key": "queue", "labels": LABELS, "public_size": 40, **options})


def house(adjacency: str = "add_remove", **options: Any) -> Budget:
    return Budget(**{"epsilon": 1e6, "delta": 1e-4, "adjacency": adjacency, "store": InMemoryStore(), **options})


def loud(**options: Any) -> dict[str, Any]:
    """Options of teachers whose votes decide, and what else is given."""
    given = {"rows": FRESH, "noise": QUIET, "answers": PLAIN, "epsilon": 2e5, **options}
    if isinstance(given["noise"], ConfidentGNMax) and given["answers"].abstain_below == PLAIN.abstain_below:
        given["answers"] = given["answers"].replace(abstain_below=None)  # its noisy test has a threshold of its own
    return given


def labeler(private: PrivateExamples | None = None, *, budget: Any = None, **options: Any) -> PromptPATELabeler:
    """A labeler whose votes decide, with teachers and noise as `options` ask for."""
    given = {"llm": Spy(), "public_inputs": [CARD, WIRE], **loud(**options)}
    is_fixed = given["rows"] is not None and given["rows"].sampling == "partition"
    usual = house("replace_one" if is_fixed else "add_remove")
    return PromptPATELabeler.from_private_examples(private or examples(), budget=budget or usual, **given)


def lines(budget: Budget) -> list[Any]:
    write_all_waiting()
    return list(budget._store.records())


def counts(budget: Budget) -> Counter[str]:
    """Tickets by what happened to them: "reserve label", "commit label", ..."""
    found: Counter[str] = Counter()
    template: dict[int, str] = {}
    for line in lines(budget):
        if line.kind == "reserve":
            template[line.seq] = line.body["template"]
        if line.kind in {"reserve", "commit", "give_back"}:
            name = template[line.seq if line.kind == "reserve" else line.body["reservation"]]
            found[f"{line.kind} {name}"] += line.body["count"]
    return found


def told(pool: LabelledPool) -> list[tuple[str, str | None]]:
    return [(entry.status, entry.label) for entry in pool.entries]
