"""What the membership benchmark attacks: prompts of real records, and every component, built of the records given.

Each build makes a holder and a budget in memory of its own; nothing of one is left in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from _voting_task import Task
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import PromptTemplate

from langchain_dpicl import (
    Budget,
    DPFewShotPromptTemplate,
    DPFreeFormRunnable,
    DPVotingRunnable,
    EmbeddingAnswers,
    FewShotTask,
    LabelAnswers,
    PrivateExamples,
    PromptPATEExampleSelector,
    Rows,
)
from langchain_dpicl.audit.membership import (
    Claim,
    Record,
    Target,
    answer_target,
    few_shot_without_privacy,
    prompt_target,
    score_target,
)
from langchain_dpicl.baselines import demonstrations_without_privacy, label_votes_without_privacy
from langchain_dpicl.options import Student

MECHANISMS = ("gumbel", "gaussian", "permute_and_flip", "recentered_clip", "difference_clip", "clip_and_blend")
_MAX_TOKENS = 12
_SOFT_STEPS = 60


def worded(task: Task) -> Task:
    """Returns the task with each label called as it reads in a prompt: what is released shows labels as they are."""
    words = {label: texts[0].strip() for label, texts in zip(task.labels, task.texts, strict=True)}
    return replace(
        task,
        records=[{**record, "label": words[record["label"]]} for record in task.records],
        labels=tuple(words.values()),
        wording=replace(task.wording, shown={}),
    )


@dataclass(frozen=True)
class Systems:
    """Targets of one data set, one model and one claim.

    Attributes:
      task: the data set.
      llm: the model, for everything.
      records: size of the data set that a component is built of.
      epsilon: what components claim.
      delta: what components claim.
      rows: rows of a release: slots of up to four records, or, where texts are written, expected records.
      queries: most texts that one build is asked.
      public_inputs: texts that PromptPATE's teachers label.
    """

    task: Task
    llm: Any
    records: int
    epsilon: float
    delta: float
    rows: int
    queries: int
    public_inputs: tuple[str, ...]

    @property
    def claim(self) -> Claim:
        """What every component claims here."""
        return Claim(self.epsilon, self.delta, "add_remove")

    @property
    def _wording(self) -> dict[str, Any]:
        return {"example_prompt": self.task.wording.example_prompt, "suffix": self.task.wording.suffix}

    def real_prompt(self, *, votes: Any = None) -> Target:
        """Returns the prompt of real records: nothing is protected."""
        return few_shot_without_privacy(self.llm, labels=self.task.labels, **self._wording, votes=votes)

    def components(self) -> Iterator[Target]:
        """Yields every component that needs no local model."""
        for mechanism in MECHANISMS:
            yield self.released_prompt(mechanism)
        said = self.released_prompt(MECHANISMS[0], votes="text")
        yield said.named(f"{said.name}, text", self.claim)
        yield self.voting(with_scores=False)
        yield self.voting(with_scores=True)
        yield self.free_form()
        yield self.student()

    def without_noise(self) -> Iterator[Target]:
        """Yields what components do without their noise, as controls: NOT PRIVATE, and attacked the same way."""
        by_label = dict.fromkeys(self.task.labels, self.records // len(self.task.labels))

        def prompt(records: Sequence[Record]) -> DPFewShotPromptTemplate:
            written = demonstrations_without_privacy(
                self._holder(records, by_label),
                llm=self.llm,
                instruction=f"{self.task.title}.",
                max_tokens=_MAX_TOKENS,
                rows=Rows(units=min(self.rows, *by_label.values())),
            )
            example = PromptTemplate.from_template(self.task.wording.example_prompt)
            shown: dict[str, Any] = {"examples": list(written.examples), "example_prompt": example}
            return DPFewShotPromptTemplate(**shown, suffix=self.task.wording.suffix)

        def votes(records: Sequence[Record]) -> Callable[[Sequence[str]], list[dict[str, float]]]:
            def ask(texts: Sequence[str]) -> list[dict[str, float]]:
                holder = self._holder(records, self.records)
                how: dict[str, Any] = {"answers": LabelAnswers(votes="soft"), "rows": self._rows, **self._wording}
                totals = label_votes_without_privacy(holder, texts, llm=self.llm, **how).totals
                return [dict(zip(self.task.labels, row.tolist(), strict=True)) for row in totals]

            return ask

        yield prompt_target(prompt, self.llm, labels=self.task.labels, name="written prompt, no noise")
        yield score_target(votes, labels=self.task.labels, name="votes, no noise")

    def released_prompt(self, mechanism: str, *, votes: Any = None) -> Target:
        """Returns the released few-shot prompt of a mechanism, one demonstration a label."""
        by_label = dict.fromkeys(self.task.labels, self.records // len(self.task.labels))
        # One sample for a whole text is what this mechanism is for.
        redraw: Literal["run"] | None = "run" if mechanism == "recentered_clip" else None

        def make(records: Sequence[Record]) -> DPFewShotPromptTemplate:
            return DPFewShotPromptTemplate.from_private_examples(
                self._holder(records, by_label),
                llm=self.llm,
                **self._spending,
                example_prompt=PromptTemplate.from_template(self.task.wording.example_prompt),
                suffix=self.task.wording.suffix,
                instruction=f"{self.task.title}.",
                noise=mechanism,
                max_tokens=_MAX_TOKENS,
                rows=Rows(units=min(self.rows, *by_label.values()), redraw_every=redraw),
            )

        name = f"DPFewShotPromptTemplate, {mechanism}"
        return prompt_target(make, self.llm, labels=self.task.labels, votes=votes, name=name, claim=self.claim)

    @property
    def _rows(self) -> Rows:
        """Rows that see several records each: one alone would only say its label again."""
        return Rows(slots=self.rows, shots=min(4, self.records // self.rows), fill=1.0)

    def voting(self, *, with_scores: bool) -> Target:
        """Returns the voter, which answers with labels, or with noisy votes."""

        def make(records: Sequence[Record]) -> DPVotingRunnable:
            return DPVotingRunnable.from_private_examples(
                self._holder(records, self.records),
                llm=self.llm,
                **self._spending,
                **self._wording,
                rows=self._rows,
                max_queries=self.queries,
                answers=LabelAnswers(votes="soft" if with_scores else "hard", scores=with_scores),
            )

        read = {"reads": "noisy votes"} if with_scores else {}
        name = f"DPVotingRunnable, {'noisy votes' if with_scores else 'labels'}"
        return answer_target(make, labels=self.task.labels, name=name, claim=self.claim, **read)

    def free_form(self) -> Target:
        """Returns the free-form component, whose candidates are the labels."""

        def make(records: Sequence[Record]) -> DPFreeFormRunnable:
            return DPFreeFormRunnable.from_private_examples(
                self._holder(records, self.records),
                llm=self.llm,
                **self._spending,
                **self._wording,
                rows=self._rows,
                max_queries=self.queries,
                answers=EmbeddingAnswers(
                    embeddings=DeterministicFakeEmbedding(size=32), candidates=tuple(self.task.labels), max_tokens=4
                ),
            )

        return answer_target(make, labels=self.task.labels, name="DPFreeFormRunnable, embeddings", claim=self.claim)

    def student(self) -> Target:
        """Returns the student's prompt: public inputs with labels that private teachers released."""

        def make(records: Sequence[Record]) -> DPFewShotPromptTemplate:
            selector = PromptPATEExampleSelector.from_private_examples(
                self._holder(records, self.records),
                llm=self.llm,
                **self._spending,
                task=FewShotTask(self.task.wording.example_prompt, self.task.wording.suffix),
                public_inputs=self.public_inputs,
                rows=self._rows,
                answers=LabelAnswers(abstain_below="never"),
                student=Student(num_candidates=5),
            )
            return DPFewShotPromptTemplate(
                example_selector=selector,
                example_prompt=PromptTemplate.from_template(self.task.wording.example_prompt),
                suffix=self.task.wording.suffix,
            )

        return prompt_target(
            make, self.llm, labels=self.task.labels, name="PromptPATE, student's prompt", claim=self.claim
        )

    @property
    def _spending(self) -> dict[str, Any]:
        return {"budget": Budget(epsilon=self.epsilon, delta=self.delta), "epsilon": self.epsilon}

    def _holder(self, records: Sequence[Record], size: int | Mapping[str, int]) -> PrivateExamples:
        return PrivateExamples(
            [dict(record) for record in records],
            label_key="label",
            labels=self.task.labels,
            public_size=size,
            dataset_id="audit",
        )


