"""Calls with slips of the pen: each has to be an error for type checkers, or its comment is one."""
# ruff: noqa: B018

from langchain_dpicl import (
    ChatEmbedded,
    DemonstrationSynthesizer,
    DPFewShotPromptTemplate,
    DPVotingRunnable,
    EmbeddedLLM,
    Noise,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    PromptPATELabeler,
    Rows,
    UnitCounter,
)
from langchain_dpicl.options import LogitNoise
from tests.programs.common import examples, handler

p, llm, b = examples("x"), EmbeddedLLM(), handler()
DPVotingRunnable.from_private_examples(p, llm=llm, budget=b, epsilon=1.0, max_querys=5)  # pyright: ignore[reportCallIssue]
DPVotingRunnable.from_private_examples(p, llm=llm, budget=b, epsilon=1.0, max_queries=5, rows=Rows(slot=20))  # pyright: ignore[reportCallIssue]
DPVotingRunnable.from_private_examples(
    p,
    llm=llm,
    budget=b,
    epsilon=1.0,
    max_queries=5,
    noise=LogitNoise("clip_and_blend"),  # pyright: ignore[reportArgumentType]
)
DPVotingRunnable.from_private_examples(
    p,
    llm=llm,
    budget=b,
    epsilon=1.0,
    max_queries=5,
    noise=Noise("laplace"),  # pyright: ignore[reportArgumentType]
)
DPVotingRunnable.from_private_examples(p, llm=llm, budget=b, epsilon="1", max_queries=5)  # pyright: ignore[reportArgumentType]
DPVotingRunnable.from_private_examples(p, llm=llm, max_queries=5).with_receipts().invoke("x").lable  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
DPVotingRunnable.from_private_examples(p, llm=llm, max_queries=5).invoke("x").label  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
DPFewShotPromptTemplate.from_private_examples(
    p,
    llm=llm,
    budget=b,
    epsilon=1.0,
    example_prompt="{text}",
    suffix="{input}",
    max_tokns=12,  # pyright: ignore[reportCallIssue]
)
DemonstrationSynthesizer.from_private_examples(p, llm=llm, budget=b, epsilon=1.0, noise="gausian")  # pyright: ignore[reportArgumentType]
DemonstrationSynthesizer.from_private_examples(p, llm=llm, budget=b, epsilon=1.0).run().exmples  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
PromptPATELabeler.from_private_examples(p, llm=llm, public_inputs=[1, 2])  # pyright: ignore[reportArgumentType]
DPVotingRunnable.from_private_examples([{"text": "x"}], llm=llm, max_queries=5)  # pyright: ignore[reportArgumentType]
PrivateExamples([{"text": "x"}], lable_key="queue", public_size=500)  # pyright: ignore[reportCallIssue]
PrivacyBudgetCallbackHandler(epsilon=1.0)  # pyright: ignore[reportCallIssue]
ChatEmbedded(max_tokns=3)  # pyright: ignore[reportCallIssue]
DPVotingRunnable.from_private_examples(p, llm=llm, max_queries=5).batch(["x"])[0].label  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
UnitCounter.from_private_examples(p, budget=b, epsilon=1.0, noise=1.0)  # pyright: ignore[reportArgumentType]
