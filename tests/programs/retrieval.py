"""Private RAG: votes and keywords of the documents near a query."""

from langchain_dpicl import (
    DPRetrievalFreeFormRunnable,
    DPRetrievalVotingRunnable,
    EmbeddedLLM,
    KeywordAnswers,
    LabelAnswers,
    Retrieval,
)
from langchain_dpicl.backends import LocalEmbeddings
from tests.programs.common import examples, handler

near = Retrieval(LocalEmbeddings(), similarity_threshold=0.5, participations=20, slots=16)
voter = DPRetrievalVotingRunnable.from_private_examples(
    examples("p06"),
    llm=EmbeddedLLM(),
    retrieval=near,
    budget=handler(),
    epsilon=2.0,
    answers=LabelAnswers(calibrate=False, scores=True),
)
writer = DPRetrievalFreeFormRunnable.from_private_examples(
    examples("p06b"),
    llm=EmbeddedLLM(),
    retrieval=near.replace(slots=8),
    budget=handler(),
    epsilon=2.0,
    answers=KeywordAnswers(keywords=("card", "transfer", "lost", "abroad"), num_keywords=2, max_tokens=8),
)
print(voter.invoke("my card was declined"), "|", writer.invoke("what do people say about cards?"))
print(voter.with_receipts().invoke("the transfer failed").min_votes)