def soft_prompts(
    path: Path, folder: Path, *, records: int, claim: Claim, steps: int = _SOFT_STEPS
) -> tuple[Target, Target]:
    """Returns a soft prompt trained without privacy and one under DP-SGD, attacked through its label probabilities.

    Args:
      path: the data set; how it reads is what bench-soft-prompts says.
      folder: the masked model that bench-soft-prompts made.
      records: records that a prompt is trained on.
      claim: of the second.
      steps: of training.
    """
    import torch
    import transformers
    from _soft_task import soft_task

    from langchain_dpicl import PromptDPSGD, SoftPrompt, SoftPromptClassifier
    from langchain_dpicl.baselines import soft_prompt_without_privacy
    from langchain_dpicl.options import SoftPromptConfig, TrainableModel, Training
    from langchain_dpicl.soft_prompts.plan import engine_of

    torch.set_num_threads(1)
    task = soft_task(path, limit=1, length=40).task
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    engine = engine_of(
        TrainableModel(model, tokenizer, micro_batch=128), task=task, prompt=SoftPromptConfig(num_virtual_tokens=8)
    )
    training = Training(expected_batch_size=records // 2, steps=steps, learning_rate=0.03)

    def unprotected(shown: list[dict[str, str]]) -> SoftPrompt:
        return soft_prompt_without_privacy(shown, llm=engine, training=training.replace(expected_batch_size=records))

    def protected(shown: list[dict[str, str]]) -> SoftPrompt:
        holder = PrivateExamples(shown, label_key="label", labels=task.labels, public_size=records, dataset_id="audit")
        budget = Budget(epsilon=claim.epsilon, delta=claim.delta)
        run = PromptDPSGD.from_private_examples(
            holder, llm=engine, training=training, budget=budget, epsilon=claim.epsilon
        )
        return run.run(progress=False)

    def target(name: str, train: Callable[[list[dict[str, str]]], SoftPrompt], said: Claim | None) -> Target:
        def make(shown: Sequence[Record]) -> Any:
            prompt = train([dict(record) for record in shown])
            return SoftPromptClassifier(model, prompt, tokenizer=tokenizer, batch_size=128).scores

        return score_target(make, labels=task.labels, name=name, claim=said)

    return target("soft prompt, NOT PRIVATE", unprotected, None), target("PromptDPSGD, soft prompt", protected, claim)
