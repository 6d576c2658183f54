"""PromptPATE with the paper's test, then a selector for a stock template."""

from langchain_core.prompts import FewShotPromptTemplate, PromptTemplate

from langchain_dpicl import (
    DPVotingRunnable,
    EmbeddedLLM,
    FewShotTask,
    LabelAnswers,
    PromptPATEExampleSelector,
    PromptPATELabeler,
    Rows,
)
from langchain_dpicl.options import ConfidentGNMax, Student
from tests.programs.common import examples, handler

task = FewShotTask("Ticket: {text}\nQueue: {queue}", "Ticket: {input}\nQueue:")
inputs = ["where is my card", "card declined", "send money", "transfer abroad", "my card", "the transfer"]
labeler = PromptPATELabeler.from_private_examples(
    examples("p05"),
    llm=EmbeddedLLM(),
    public_inputs=inputs,
    budget=handler(),
    epsilon=4.0,
    task=task,
    rows=Rows(slots=20, shots=4, redraw_every="run"),
    noise="gumbel",
    answers=LabelAnswers(abstain_below="never", calibrate=False),
)
selector = PromptPATEExampleSelector.from_run(labeler, student=Student(shots=2, num_candidates=3), progress=False)
prompt = FewShotPromptTemplate(
    example_selector=selector,
    example_prompt=PromptTemplate.from_template("{text} -> {queue}"),
    suffix="{input} ->",
    input_variables=["input"],
)
print(prompt.format(input="lost card"))
print(labeler.result.labels, labeler.is_finished, ConfidentGNMax(10.0, 5.0, 3.0).to_dict())
voter = (
    DPVotingRunnable  # the same task serves a voter: DPVotingRunnable.from_private_examples(private, task=task, ...)
)
