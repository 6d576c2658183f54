"""Runs `dpicl documents`: private documents in, synthetic documents and a report out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl._cli_inputs import (
    add_model,
    add_records,
    check_out,
    load_grammar,
    load_model,
    new_budget,
    private_examples,
    save_or_print,
)
from langchain_dpicl._cli_options import Option, add_options, add_share, typed_options
from langchain_dpicl._plain_files import MAX_TEXT, read_plain
from langchain_dpicl.exceptions import ConfigurationError, SynthesisInterruptedError

if TYPE_CHECKING:
    from langchain_dpicl.documents import DocumentSynthesizer
    from langchain_dpicl.documents_planning import DocumentsPlan

_FAULT, _INTERRUPTED = 2, 130
_NOTES = """\
The model sees the records: run one you trust with them. Topics are keywords of a public vocabulary that many units
hold: --vocabulary names a file of keywords, one a line; --public-texts one of public texts, one a line, whose most
frequent words are taken; without either they are the words of the embedded model. Never name a file of the records.

With --dry-run nothing is read and nothing is spent. What is printed and saved is released under the budget.

Every run starts a new budget, kept in memory. Two runs on the same records spend twice, and their epsilons add up; use
a Python program with one shared budget where that must be counted.
"""
_NUMBERS = {
    "num_topics": Option(
        "most topics; their costs do not add up, but a larger share of smaller ones is read", default=10
    ),
    "documents_per_topic": Option("texts of each topic; their costs compose", default=4),
    "max_tokens": Option("cap of a text", default=60),
    "keywords_per_unit": Option("keywords that a unit casts at most", default=10),
    "least_units": Option("noisy count below which a keyword becomes no topic"),
    "topic_size": Option("declared units of a topic (default: spread evenly)"),
}
_WRITING = {
    "num_slots": Option("rows per token"),
    "shots_per_slot": Option("records per row"),
    "redraw_every": Option("tokens per secret sample"),
    "clip": Option("largest clipped logit or difference (logit mechanisms)", kind=float),
    "temperature": Option("of the released token's softmax (logit mechanisms)", kind=float),
}


def add_documents(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "documents",
        help="private documents in, synthetic documents for any retriever and a report out",
        description="Turns private documents into a store of synthetic ones, once, under differential privacy.",
        epilog=_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_records(
        command,
        dataset_id="private-documents",
        unit="field that names the person or document a record belongs to",
    )
    command.add_argument("--out", type=Path, help="JSON file for documents and report (without it: --dry-run)")
    add_share(command, epsilon="of histogram and texts together")
    command.add_argument("--public-size", type=int, required=True, help="declared, not counted, number of units")
    command.add_argument("--records-per-unit", type=int, default=1, help="records kept of each unit (default 1)")
    words = command.add_mutually_exclusive_group()
    words.add_argument("--vocabulary", type=Path, metavar="FILE", help="public keywords, one a line")
    words.add_argument("--public-texts", type=Path, metavar="FILE", help="public texts, one a line, to take words from")
    command.add_argument("--vocabulary-size", type=int, default=1_000, help="words without --vocabulary (default 1000)")
    add_options(command, _NUMBERS)
    command.add_argument("--topic-share", type=float, default=0.2, help="of epsilon, for the histogram (default 0.2)")
    command.add_argument("--topic-noise", choices=("discrete_laplace", "gaussian"), help="default: what deviates less")
    command.add_argument("--instruction", help="public description of the task, first in every prompt")
    command.add_argument("--generation-prompt", help="template of one record with {topic}, text field last")
    command.add_argument("--mechanism", default="gumbel", help="how a token is released (default gumbel)")
    command.add_argument("--sampling", choices=("poisson", "disjoint"), default="poisson")
    command.add_argument("--public-top-k", type=int, default=100, help="candidates per token (default 100)")
    add_options(command, _WRITING)
    add_model(command)
    command.add_argument("--dry-run", action="store_true", help="show the plan; read and spend nothing")
    command.set_defaults(run=run)


def documented(
    arguments: argparse.Namespace, *, say: Callable[[str], object], complain: Callable[[str], object]
) -> int:
    """Releases documents, or prints the plan of a dry run; returns 0, 2 after a stop, 130 after Ctrl-C."""
    if arguments.dry_run or arguments.out is None:
        say(_plan_text(_planned(arguments)))
        return 0
    check_out(arguments.out, arguments.file)
    _check_kept(arguments)
    made, budget = _synthesizer(arguments)
    if not arguments.quiet:
        say(_plan_text(made.plan))
    code, stopped = 0, ""
    try:
        for document in made.stream(progress=False if arguments.quiet else None):
            if not arguments.quiet:
                say(f"{document.metadata['topic']}: {document.page_content}")
    except SynthesisInterruptedError as error:
        code, stopped = _FAULT, str(error).split(" Call run()", 1)[0]
    except KeyboardInterrupt:
        code, stopped = _INTERRUPTED, "Interrupted. Tickets that burnt stay charged."
    finally:
        save_or_print(made.released(), arguments.out, say=say)
    if stopped:
        complain(f"{stopped} What was released is saved in {arguments.out}. A new run starts over, on its own budget.")
    if not arguments.quiet:
        say("\n".join(("", *_topics_text(made), "", str(budget.report()))))
    return code


def _vocabulary(arguments: argparse.Namespace) -> tuple[str, ...]:
    from langchain_dpicl.vocabularies import public_vocabulary

    if arguments.vocabulary is not None:
        return tuple(_public_lines(arguments.vocabulary, arguments.file))
    texts = None if arguments.public_texts is None else _public_lines(arguments.public_texts, arguments.file)
    return public_vocabulary(texts, size=arguments.vocabulary_size)


def _check_kept(arguments: argparse.Namespace) -> None:
    """Refuses to write over the public words."""
    for path in (arguments.vocabulary, arguments.public_texts):
        if path is not None and path.exists() and arguments.out.exists() and path.samefile(arguments.out):
            raise ConfigurationError(f"--out: expected another file than that of the public words, found {path}.")


def _public_lines(path: Path, records: Path) -> list[str]:
    """Returns the lines of a public file, which is not that of the records."""
    if path.exists() and records.exists() and path.samefile(records):
        raise ConfigurationError(f"--vocabulary, --public-texts: expected a PUBLIC file, found the records, {path}.")
    try:
        lines = read_plain(path, MAX_TEXT).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        lines = None
    if lines is None:
        raise ConfigurationError(f"{path}: expected lines of text in UTF-8, found other bytes.")
    return [line.strip() for line in lines if line.strip()]


def _shared(arguments: argparse.Namespace) -> dict[str, Any]:
    numbers = {name: getattr(arguments, name) for name in _NUMBERS}
    return {**numbers, "topic_share": arguments.topic_share, "topic_noise": arguments.topic_noise}


def _writing(arguments: argparse.Namespace) -> dict[str, Any]:
    fixed = {"mechanism": arguments.mechanism, "sampling": arguments.sampling}
    return {**fixed, **typed_options(arguments, _WRITING)}


def _planned(arguments: argparse.Namespace) -> DocumentsPlan:
    """Returns the plan of a run with a model whose vocabulary is at least `--public-top-k` wide; asks no model."""
    from langchain_dpicl._topic_writing import WritingOptions
    from langchain_dpicl.documents_planning import plan_documents

    options, shared = WritingOptions.of(_writing(arguments)), _shared(arguments)
    size = shared["topic_size"] or max(1, arguments.public_size // max(1, arguments.num_topics))
    return plan_documents(
        _vocabulary(arguments),
        public_size=arguments.public_size,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        adjacency=arguments.adjacency,
        text_key=arguments.text_key,
        mechanism=options.rule,
        design=options.design(size),
        redraw_every=options.redraw_every,
        candidates=arguments.public_top_k + 1,
        **shared,
    )


def _synthesizer(arguments: argparse.Namespace) -> tuple[DocumentSynthesizer, Any]:
    """Reads records and model, checks everything, and has spent nothing yet."""
    from langchain_dpicl.documents import DocumentSynthesizer

    vocabulary = _vocabulary(arguments)
    sizes = {name: getattr(arguments, name) for name in ("public_size", "records_per_unit")}
    private, budget = private_examples(arguments, **sizes), new_budget(arguments)
    made = DocumentSynthesizer.from_private_examples(
        private,
        llm=load_model(arguments),
        vocabulary=vocabulary,
        budget=budget,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        instruction=arguments.instruction,
        generation_prompt=arguments.generation_prompt,
        public_top_k=arguments.public_top_k,
        grammar=load_grammar(arguments),
        **_shared(arguments),
        **_writing(arguments),
    )
    return made, budget


def _plan_text(plan: DocumentsPlan) -> str:
    rule, shown, cost = plan.topics.rule, plan.generation.to_dict(), plan.cost()
    lines = [f"epsilon  {plan.epsilon:.4f} at delta {plan.delta:g}, adjacency {plan.topics.adjacency}: both steps"]
    lines.append(
        f"topics   at most {plan.num_topics} of {len(rule.declared or ()):,} public keywords, {rule.max_values} of "
        f"each unit; {plan.topics.mechanism.name} noise, deviation {plan.deviation:.1f} units"
    )
    lines.append(
        f"         from a noisy count of {plan.least_units} on: a keyword of {plan.found_from(0.95)} units with a "
        "chance of 95 %"
    )
    lines.append(
        f"texts    {plan.documents_per_topic} of each topic; {shown['mechanism']}, noise multiplier "
        f"{plan.generation.noise_multiplier:.3f}, {shown['num_slots']} rows per token"
    )
    lines.append(f"cost     up to {cost.private_calls:,} private calls, {cost.public_calls:,} public ones")
    return "\n".join(lines)


def _topics_text(made: DocumentSynthesizer) -> list[str]:
    if not made.topics:
        return ["no keyword reached the least count: no topic, no text"]
    width = max(5, *(len(topic) for topic, _ in made.topics))
    return [f"{'topic':<{width}}  noisy count", *(f"{topic:<{width}}  {count:>11,}" for topic, count in made.topics)]
