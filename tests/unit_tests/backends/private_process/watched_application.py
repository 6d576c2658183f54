"""An application with OpenTelemetry's OpenAI instrumentation on, which stays in a process: run as a program.

Prints as JSON: what a model of this process is refused with; then, for a `PrivateProcess` of the same model, how many
private requests reached the provider, who is named as the one that saw them, and whether spans hold a canary.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain.chat_models import init_chat_model

from langchain_dpicl import DPVotingRunnable, FewShotTask, Noise, PrivacyBudgetCallbackHandler, PrivateExamples, Rows
from langchain_dpicl.backends import PrivateProcess
from langchain_dpicl.exceptions import UnsilencableModelError
from tests.canary import RECORD, canaries_in
from tests.leaks.channels.telemetry import instrument, openai_instrumentor, tracing
from tests.loopback_provider import provider

NAME = "openai:loopback"


def voter(llm: Any) -> DPVotingRunnable:
    private = PrivateExamples(
        [{"text": f"the card {RECORD} {number}", "topic": "card"} for number in range(4)],
        label_key="topic",
        labels=("card", "other"),
        public_size=4,
    )
    return DPVotingRunnable.from_private_examples(
        private,
        llm=llm,
        budget=PrivacyBudgetCallbackHandler(epsilon=40.0, delta=1e-4),
        task=FewShotTask("{text} -> {topic}", "{input} ->", labels=(" card", " other")),
        epsilon=20.0,
        max_queries=1,
        rows=Rows(slots=4, shots=1),
        noise=Noise(mechanism="gumbel", multiplier=1.0),
    )


def main() -> None:
    instrument(openai_instrumentor)
    with provider() as served:
        options = {"base_url": served.url, "api_key": "none", "max_retries": 0}
        model = init_chat_model(NAME, **options)
        model.invoke(RECORD)
        exporter = tracing()[1]
        naive = str([dict(span.attributes) for span in exporter.get_finished_spans()])
        exporter.clear()
        told: dict[str, Any] = {"is_watched": bool(canaries_in(naive))}
        try:
            voter(model)
        except UnsilencableModelError as error:
            told["refused"] = str(error)
        before = len(served.received)
        with PrivateProcess(NAME, **options) as llm:
            voting = voter(llm)
            told["answer"] = str(voting.invoke("a card"))
            told["seen_by"] = voting.budget.report().to_dict()["shares"][0]["components"][0]["public"]["seen_by"]
        told["private"] = sum(RECORD in request.raw.decode() for request in served.received[before:])
        told["address"] = served.url.partition("//")[2].partition("/")[0]
        told["leaks"] = canaries_in(str([(span.name, dict(span.attributes)) for span in exporter.get_finished_spans()]))
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
