"""Builds every component, for type checkers alone: several need models that are not here."""

from typing import Any

from langchain_dpicl import (
    Budget,
    Decoding,
    DemonstrationSynthesizer,
    DocumentSynthesizer,
    DPRetrievalVotingRunnable,
    DPVotingRunnable,
    EmbeddedLLM,
    FewShotTask,
    LabelAnswers,
    PrivateExamples,
    PromptDPSGD,
    PromptPATEExampleSelector,
    PromptPATELabeler,
    Retrieval,
    Rows,
    Serving,
)
from langchain_dpicl.backends import LocalEmbeddings
from langchain_dpicl.options import (
    ConfidentGNMax,
    LogitNoise,
    SoftPromptConfig,
    Student,
    Topics,
    TrainableModel,
    Training,
)
from langchain_dpicl.soft_prompts import PromptTask

WORDS = ("card", "transfer")


def build(p: PrivateExamples, b: Budget, m: EmbeddedLLM, lines: list[str]) -> Any:
    task = FewShotTask("{text}: {queue}", "{input}:", prefix="Classify.")
    DPVotingRunnable.from_private_examples(
        p,
        llm=m,
        budget=b,
        epsilon=2.0,
        max_queries=100,
        task=task,
        rows=Rows(slots=20, shots=4),
        noise="gaussian",
        answers=LabelAnswers(scores=True, abstain_below=0.3),
        serving=Serving(memo_size=32, tenant_max_queries=20),
        component="triage",
    )
    DemonstrationSynthesizer.from_private_examples(
        p,
        llm=m,
        budget=b,
        epsilon=4,
        instruction="Write a ticket.",
        max_tokens=40,
        shots_per_label=2,
        rows=Rows(slots=10, shots=2, redraw_every="run"),
        noise=LogitNoise("difference_clip", clip=4.0, free_below=0.3, max_private_tokens=10),
        decoding=Decoding(candidates="all", stop=("\n",)),
        checkpoint="run.jsonl",
    )
    run = PromptPATELabeler.from_private_examples(
        p,
        llm=m,
        public_inputs=lines,
        budget=b,
        epsilon=1,
        task=task,
        rows=Rows(units=200, redraw_every="run"),
        noise=ConfidentGNMax(120, 40, 20),
    )
    PromptPATEExampleSelector.from_run(run, student=Student(shots=4, seed=1))
    PromptDPSGD.from_private_examples(
        p,
        llm=TrainableModel("./roberta", device="cuda"),
        training=Training(expected_batch_size=1024, epochs=20),
        budget=b,
        epsilon=3,
        task=PromptTask("sequence_classification", "{text}", labels=WORDS),
        prompt=SoftPromptConfig("prefix", 20),
        checkpoint="run",
    ).run()
    near = Retrieval(LocalEmbeddings(), similarity_threshold=0.5, participations=20, slots=16, balances="b.db")
    DPRetrievalVotingRunnable.from_private_examples(
        p,
        llm=m,
        retrieval=near,
        budget=b,
        epsilon=2,
        answers=LabelAnswers(calibrate=False, min_votes=3),
        component="faq",
    )
    return DocumentSynthesizer.from_private_examples(
        p,
        llm=m,
        topics=Topics(WORDS, 8, epsilon_share=0.3, min_units=40),
        documents_per_topic=4,
        rows=Rows(units=10),
        decoding=Decoding(candidates=50),
        budget=b,
        epsilon=6,
        max_tokens=40,
    )
