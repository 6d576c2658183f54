"""Our entry points, each called inside a chain like any component. A new component is one line in `ROOMS`."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from langchain_core.language_models import BaseLLM
from langchain_core.messages import HumanMessage
from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableConfig, RunnableGenerator, RunnableLambda
from langchain_core.stores import InMemoryByteStore

from langchain_dpicl import (
    Decoding,
    EmbeddingAnswers,
    FewShotTask,
    KeywordAnswers,
    LabelAnswers,
    Noise,
    Retrieval,
    Rows,
    Serving,
)
from langchain_dpicl.backends import PrivateProcess
from langchain_dpicl.backends.langchain.backend import LangChainBackend
from langchain_dpicl.backends.langchain.logprobs import DecisionsBackend
from langchain_dpicl.backends.langchain.texts import TextVoteBackend
from langchain_dpicl.backends.private_calls.call import OpaqueValue, Request, silence, unwrap
from langchain_dpicl.backends.private_calls.embeddings import SilentEmbeddings
from langchain_dpicl.backends.resolve import as_choice_backend
from langchain_dpicl.backends.rows.answer_rows import AnswerRows
from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
from langchain_dpicl.discovery import UnitCounter, ValueDiscovery, WordDiscovery
from langchain_dpicl.distributed import WorkerFactory, Workplace
from langchain_dpicl.documents import DocumentSynthesizer
from langchain_dpicl.evaluation import Exact, Judge, dp_achoose, dp_aevaluate, dp_choose, dp_evaluate
from langchain_dpicl.evolution import PrivateEvolution
from langchain_dpicl.exceptions import ModelCallError, UnsilencableModelError
from langchain_dpicl.free_form import DPFreeFormRunnable
from langchain_dpicl.generation.synthesizer import DemonstrationSynthesizer
from langchain_dpicl.options import Evolution, Student, Topics
from langchain_dpicl.pate.example_selector import PromptPATEExampleSelector
from langchain_dpicl.pate.labeler import PromptPATELabeler
from langchain_dpicl.privacy.private_examples import PrivateExamples
from langchain_dpicl.prompts import DPFewShotPromptTemplate
from langchain_dpicl.released.counts import ReleasedCounts, ReleasedWords
from langchain_dpicl.retrieval import DPRetrievalFreeFormRunnable, DPRetrievalVotingRunnable
from langchain_dpicl.stores import SQLiteMemo, StoreMemo
from langchain_dpicl.streams import PrivateStream
from langchain_dpicl.voting import DPVotingRunnable
from tests.canary import RECORD
from tests.crews import Crew
from tests.leaks.models import CALLS, ONCE, RECORDS, LeakyEmbeddings
from tests.leaks.scene import ENTRIES, Scene

DOMAIN = [b" my", b" card"]
CHOICES = ["my", "card"]
OPTIONS: dict[str, Any] = {
    "epsilon": 8.0,
    "noise": Noise(multiplier=2.0),
    "max_tokens": 2,
    "rows": Rows(units=6),  # all of them: each run has private calls
    "decoding": Decoding(candidates=3),
    "instruction": "Messages.",
}

QUERIES: dict[str, Any] = {
    "epsilon": 40.0,
    "noise_multiplier": 1.0,
    "max_queries": 4,
    "num_slots": 2,
    "rows": "units",
    "example_prompt": "{text} -> {topic}",
    "suffix": "{input} ->",
    "with_receipt": True,
}
"""Of components that answer queries: every record is in every sample, so that there always are private calls."""

VOTED: dict[str, Any] = {
    "epsilon": 40.0,
    "max_queries": 4,
    "task": FewShotTask("{text} -> {topic}", "{input} ->", labels=CHOICES),
    "rows": Rows(units=2),
    "noise": Noise(multiplier=1.0),
}
"""The same for votes."""

STUDENT: dict[str, Any] = {"student": Student(shots=1, num_candidates=1, num_validation=1), "progress": False}


@dataclass(frozen=True)
class Room:
    """One of our doors to private calls."""

    name: str
    entries: tuple[str, ...]
    build: Callable[[Scene], Runnable[Any, Any]]
    needs: str = "logprobs"
    may_refuse: bool = True


def private_examples() -> PrivateExamples:
    """The private records, declared as people do."""
    return PrivateExamples(RECORDS, label_key="topic", labels=("card", "other"), public_size=12, unit_key="user")


def engine(scene: Scene, kind: str) -> LangChainBackend:
    """The adapter over the scene's model."""
    model = scene.model(kind)
    continuation: Any = "completion" if isinstance(unwrap(model)[0], BaseLLM) else "instruct"
    return LangChainBackend(model, max_top_k=3, continuation=continuation, max_concurrency=2, retry=ONCE)


