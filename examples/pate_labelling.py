"""Private customer questions teach a public FAQ page, offline; its labelled lines become a prompt that anyone may see.

    python examples/pate_labelling.py
    python examples/pate_labelling.py --no-curve        one run, without the table over epsilon

Private prompts vote on the topic of every FAQ line, with noise on the votes (PromptPATE, Duan et al. 2023). From then
on nothing private is asked: the lines with their labels choose the student's prompt and serve in LangChain's stock
templates, string and chat. A picture is saved to `out/pate_labelling.png`.

The "private" questions are made up by `bank_questions.py`. Where each line truly belongs is written below, to count
what the teachers got right; nobody who labels public text for want of labels can count that.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bank_questions import LABELS, bank_questions, new_questions
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    PromptTemplate,
)
from langchain_core.runnables import Runnable

from langchain_dpicl import (
    ChatEmbedded,
    EmbeddedLLM,
    FewShotTask,
    LabelAnswers,
    LabelClassifier,
    LabelledPool,
    PrivacyBudgetCallbackHandler,
    PrivateExamples,
    PromptPATEExampleSelector,
    PromptPATELabeler,
    Rows,
)
from langchain_dpicl.options import Student

SIZE = 1500
NUM_SLOTS = 40
EPSILON = 1.0
EPSILONS = (0.03, 0.25, 2.0)
REPEATS = 2
PREFIX = "Questions of bank customers."
EXAMPLE = PromptTemplate.from_template("question: {text}\ntopic: {label}")
QUERY = "question: {input}\ntopic:"

FAQ = {
    "card payment": (
        "What does it mean when a card payment is pending?",
        "Why can a shop decline my card payment?",
        "How do I dispute a card payment?",
        "Does a card payment abroad cost a fee?",
        "When is a refund for a card payment paid out?",
        "Can I stop a card payment to a shop?",
        "Who do I tell about a card payment I did not make?",
        "What do I do if a shop charged my card twice?",
        "Why is my card payment to {shop} still pending?",  # braces, as in many an editorial system
        "Is there a limit for a card payment?",
    ),
    "transfer": (
        "How long does a transfer take?",
        "Can I cancel a transfer to a friend?",
        "Why is a transfer declined?",
        "What does a transfer to another country cost?",
        "Where do I see whether my transfer has arrived?",
        "What happens if I made a transfer to the wrong account?",
        "Can I make a transfer on a Sunday?",
        "What is the limit of a transfer to a new account?",
        "When is a transfer still pending?",
        "How do I send money to a friend?",
    ),
    "cash withdrawal": (
        "What is the fee for a cash withdrawal?",
        "Where do I find an ATM that gives me cash?",
        "Why was my cash withdrawal declined?",
        "What do I do if the ATM gave me the wrong amount?",
        "How much cash can I withdraw in a day?",
        "Is a cash withdrawal abroad free?",
        "Who do I call if the ATM kept my card?",
        "Why does a cash withdrawal show as pending?",
        "Can I get cash without my card?",
        "What do I do about a cash withdrawal I did not make?",
    ),
    "top up": (
        "How do I top up my account?",
        "How long does a top up take?",
        "Is there a fee for a top up by card?",
        "Why was my top up declined?",
        "Can I top up my account in cash?",
        "What is the largest top up?",
        "Why is my top up still pending?",
        "Can I cancel a top up?",
        "Which cards can I use to top up?",
        "Where do I see whether my top up has arrived?",
    ),
}
TOPIC_OF = {line: topic for topic, lines in FAQ.items() for line in lines}


def make_model() -> Any:
    """The teachers' model. It SEES the private prompts: one that you run, or a provider that you trust with them."""
    # With a provider: from langchain_openai import ChatOpenAI; return ChatOpenAI(model="gpt-4.1-mini")
    return EmbeddedLLM()


