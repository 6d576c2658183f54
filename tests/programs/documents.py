"""A store of synthetic documents."""

from langchain_core.documents import Document

from langchain_dpicl import Decoding, DocumentSynthesizer, EmbeddedLLM, PrivateExamples, Rows
from langchain_dpicl.options import Topics
from tests.programs.common import TICKETS, handler

notes = PrivateExamples([t["text"] for t in TICKETS], public_size=300, dataset_id="p07")
run = DocumentSynthesizer.from_private_examples(
    notes,
    llm=EmbeddedLLM(),
    topics=Topics(("card", "transfer", "boat"), 2, min_units=40),
    documents_per_topic=1,
    max_tokens=5,
    budget=handler(),
    epsilon=6.0,
    rows=Rows(units=10),
    decoding=Decoding(candidates=20),
)
documents: list[Document] = list(run.stream(progress=False))
print([d.page_content for d in documents], run.result.topics)