def few_shot_prompt(scene: Scene) -> Runnable[Any, Any]:
    """`DPFewShotPromptTemplate`, made inside the chain; each input has a budget of its own."""
    backend = engine(scene, "chat")
    example = PromptTemplate.from_template("{text} -> {topic}")

    def options() -> dict[str, Any]:
        return {"llm": backend, "example_prompt": example, "suffix": "{input} ->", **OPTIONS, **_paid(scene, 8.0)}

    def shown(prompt: DPFewShotPromptTemplate) -> str:
        scene.objects += [prompt, prompt.partial(input="x"), backend]
        return prompt.format(input="x") + json.dumps(prompt.privacy_report)

    def make(_: Any) -> str:
        return shown(DPFewShotPromptTemplate.from_private_examples(_kept(scene), **options()))

    async def amake(_: Any) -> str:
        return shown(await DPFewShotPromptTemplate.afrom_private_examples(_kept(scene), **options()))

    return RunnableLambda(make, amake)


def synthesizer(scene: Scene) -> Runnable[Any, Any]:
    """`DemonstrationSynthesizer`, streaming its demonstrations into the chain."""
    backend = engine(scene, "completion")

    def made() -> DemonstrationSynthesizer:
        given = OPTIONS | _paid(scene, 8.0)
        found = DemonstrationSynthesizer.from_private_examples(_kept(scene), llm=backend, **given)
        scene.objects += [found, found.result, backend]
        return found

    def write(inputs: Iterator[Any]) -> Iterator[Any]:
        for _ in inputs:
            yield from made().stream()

    async def awrite(inputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for _ in inputs:
            async for demonstration in made().astream():
                yield demonstration

    return RunnableGenerator(write, awrite)


def synthesizer_with_words(scene: Scene) -> Runnable[Any, Any]:
    """`DemonstrationSynthesizer` that releases words before its texts, and shows both.

    One unit writes a canary, which passes as a word with a chance of 2e-9.
    """
    backend = engine(scene, "completion")

    def made() -> DemonstrationSynthesizer:
        records = [{"text": "my velda card", "user": f"{RECORD}-{number}"} for number in range(7)]
        records += [{"text": f"my {RECORD}", "user": "alone"}]
        private = PrivateExamples(records, public_size=8, unit_key="user")
        writing = OPTIONS["decoding"].replace(released_words=True)
        options = OPTIONS | {"epsilon": 36.0, "noise": Noise(multiplier=2.0, delta=4e-9), "decoding": writing}
        options["rows"] = Rows(units=8)  # all of them
        found = DemonstrationSynthesizer.from_private_examples(private, llm=backend, **options, **_paid(scene))
        scene.objects += [private, found, found._items, found._trees, found.plan, backend]
        return found

    def told(found: DemonstrationSynthesizer) -> str:
        scene.objects += [found.words, found.report, found.result]
        return found.result.to_json()

    def write(inputs: Iterator[Any]) -> Iterator[Any]:
        for _ in inputs:
            found = made()
            yield from found.stream()
            yield told(found)

    async def awrite(inputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for _ in inputs:
            found = made()
            async for demonstration in found.astream():
                yield demonstration
            yield told(found)

    return RunnableGenerator(write, awrite)


def engine_rows(scene: Scene) -> Runnable[Any, Any]:
    """One session of the engine: private prompts in, rows out; only their shape goes on."""
    backend = engine(scene, "completion")

    def score(_: Any) -> str:
        session = backend.open([record["text"] for record in RECORDS[:2]], [])
        scene.objects += [backend, session]
        return str(session.score(DOMAIN).shape)

    async def ascore(_: Any) -> str:
        session = backend.open([record["text"] for record in RECORDS[:2]], [])
        scene.objects += [backend, session]
        return str((await session.ascore(DOMAIN)).shape)

    return RunnableLambda(score, ascore)


def one_call(scene: Scene) -> Runnable[Any, Any]:
    """The private call itself, for two records."""
    model = silence(scene.model("text"))

    def requests() -> list[Request]:
        render = _messages if model.is_chat else str
        return [Request(OpaqueValue(record["text"]), render, {"max_tokens": 1}) for record in RECORDS[:2]]

    def ask(_: Any) -> str:
        replies = [model.ask(request, retry=ONCE) for request in requests()]
        scene.objects += [model, *requests(), *replies, *(reply.answer for reply in replies)]
        return "asked"

    async def aask(_: Any) -> str:
        replies = [await model.aask(request, retry=ONCE) for request in requests()]
        scene.objects += [model, *requests(), *replies, *(reply.answer for reply in replies)]
        return "asked"

    return RunnableLambda(ask, aask)


def text_votes(scene: Scene) -> Runnable[Any, Any]:
    """The engine of models that write text only."""
    return _chooser(scene, TextVoteBackend(scene.model("text"), max_concurrency=2, retry=ONCE))


def decisions(scene: Scene) -> Runnable[Any, Any]:
    """The engine of decision models."""
    return _chooser(scene, DecisionsBackend(scene.model("decisions"), max_concurrency=2, retry=ONCE))


def _chooser(scene: Scene, backend: Any) -> Runnable[Any, Any]:
    """Private prompts in, votes out; only their shape goes on."""

    def vote(_: Any) -> str:
        scene.objects.append(backend)
        return str(backend.score_choices([record["text"] for record in RECORDS[:2]], CHOICES).shape)

    async def avote(_: Any) -> str:
        scene.objects.append(backend)
        return str((await backend.ascore_choices([record["text"] for record in RECORDS[:2]], CHOICES)).shape)

    return RunnableLambda(vote, avote)


def answer_rows(scene: Scene) -> Runnable[Any, Any]:
    """Answers in the model's own words, embedded; only the shape of the rows goes on."""
    backend = TextVoteBackend(scene.model("text"), max_concurrency=2, retry=ONCE)
    embeddings = SilentEmbeddings(LeakyEmbeddings(), max_concurrency=2, retry=ONCE)
    source = AnswerRows.embedded(backend, embeddings, max_tokens=4)
    prompts = [record["text"] for record in RECORDS[:2]]

    def answer(_: Any) -> str:
        ask = source.ask(prompts)
        rows = ask.run()
        scene.objects += [source, embeddings, ask, rows]
        return str(rows.take().shape)

    async def aanswer(_: Any) -> str:
        ask = source.ask(prompts)
        rows = await ask.arun()
        scene.objects += [source, embeddings, ask, rows]
        return str(rows.take().shape)

    return RunnableLambda(answer, aanswer)


def voting(scene: Scene) -> Runnable[Any, Any]:
    """`DPVotingRunnable` over a model's top tokens, with a query's noisy votes."""
    return _voter(scene, engine(scene, "chat"), answers=LabelAnswers(calibrate=True, scores=True))


def voting_by_text(scene: Scene) -> Runnable[Any, Any]:
    """The same over what a model writes."""
    return _voter(
        scene, TextVoteBackend(scene.model("text"), max_concurrency=2, retry=ONCE), answers=LabelAnswers(votes="text")
    )


def voting_by_decisions(scene: Scene) -> Runnable[Any, Any]:
    """The same over a decision model's probabilities."""
    backend = DecisionsBackend(scene.model("decisions"), max_concurrency=2, retry=ONCE)
    return _voter(scene, backend, answers=LabelAnswers(votes="soft", abstain_below=0.5))


def voting_on_a_stream(scene: Scene) -> Runnable[Any, Any]:
    """The same of the records of the last days: each answer asks for the newest run first."""
    made = datetime.now(UTC) - timedelta(days=3)
    stream = PrivateStream(
        dataset_id="stream",
        time_key="made",
        unit_key="user",
        public_size={7: 2},
        label_key="topic",
        labels=("card", "other"),
    )
    stream.extend({**record, "made": made} for record in RECORDS[:2])
    found = _voter(scene, engine(scene, "chat"), private=stream.rolling(7, every=7), per="30 days")
    scene.objects.append(stream)
    return found


def voting_in_a_process(scene: Scene) -> Runnable[Any, Any]:
    """The same over a model in a process of its own, which what watches this one neither sees nor stops."""
    mark = Path(_FOLDER.name, "was asked")
    process = _process(tuple(sorted(os.environ)), subprocess.Popen.__init__, str(mark))
    mark.unlink(missing_ok=True)
    scene.objects += [process, process._client, process._client.connected()]

    def asked(answer: Any) -> Any:
        CALLS.extend(["private"] * mark.exists())
        return answer

    backend: Any = as_choice_backend(process)
    return _voter(scene, backend, answers=LabelAnswers(calibrate=True, scores=True)) | RunnableLambda(asked)


_FOLDER = TemporaryDirectory()


@functools.lru_cache(maxsize=1)
def _process(environment: tuple[str, ...], starter: Any, mark: str) -> PrivateProcess:
    """One process while nothing that could be inherited, and nobody who watches its start, changes."""
    del environment, starter
    return PrivateProcess("tests.leaks.models:filed", path=mark, retry=ONCE)


def _voter(scene: Scene, backend: Any, **options: Any) -> Runnable[Any, Any]:
    kept = InMemoryByteStore()
    named = {"component": "votes", "serving": Serving(memo=StoreMemo(kept))}
    private, per = options.pop("private", None) or _few(scene), options.pop("per", "life")
    given = {**VOTED, **named, **_paid(scene, per=per), **options}
    found: Any = DPVotingRunnable.from_private_examples(private, llm=backend, **given).with_receipts()
    scene.objects += [found, found.task, found.rows, found.tenants, found.plan, backend, found.memo, kept.store]
    scene.objects += [found.private, found.runs]
    return _answering(scene, found)


def served(scene: Scene) -> Runnable[Any, Any]:
    """A voter behind `dpicl serve`: a question goes in over HTTP, and everything that comes back goes on."""
    from langchain_dpicl.budget.metrics import DPICLMetrics
    from langchain_dpicl.service.service import OperatorView, RefusalLog
    from langchain_dpicl.service.web import Running, create_app

    service, folder = _service(scene), Path(_FOLDER.name)
    metrics, refusals = DPICLMetrics(service.budget), RefusalLog(folder / "refusals.jsonl")
    view = OperatorView([service.budget.budget], refusals, service.caps())
    service._metrics, service._on_refusal = metrics, refusals.add
    running = Running(service, metrics, service.tenants, view, lambda: None)
    app = create_app(running)
    scene.objects += [running, app.state]

    async def ask(_: Any) -> str:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            headers = {"Authorization": f"Bearer {_KEY}"}
            answer = await client.post("/ask", json={"question": "one ?"}, headers=headers)
            shown = [
                await client.get(path, headers=headers)
                for path in ("/budget", "/standing", "/metrics", "/openapi.json")
            ]
        scene.saw(*(each.text for each in (answer, *shown)))
        return _whole(answer.status_code, answer.text)

    return RunnableLambda(ask)


def agents_tools(scene: Scene) -> Runnable[Any, Any]:
    """The same behind `dpicl mcp`, asked by the official client in this process."""
    from mcp import Client

    from langchain_dpicl.service.service import Tenant
    from langchain_dpicl.service.tools import create_server

    service = _service(scene)
    server = create_server(service, Tenant("acme"))
    scene.objects += [server]

    async def ask(_: Any) -> str:
        async with Client(server) as client:
            listed, shown = await client.list_tools(), await client.call_tool("budget")
            found = await client.call_tool("ask", {"question": "one ?"})
        scene.saw(*(each.model_dump_json() for each in (listed, shown, found)))
        status = {"model_out": 503, "fault": 500}.get(found.structured_content.get("error"), 200)
        return _whole(status, found.model_dump_json())

    return RunnableLambda(ask)


_KEY = "key-of-the-leak-matrix"


def _service(scene: Scene) -> Any:
    from langchain_dpicl.service.service import Keys, Service, Tenant, digest

    backend = engine(scene, "chat")
    budget = PrivacyBudgetCallbackHandler(epsilon=40.0, delta=1e-4)
    given = {**VOTED, "answers": LabelAnswers(calibrate=True, scores=True), "budget": budget}
    found = DPVotingRunnable.from_private_examples(_few(scene), llm=backend, **given)
    service = Service(budget, {"ask": found}, tenants=Keys({digest(_KEY): Tenant("acme")}))
    scene.objects += [service, service.tenants, budget, found, found.tenants, backend]
    return service


def _whole(status: int, text: str) -> str:
    """Returns what was answered, or raises what a refusal stands for."""
    if status == 500:
        raise UnsilencableModelError("the service could not ask its model")
    if status != 200:
        raise ModelCallError("the service gave no answer")
    return text


def free_form_by_embeddings(scene: Scene) -> Runnable[Any, Any]:
    """`DPFreeFormRunnable`: private answers are embedded; candidates are given."""
    embeddings = SilentEmbeddings(LeakyEmbeddings(), max_concurrency=2, retry=ONCE)
    writer = scene.model("text")
    return _free_form(
        scene, EmbeddingAnswers(embeddings=embeddings, candidates=tuple(CHOICES), writer=writer, max_tokens=4)
    )


def free_form_by_keywords(scene: Scene) -> Runnable[Any, Any]:
    """The same by keywords, from which the public model writes an answer."""
    return _free_form(scene, _keywords(scene))


def _keywords(scene: Scene) -> KeywordAnswers:
    return KeywordAnswers(keywords=("my", "card", "other"), num_keywords=2, writer=scene.model("text"), max_tokens=4)


def _free_form(scene: Scene, answers: EmbeddingAnswers | KeywordAnswers) -> Runnable[Any, Any]:
    """Public calls are made in the open, by the same kind of model: what they say is public."""
    backend = TextVoteBackend(scene.model("text"), max_concurrency=2, retry=ONCE)
    given = {**VOTED, "task": VOTED["task"].replace(labels=None), **_paid(scene)}
    found = DPFreeFormRunnable.from_private_examples(_few(scene), llm=backend, answers=answers, **given)
    scene.objects += [found, found.maker, found.maker.space, found.maker.public, found.owed, found.tenants, found.plan]
    scene.objects.append(backend)
    return _answering(scene, found.with_receipts())


def labels(scene: Scene) -> Runnable[Any, Any]:
    """`PromptPATELabeler`, its selector and their files; the noisy votes are released with the labels.

    Blocking, one secret sample is kept for all inputs; awaited, each input has its own.
    """
    backend = engine(scene, "chat")

    def made(folder: Path) -> PromptPATELabeler:
        given = _labelling(scene) | {"llm": backend, "checkpoint": folder / "checkpoint.json"}
        found = PromptPATELabeler.from_private_examples(_few(scene), **given)
        scene.objects += [found, found._teachers, found.inputs, found.task, found.rows, found.plan, backend]
        return found

    def prompt(selector: PromptPATEExampleSelector) -> FewShotPromptTemplate:
        example = PromptTemplate.from_template(QUERIES["example_prompt"])
        found = FewShotPromptTemplate(
            example_selector=selector, example_prompt=example, suffix="{input} ->", input_variables=["input"]
        )
        scene.objects += [found, selector, selector.pool, selector.student, selector._strategy, selector.rejected]
        return found

    def told(labeler: PromptPATELabeler, selector: PromptPATEExampleSelector, folder: Path, text: str) -> str:
        selector.save(folder / "pool.json")
        scene.objects += [getattr(labeler._teachers, "_opened", None), selector.pool, *selector.pool.entries]
        return text + json.dumps(selector.privacy_report)

    def label(_: Any) -> str:
        with _folder_seen(scene) as folder:
            labeler = made(folder)
            selector = PromptPATEExampleSelector.from_run(labeler, **STUDENT)
            text = prompt(selector).format(input="x")
            selector.add_example({"text": "three ?"})
            return told(labeler, selector, folder, text)

    async def alabel(_: Any) -> str:
        with _folder_seen(scene) as folder:
            labeler = made(folder)
            selector = await PromptPATEExampleSelector.afrom_run(labeler, **STUDENT)
            text = await prompt(selector).aformat(input="x")
            await selector.aadd_example({"text": "three ?"})
            return told(labeler, selector, folder, text)

    return RunnableLambda(label, alabel)


class CountedEmbeddings(LeakyEmbeddings):
    """Say that they were called with a private text: of this room nobody else is."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        CALLS.extend("private" for text in texts if RECORD in text)
        return super().embed_documents(texts)


_PLACES: dict[str, Workplace] = {}


def workplace(name: str) -> Workplace:
    """What a worker of `synthesizer_with_workers` calls: workers are of this process, where channels listen."""
    return _PLACES[name]


def synthesizer_with_workers(scene: Scene) -> Runnable[Any, Any]:
    """`DemonstrationSynthesizer` with an executor: orders and answers are pickled on their way."""
    backend = engine(scene, "completion")

    @contextmanager
    def made() -> Iterator[DemonstrationSynthesizer]:
        private = _kept(scene)
        with TemporaryDirectory() as folder:
            budget = PrivacyBudgetCallbackHandler.create(Path(folder) / "ledger.db", epsilon=8.0, delta=1e-4)
            memo = SQLiteMemo(Path(folder) / "memo.db")
            _PLACES[folder] = Workplace(backend, private=private, budget=budget, memo=memo)
            crew = Crew(WorkerFactory("tests.leaks.rooms:workplace", {"name": folder}))
            found = DemonstrationSynthesizer.from_private_examples(
                private, llm=backend, budget=budget, executor=crew, **OPTIONS
            )
            scene.objects += [found, _PLACES[folder], crew, found._elsewhere, budget, found.result]
            try:
                yield found
            finally:
                kept = [record.body for record in budget.budget._store.records(0)]
                scene.objects += [kept, Path(folder, "memo.db").read_bytes(), [hand.handle for hand in crew._hands]]
                _PLACES.pop(folder)
                budget.budget.close()

    def write(inputs: Iterator[Any]) -> Iterator[Any]:
        for _ in inputs:
            with made() as found:
                yield from found.stream()

    async def awrite(inputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for _ in inputs:
            with made() as found:
                async for demonstration in found.astream():
                    yield demonstration

    return RunnableGenerator(write, awrite)


def private_evolution(scene: Scene) -> Runnable[Any, Any]:
    """`PrivateEvolution`, streaming: the model is called in the open, and only the embeddings hear of the records."""

    def made() -> PrivateEvolution:
        embeddings = SilentEmbeddings(CountedEmbeddings(), max_concurrency=2, retry=ONCE)
        found = PrivateEvolution.from_private_examples(
            _few(scene),
            llm=scene.model("text"),
            embeddings=embeddings,
            epsilon=40.0,
            shots_per_label=1,
            evolution=Evolution(rounds=2, num_survivors=2, num_variations=1, candidates=("one ?", "two ?")),
            noise=Noise(multiplier=2.0),
            **_paid(scene),
        )
        scene.objects += [found, found._nearest, found._items, found._writer, found.plan, embeddings]
        return found

    def write(inputs: Iterator[Any]) -> Iterator[Any]:
        for _ in inputs:
            yield from made().stream(progress=False)

    async def awrite(inputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for _ in inputs:
            async for demonstration in made().astream(progress=False):
                yield demonstration

    return RunnableGenerator(write, awrite)


def documents(scene: Scene) -> Runnable[Any, Any]:
    """`DocumentSynthesizer`, streaming: a histogram that asks no model, then the texts of its one topic."""
    backend = engine(scene, "completion")

    def made() -> DocumentSynthesizer:
        private = PrivateExamples(RECORDS, public_size=12, unit_key="user")
        found = DocumentSynthesizer.from_private_examples(
            private,
            llm=backend,
            topics=Topics(("boat", "card"), 1, min_units=2),
            documents_per_topic=1,
            max_tokens=2,
            epsilon=60.0,
            rows=Rows(units=12),
            decoding=Decoding(candidates=3),
            **_paid(scene, 80.0),
        )
        scene.objects += [found, found._script, found._private, private, backend]
        return found

    def told(found: DocumentSynthesizer) -> str:
        released = found.result
        scene.objects += [released, released.documents, released.as_retriever(), found.topics, found.counts]
        return released.to_json()

    def write(inputs: Iterator[Any]) -> Iterator[Any]:
        for _ in inputs:
            found = made()
            yield from (document.page_content for document in found.stream(progress=False))
            yield told(found)

    async def awrite(inputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for _ in inputs:
            found = made()
            async for document in found.astream(progress=False):
                yield document.page_content
            yield told(found)

    return RunnableGenerator(write, awrite)


def discovery(scene: Scene) -> Runnable[Any, Any]:
    """`ValueDiscovery` and `UnitCounter`, then votes of the units that they declared again: counts ask no model.

    One unit's topic is a canary. Its count passes the threshold with a chance of 1e-9.
    """
    backend = engine(scene, "chat")
    records = [*RECORDS, {"text": "my", "topic": RECORD, "user": "alone"}]

    def counting() -> tuple[PrivateExamples, dict[str, Any]]:
        private = PrivateExamples(records, fields=("topic",), public_size=12, unit_key="user")
        scene.objects.append(private)
        return private, _paid(scene, 80.0)

    def voter(found: ReleasedCounts, split: PrivateExamples, given: dict[str, Any]) -> Runnable[Any, Any]:
        scene.objects += [found, split]
        return DPVotingRunnable.from_private_examples(split, llm=backend, **VOTED, **given).with_receipts()

    def told(counts: ReleasedCounts, answer: Any) -> str:
        scene.objects += [counts, answer, answer.receipt]
        return str(answer) + counts.to_json()

    def count(_: Any, config: RunnableConfig) -> str:
        private, given = counting()
        noise = Noise(delta=1e-5)
        finder = ValueDiscovery.from_private_examples(private, field="topic", epsilon=20.0, noise=noise, **given)
        scene.objects.append(finder)
        found = finder.run(config=scene.given_config)
        split = found.redeclare(private, public_size={"card": 2})
        counter = UnitCounter.from_private_examples(split, epsilon=10.0, noise=noise, **given)
        scene.objects.append(counter)
        counts = counter.run(config=scene.given_config)
        return told(counts, voter(found, split, given).invoke("one ?", config))

    async def acount(_: Any, config: RunnableConfig) -> str:
        private, given = counting()
        noise = Noise(delta=1e-5)
        finder = await ValueDiscovery.afrom_private_examples(private, field="topic", epsilon=20.0, noise=noise, **given)
        scene.objects.append(finder)
        found = await finder.arun(config=scene.given_config)
        split = found.redeclare(private, public_size={"card": 2})
        counter = await UnitCounter.afrom_private_examples(split, epsilon=10.0, noise=noise, **given)
        scene.objects.append(counter)
        counts = await counter.arun(config=scene.given_config)
        return told(counts, await voter(found, split, given).ainvoke("one ?", config))

    return RunnableLambda(count, acount)


def words(scene: Scene) -> Runnable[Any, Any]:
    """`WordDiscovery` with pairs, then votes of other units: words ask no model.

    One unit writes a canary, which passes with a chance of 1e-9.
    """
    backend = engine(scene, "chat")

    def made() -> WordDiscovery:
        records = [{"text": "velda hums", "user": f"{RECORD}-{number}"} for number in range(60)]
        records += [{"text": f"velda {RECORD}", "user": "alone"}]
        private = PrivateExamples(records, public_size=60, unit_key="user")
        noise = Noise(delta=4e-9)
        found = WordDiscovery.from_private_examples(private, epsilon=20.0, noise=noise, pairs=True, **_paid(scene))
        scene.objects += [private, found, found._items, found.plan]
        return found

    def voter() -> Runnable[Any, Any]:
        return DPVotingRunnable.from_private_examples(_few(scene), llm=backend, **VOTED, **_paid(scene)).with_receipts()

    def told(found: WordDiscovery, released: ReleasedWords, answer: Any) -> str:
        scene.objects += [released, released.groups, released.without(["hums"]), found._items, answer, answer.receipt]
        return str(answer) + released.to_json()

    def find(_: Any, config: RunnableConfig) -> str:
        found = made()
        return told(found, found.run(config=scene.given_config), voter().invoke("one ?", config))

    async def afind(_: Any, config: RunnableConfig) -> str:
        found = made()
        return told(found, await found.arun(config=scene.given_config), await voter().ainvoke("one ?", config))

    return RunnableLambda(find, afind)


class NearEmbeddings(LeakyEmbeddings):
    """Find everything near to everything, and are overheard at it."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        CALLS.extend("private" for text in texts if RECORD in text)
        return [[1.0, 0.0] for _ in super().embed_documents(texts)]


def _retrieving(scene: Scene) -> dict[str, Any]:
    """Options of components that answer from documents: every document is near, and never exhausted."""
    embeddings = SilentEmbeddings(NearEmbeddings(), max_concurrency=2, retry=ONCE)
    scene.objects.append(embeddings)
    near = Retrieval(embeddings, similarity_threshold=0.5, participations=9, slots=2)
    return {"epsilon": 40.0, "noise": Noise(multiplier=1.0), "retrieval": near, **_paid(scene)}


def votes_of_documents(scene: Scene) -> Runnable[Any, Any]:
    """`DPRetrievalVotingRunnable`, with its noisy votes; documents are embedded on the first query."""
    backend = engine(scene, "chat")
    found = DPRetrievalVotingRunnable.from_private_examples(
        _few(scene),
        llm=backend,
        task=VOTED["task"],
        answers=LabelAnswers(calibrate=True, scores=True),
        **_retrieving(scene),
    )
    return _retrieved(scene, found, backend)


def texts_of_documents(scene: Scene) -> Runnable[Any, Any]:
    """`DPRetrievalFreeFormRunnable` by keywords, from which the public model writes an answer."""
    backend = TextVoteBackend(scene.model("text"), max_concurrency=2, retry=ONCE)
    given = {"answers": _keywords(scene), "task": VOTED["task"].replace(labels=None), **_retrieving(scene)}
    found = DPRetrievalFreeFormRunnable.from_private_examples(_few(scene), llm=backend, **given)
    return _retrieved(scene, found, backend)


def _retrieved(scene: Scene, found: Any, backend: Any) -> Runnable[Any, Any]:
    scene.objects += [found, found.filter, found.filter.texts, found.plan, found.tenants, backend]

    def opened(answer: Any) -> str:
        scene.objects += [answer, answer.receipt, found.filter.participants, found.budget.report()]
        return str(answer)

    return found.with_receipts() | RunnableLambda(opened)


def evaluation(scene: Scene) -> Runnable[Any, Any]:
    """`dp_evaluate`: the chain's model is asked about every record; its noisy counts go on."""
    chain = PromptTemplate.from_template("{text} ->") | scene.model("text")

    def opened(found: Any) -> str:
        scene.objects += [found, found.report, found.accuracy]
        return str(found)

    def measure(_: Any) -> str:
        given = {"epsilon": 8.0, **_paid(scene, 8.0)}
        return opened(dp_evaluate(chain, _kept(scene), evaluators=Exact(), **given))

    async def ameasure(_: Any) -> str:
        given = {"epsilon": 8.0, **_paid(scene, 8.0)}
        return opened(await dp_aevaluate(chain, _kept(scene), evaluators=Exact(), **given))

    return RunnableLambda(measure, ameasure)


def choice(scene: Scene) -> Runnable[Any, Any]:
    """`dp_choose` on one half and `dp_evaluate` with a judge on the other: only a name and noisy counts go on."""
    model = scene.model("text")
    chains = {name: PromptTemplate.from_template(name + " {text} ->") | model for name in ("one", "two")}
    judge = Judge(PromptTemplate.from_template("{text} {answer} ->") | model)

    def opened(*found: Any) -> str:
        scene.objects += [*found, *(one.report for one in found)]
        return " ".join(map(str, found))

    def given() -> dict[str, Any]:
        return {"private": _kept(scene), **_paid(scene, 16.0)}

    def measure(_: Any) -> str:
        terms = given()
        best = dp_choose(chains, evaluator=judge, epsilon=8.0, part="choose", **terms)
        return opened(best, dp_evaluate(best.chain, evaluators=judge, part="test", **terms))

    async def ameasure(_: Any) -> str:
        terms = given()
        best = await dp_achoose(chains, evaluator=judge, epsilon=8.0, part="choose", **terms)
        return opened(best, await dp_aevaluate(best.chain, evaluators=judge, part="test", **terms))

    return RunnableLambda(measure, ameasure)


def _labelling(scene: Scene) -> dict[str, Any]:
    options: dict[str, Any] = {
        "epsilon": 40.0,
        "max_queries": 4,
        "public_inputs": ["one ?", "two ?"],
        "task": FewShotTask("{text} -> {topic}", "{input} ->", labels=tuple(CHOICES)),
        "rows": Rows(units=2, redraw_every=None if scene.is_async else "run"),
        "noise": Noise("gaussian", multiplier=1.0),
        "answers": LabelAnswers(abstain_below="never"),
    }
    return options | _paid(scene)


@contextmanager
def _folder_seen(scene: Scene) -> Iterator[Path]:
    """A folder whose files are overheard, those of a run that failed as well."""
    with TemporaryDirectory() as name:
        try:
            yield Path(name)
        finally:
            scene.saw(*(path.read_text() for path in sorted(Path(name).iterdir())))


def _answering(scene: Scene, component: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """The component itself, and a step that keeps what it answers: receipts and the report are looked at as well."""

    def keep(answer: Any) -> str:
        scene.objects += [answer, answer.receipt]
        return str(answer)

    return component | RunnableLambda(keep)


def _paid(scene: Scene, epsilon: float = 40.0, per: str = "life") -> dict[str, Any]:
    """A budget of its own, where a channel has a config for the component in that config."""
    budget = PrivacyBudgetCallbackHandler(epsilon=epsilon, delta=1e-4, per=per)
    scene.objects.append(budget)
    config = scene.given_config
    return {"budget": budget if config is None else {**config, "callbacks": [*config["callbacks"], budget]}}


def _few(scene: Scene) -> PrivateExamples:
    private = PrivateExamples(RECORDS[:2], label_key="topic", labels=("card", "other"), public_size=2, unit_key="user")
    scene.objects.append(private)
    return private


def _messages(text: str) -> list[Any]:
    return [HumanMessage(text)]


def _kept(scene: Scene) -> PrivateExamples:
    private = private_examples()
    scene.objects.append(private)
    return private


TWO_WAYS = ("invoke", "abatch")
"""For rooms that share all their entry points with another one: one that blocks, one that awaits."""

AWAITED = ("ainvoke", "abatch")
"""For rooms that a server calls, which awaits what it is asked."""

ONE_INPUT_EACH = ("stream", "ainvoke")
"""The same for a room that makes many calls for an input."""

ROOMS = (
    Room("few-shot prompt", ("invoke", "ainvoke", "batch", "abatch"), few_shot_prompt),
    Room("synthesizer", ("stream", "astream"), synthesizer),
    Room("synthesizer with words", ("stream", "astream"), synthesizer_with_words),
    Room("synthesizer with workers", ("stream", "astream"), synthesizer_with_workers),
    Room("engine", ENTRIES, engine_rows),
    Room("one call", ENTRIES, one_call, needs="text"),
    Room("text votes", ENTRIES, text_votes, needs="text"),
    Room("decisions", ENTRIES, decisions, needs="decisions"),
    Room("answer rows", TWO_WAYS, answer_rows, needs="text"),
    Room("voting", ENTRIES, voting),
    Room("voting on a stream", TWO_WAYS, voting_on_a_stream),
    Room("voting in a process", TWO_WAYS, voting_in_a_process, needs="", may_refuse=False),
    Room("voting by text", TWO_WAYS, voting_by_text, needs="text"),
    Room("voting by decisions", TWO_WAYS, voting_by_decisions, needs="decisions"),
    Room("voting over HTTP", AWAITED, served),
    Room("voting by agents", AWAITED, agents_tools),
    Room("free form by embeddings", ENTRIES, free_form_by_embeddings, needs="text"),
    Room("free form by keywords", TWO_WAYS, free_form_by_keywords, needs="text"),
    Room("votes of documents", TWO_WAYS, votes_of_documents),
    Room("texts of documents", TWO_WAYS, texts_of_documents, needs="text"),
    Room("labels", ONE_INPUT_EACH, labels),
    Room("discovery", ONE_INPUT_EACH, discovery),
    Room("words", ONE_INPUT_EACH, words),
    Room("documents", ("stream", "astream"), documents),
    Room("evaluation", TWO_WAYS, evaluation, needs="text"),
    Room("choice", TWO_WAYS, choice, needs="text"),
    Room("private evolution", ("stream", "astream"), private_evolution, needs="text"),
)