def make_labeler(epsilon: float = EPSILON) -> tuple[PromptPATELabeler, PrivacyBudgetCallbackHandler]:
    """Plans one label for each FAQ line, all of them within `epsilon`; nothing is spent yet."""
    private = PrivateExamples(
        bank_questions(num_per_label=SIZE),
        label_key="label",
        labels=LABELS,
        public_size=dict.fromkeys(LABELS, SIZE),
        dataset_id="bank-questions",
    )
    budget = PrivacyBudgetCallbackHandler(epsilon=epsilon, delta=1e-5)
    labeler = PromptPATELabeler.from_private_examples(
        private,
        llm=make_model(),  # sees the private prompts
        budget=budget,
        epsilon=epsilon,
        public_inputs=list(TOPIC_OF),
        task=FewShotTask(EXAMPLE, QUERY, prefix=PREFIX),
        rows=Rows(slots=NUM_SLOTS, shots=4),
        noise="gaussian",  # releases noisy votes, which the picture shows
        answers=LabelAnswers(abstain_below=0.4),  # a line that fewer than 40 % of the teachers agree on gets no label
    )
    return labeler, budget


def make_selector(labeler: PromptPATELabeler, *, progress: bool | None = None) -> PromptPATEExampleSelector:
    """Lets the labelled lines choose the best prompt of eight of them; free."""
    return PromptPATEExampleSelector.from_run(labeler, student=Student(shots=8), progress=progress)


def as_prompt(selector: PromptPATEExampleSelector) -> FewShotPromptTemplate:
    """Puts a selector into the stock string template, which needs doubled braces."""
    escaping = copy.copy(selector)  # over the same pool
    escaping.escape_braces = True
    return FewShotPromptTemplate(
        example_selector=escaping,
        example_prompt=EXAMPLE,
        prefix=PREFIX,
        suffix=QUERY,
        input_variables=["input"],
    )


def as_chat_prompt(selector: PromptPATEExampleSelector) -> ChatPromptTemplate:
    """Puts a selector into the stock chat template, which takes braces as they are."""
    turns = ChatPromptTemplate.from_messages([("human", "{text}"), ("ai", "{label}")])
    shown = FewShotChatMessagePromptTemplate(example_selector=selector, example_prompt=turns, input_variables=["input"])
    return ChatPromptTemplate.from_messages([("system", PREFIX), shown, ("human", "{input}")])


def chains(selector: PromptPATEExampleSelector) -> dict[str, Runnable[Any, str]]:
    """Question -> topic, as a string chain and as a chat chain; public from end to end."""
    return {
        "string": as_prompt(selector) | EmbeddedLLM().bind(max_tokens=4, stop=["\n"]) | StrOutputParser(),
        "chat": as_chat_prompt(selector) | ChatEmbedded().bind(max_tokens=4, stop=["\n"]) | StrOutputParser(),
    }


def accuracy(prompt: Any, questions: Sequence[dict[str, str]]) -> float:
    """Returns the share of new questions that a prompt sends to the right topic, calibrated."""
    classifier = LabelClassifier(EmbeddedLLM(), labels=LABELS, prompt=prompt)
    answers = classifier.batch([asked["text"] for asked in questions])
    return sum(answer == asked["label"] for answer, asked in zip(answers, questions, strict=True)) / len(questions)


def zero_shot() -> PromptTemplate:
    """The same prompt without examples."""
    return PromptTemplate.from_template(f"{PREFIX}\n\n{QUERY}")


def right_and_all(pool: LabelledPool) -> tuple[int, int]:
    """Counts the labels that are right, and the labels."""
    return sum(TOPIC_OF[entry.fields["text"]] == entry.label for entry in pool.labelled), len(pool.labelled)


def show_votes(pool: LabelledPool, least: float) -> None:
    """Prints every line with its best noisy vote as a bar; `|` is what a label needs."""
    for entry in pool.entries:
        if entry.votes is None:
            continue
        best = max(entry.votes.values())
        bar = "#" * max(0, round(best / 2))
        marked = f"{bar:<22}"[: round(least / 2)] + "|" + f"{bar:<22}"[round(least / 2) :]
        told = entry.label or "(rejected)"
        wrong = "  <- wrong" if entry.label not in {None, TOPIC_OF[entry.fields["text"]]} else ""
        print(f"   {entry.fields['text']:<56}{marked} {told}{wrong}")


def curve(questions: Sequence[dict[str, str]]) -> dict[float, list[float]]:
    """Prints and returns accuracy on new questions for several epsilon, each run on a budget of its own."""
    found: dict[float, list[float]] = {}
    print(f"   {'epsilon':<10}{'right / labels':<20}accuracy on new questions")
    for epsilon in EPSILONS:
        pools = [make_labeler(epsilon)[0] for _ in range(REPEATS)]
        selectors = []
        for labeler in pools:
            labeler.run(progress=False)
            selectors.append(make_selector(labeler, progress=False))
        found[epsilon] = [accuracy(as_prompt(selector), questions) for selector in selectors]
        counts = ", ".join("{}/{}".format(*right_and_all(selector.pool)) for selector in selectors)
        shown = ", ".join(f"{value:.2f}" for value in found[epsilon])
        print(f"   {epsilon:<10g}{counts:<20}{shown}", flush=True)
    return found


def draw(pool: LabelledPool, least: float, points: dict[float, list[float]], base: float, folder: Path) -> Path | None:
    """Draws noisy votes beside accuracy over epsilon; returns the file, or None without matplotlib."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2) if points else (1, 0.01))
    best = [max(entry.votes.values()) for entry in pool.entries if entry.votes]
    truth = [TOPIC_OF[entry.fields["text"]] == entry.label for entry in pool.entries if entry.votes]
    kinds = {"right label": "C0", "wrong label": "C3", "rejected": "0.6"}
    told = [
        "rejected" if entry.label is None else "right label" if ok else "wrong label"
        for entry, ok in zip((e for e in pool.entries if e.votes), truth, strict=True)
    ]
    for kind, color in kinds.items():
        places = [place for place, name in enumerate(told) if name == kind]
        left.bar(places, [best[place] for place in places], color=color, label=f"{kind} ({len(places)})")
    left.axhline(least, color="black", ls="--", lw=1, label="needed for a label")
    left.set_xlabel("line of the FAQ")
    left.set_ylabel("most noisy votes, of 40 teachers")
    left.set_ylim(0, 1.25 * max(best))
    left.set_title(f"What the private teachers said (epsilon {EPSILON:g} for all lines)")
    left.legend(frameon=False, fontsize=8, ncols=4, loc="upper center")
    if points:
        right.axhline(base, color="C1", ls=":", label="no examples")
        for epsilon, values in points.items():
            right.plot([epsilon] * len(values), values, "o", color="C0")
        means = [statistics.mean(values) for values in points.values()]
        right.plot(list(points), means, color="C0", label="prompt of labelled FAQ lines")
        right.set_xscale("log", base=2)
        right.set_xticks(list(points), [f"{epsilon:g}" for epsilon in points])
        right.set_ylim(0, 1)
        right.set_xlabel("epsilon (delta 1e-5, one record, add_remove)")
        right.set_title("Accuracy on new questions")
        right.legend(frameon=False, fontsize=8, loc="lower right")
    else:
        right.set_visible(False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pate_labelling.png"
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Private questions teach a public FAQ page.")
    parser.add_argument("--no-curve", action="store_true", help="leave out the table over epsilon")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    options = parser.parse_args(argv)
    questions = new_questions(num_per_label=25)

    print("== Private prompts label public lines: most noisy votes of about 40 teachers")
    labeler, budget = make_labeler()
    pool = labeler.run(progress=False)
    least = labeler.plan.threshold or 0.0
    show_votes(pool, least)
    right, labels = right_and_all(pool)
    print(f"   {right} of {labels} labels are right, {len(pool.rejected)} lines were rejected")

    print("\n== The best of 20 prompts, chosen by lines that were held back (public, free)")
    selector = make_selector(labeler, progress=False)
    assert selector.student is not None
    print(f"   {selector.student.right} of {selector.student.validated} held-back labels found")
    for example in selector.select_examples({"input": "any question"}):
        print(f"   {example['text']} -> {example['label']}")

    print("\n== Stock templates answer")
    for name, chain in chains(selector).items():
        for asked in questions[:3]:
            answer = chain.invoke({"input": asked["text"]}).strip()
            print(f"   {name:<7}{asked['text']} -> {answer!r}")
    base = accuracy(zero_shot(), questions)
    print(f"   accuracy on {len(questions)} new questions: {accuracy(as_prompt(selector), questions):.2f}, ", end="")
    print(f"without examples {base:.2f}")

    points: dict[float, list[float]] = {}
    if not options.no_curve:
        print("\n== And at another epsilon, each run on a fresh budget")
        points = curve(questions)

    print("\n== The budget report of the first run")
    print(budget.report())
    picture = draw(pool, least, points, base, options.out)
    print(f"\npicture: {picture}" if picture else "\nno picture: pip install matplotlib")


if __name__ == "__main__":
    main()
