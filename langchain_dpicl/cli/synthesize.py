"""Runs `dpicl documents`, `dpicl discover`, and `dpicl generate` with --mechanism private_evolution."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl._plain_files import MAX_TEXT, read_plain
from langchain_dpicl.cli.inputs import (
    Option,
    add_model,
    add_options,
    add_records,
    add_share,
    check_absent,
    check_counts,
    check_out,
    cost_of,
    load_grammar,
    load_model,
    new_budget,
    private_examples,
    save_or_print,
    typed_options,
)
from langchain_dpicl.exceptions import ConfigurationError, SynthesisInterruptedError
from langchain_dpicl.privacy._validate import check_delta

if TYPE_CHECKING:
    from langchain_dpicl.discovery import DiscoveryPlan
    from langchain_dpicl.documents.plan import DocumentsPlan
    from langchain_dpicl.documents.synthesizer import DocumentSynthesizer
    from langchain_dpicl.evolution.evolution import PrivateEvolution
    from langchain_dpicl.evolution.plan import EvolutionPlan
    from langchain_dpicl.privacy.data.private_examples import PrivateExamples
    from langchain_dpicl.released.counts import ReleasedCounts


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


def run_documents(
    arguments: argparse.Namespace, *, say: Callable[[str], object], complain: Callable[[str], object]
) -> int:
    """Releases documents, or prints the plan of a dry run; returns 0, 2 after a stop, 130 after Ctrl-C."""
    if arguments.dry_run or arguments.out is None:
        say(_plan_text(_plan_documents(arguments)))
        return 0
    check_out(arguments.out, arguments.file)
    _check_output_free(arguments)
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
    from langchain_dpicl.discovery import public_vocabulary

    if arguments.vocabulary is not None:
        return tuple(_public_lines(arguments.vocabulary, arguments.file))
    texts = None if arguments.public_texts is None else _public_lines(arguments.public_texts, arguments.file)
    return public_vocabulary(texts, size=arguments.vocabulary_size)


def _check_output_free(arguments: argparse.Namespace) -> None:
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


def _shared_options(arguments: argparse.Namespace) -> dict[str, Any]:
    numbers = {name: getattr(arguments, name) for name in _NUMBERS}
    return {**numbers, "topic_share": arguments.topic_share, "topic_noise": arguments.topic_noise}


def _writing(arguments: argparse.Namespace) -> dict[str, Any]:
    fixed = {"mechanism": arguments.mechanism, "sampling": arguments.sampling}
    return {**fixed, **typed_options(arguments, _WRITING)}


def _plan_documents(arguments: argparse.Namespace) -> DocumentsPlan:
    """Returns the plan of a run with a model whose vocabulary is at least `--public-top-k` wide; asks no model."""
    from langchain_dpicl.documents.plan import plan_documents
    from langchain_dpicl.documents.synthesizer import WritingOptions

    options, shared = WritingOptions.of(_writing(arguments)), _shared_options(arguments)
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
    from langchain_dpicl.documents.synthesizer import DocumentSynthesizer

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
        **_shared_options(arguments),
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


_DISCOVERY_NOTES = """\
Without --by it counts units. With --by FIELD it finds the values of a field that enough units hold; with --value, once
per value, it counts those. No model is asked. What is printed and saved is released under the budget.

Counts rest on no declared size. Without --public-size the report shows the largest one that goes with --delta,
0.1/delta, as the declared size of the records, and the rule that delta is at most 1/(10 * public_size) refuses nothing.

Every run starts a new budget, kept in memory. Two runs on the same records, or one and `dpicl generate`, spend twice,
and their epsilons add up; use a Python program with one shared budget where that must be counted.
"""


def add_discover(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "discover",
        help="how many units there are, of which labels or other values, known or not",
        description="Counts units, labels or values under differential privacy, and finds unknown ones.",
        epilog=_DISCOVERY_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_records(command, text="field that every record has, without --by")
    command.add_argument("--out", type=Path, help="JSON file for counts and report (without it: --dry-run)")
    command.add_argument("--by", metavar="FIELD", help="field whose values are counted; without it units are")
    command.add_argument("--value", action="append", help="a value that may occur, once per value; none: find them")
    add_share(command, epsilon="of the one release", delta="most of it is for the threshold of unknown values")
    command.add_argument("--records-per-unit", type=int, default=1, help="records looked at of each unit (default 1)")
    command.add_argument("--max-values", type=int, default=1, help="values that a unit may stand for (default 1)")
    command.add_argument("--keep-case", action="store_true", help="upper and lower case make different values")
    command.add_argument(
        "--public-size",
        type=int,
        help="a guess of the number of units, which delta is held against (default: 0.1/delta)",
    )
    command.add_argument("--dry-run", action="store_true", help="show noise and threshold; read and spend nothing")
    command.set_defaults(run=run)


def run_discover(arguments: argparse.Namespace, *, say: Callable[[str], object]) -> int:
    """Counts and prints what was released; with --dry-run, or without --out, prints the plan alone. Returns 0."""
    from langchain_dpicl.discovery import plan_discovery

    counted = {
        "values": arguments.value,
        "max_values": arguments.max_values,
        "fold_case": not arguments.keep_case,
    }
    plan = plan_discovery(
        arguments.by,
        **counted,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        adjacency=arguments.adjacency,
        partition=arguments.dataset_id,
    )
    if arguments.dry_run or arguments.out is None:
        say(_discovery_plan_text(plan))
        return 0
    check_out(arguments.out, arguments.file)
    released, budget = _release_counts(arguments, counted)
    save_or_print(released, arguments.out, say=say)
    if not arguments.quiet:
        say("\n".join((_discovery_plan_text(plan), "", *_counts_text(released), "", str(budget.report()))))
    return 0


def _release_counts(arguments: argparse.Namespace, counted: dict[str, Any]) -> tuple[ReleasedCounts, Any]:
    from langchain_dpicl.discovery import UnitCounter, ValueDiscovery

    # Counts rest on no declared size: without a guess it is the largest that goes with delta.
    guess = max(1, int(0.1 / check_delta(arguments.delta) * (1 - 1e-9)))
    private = private_examples(
        arguments,
        public_size=guess if arguments.public_size is None else arguments.public_size,
        text_key=arguments.by or arguments.text_key,
        records_per_unit=arguments.records_per_unit,
    )
    budget = new_budget(arguments)
    paid: dict[str, Any] = {"budget": budget, "epsilon": arguments.epsilon, "delta": arguments.delta}
    if arguments.by is not None and arguments.value is None:
        del counted["values"]
        return ValueDiscovery.from_private_examples(private, arguments.by, **counted, **paid).run(), budget
    return UnitCounter.from_private_examples(private, field=arguments.by, **counted, **paid).run(), budget


def _discovery_plan_text(plan: DiscoveryPlan) -> str:
    what = "units" if plan.release.rule.name is None else f"values of {plan.release.rule.name!r}"
    lines = [
        f"epsilon  {plan.epsilon:.4f} at delta {plan.delta:g}, adjacency {plan.release.adjacency}, counts of {what}",
        f"noise    discrete Laplace, scale {float(plan.release.scale):.3f}, deviation {plan.deviation:.2f} units",
    ]
    if plan.threshold is not None:
        lines.append(
            f"found    from a noisy count of {plan.threshold} on: a value of {plan.found_from(0.95)} units with a "
            f"chance of 95 %, one of a single unit with at most {plan.threshold_delta:.2g}"
        )
    return "\n".join(lines)


def _counts_text(released: ReleasedCounts) -> list[str]:
    if not released.counts:
        return ["nothing reached the threshold"]
    from langchain_dpicl.privacy.extensions.count_histograms import noise_margin

    margin = noise_margin(released.release.scale, 0.95)  # not `public_size`, which is never below 1
    width = max(len(value) for value in released.counts)
    head = f"{'value':<{max(width, 5)}}  noisy count  at least (95 % each)"
    return [
        head,
        *(
            f"{value:<{max(width, 5)}}  {count:>11,}  {max(0, count - margin):>8,}"
            for value, count in released.counts.items()
        ),
    ]


MECHANISM = "private_evolution"

_EVOLUTION_NUMBERS = {
    "rounds": Option("noisy histograms per label (default 5)"),
    "num_candidates": Option("first candidates per label (default as in a later round)"),
    "num_survivors": Option("candidates that go on after a round (default 10)"),
    "num_variations": Option("variations of each survivor (default 3)", low=0),
}
_RUN = ("embeddings", "variation_prompt", "hint")
# What a generation token by token has, and an evolution has not.
_NONE = (
    "rows",
    "num_slots",
    "shots_per_slot",
    "sampling",
    "redraw_every",
    "clip",
    "temperature",
    "blend_weight",
    "center",
    "free_tokens",
    "private_tokens",
    "full_vocabulary",
    "public_agreement",
    "grammar_json",
    "grammar_regex",
)


def add_evolution(command: argparse.ArgumentParser, *, runs: bool) -> None:
    """Adds the options that only private evolution has; those of a run where it is one."""
    group = command.add_argument_group(f"with --mechanism {MECHANISM} (the model sees no record)")
    add_options(group, _EVOLUTION_NUMBERS)
    if runs:
        group.add_argument("--embeddings", help="module:attribute of LangChain embeddings, which SEE the records")
        group.add_argument("--variation-prompt", help="template of the prompt for a variation of {text}")
        group.add_argument(
            "--hint", action="append", help="public sentence behind the instruction, in turn; repeatable"
        )


def check_evolution(arguments: argparse.Namespace) -> None:
    """Refuses options that would change nothing: those of other mechanisms here, and its own elsewhere."""
    if arguments.mechanism == MECHANISM:
        check_absent(arguments, _NONE, where=f"with --mechanism {MECHANISM}")
    else:
        check_absent(arguments, (*_EVOLUTION_NUMBERS, *_RUN), where=f"without --mechanism {MECHANISM}")
    check_counts(arguments, _EVOLUTION_NUMBERS)


def evolution_from(
    arguments: argparse.Namespace, private: PrivateExamples, *, budget: Any, model: Any, embeddings: Any, **spread: Any
) -> PrivateEvolution:
    """Builds the component, which checks its arguments and spends nothing yet."""
    from langchain_dpicl.evolution.evolution import PrivateEvolution

    return PrivateEvolution.from_private_examples(
        private,
        llm=writer_of(arguments, model),
        embeddings=embeddings,
        budget=budget,
        epsilon=arguments.epsilon,
        instruction=arguments.instruction,
        generation_prompt=arguments.generation_prompt,
        variation_prompt=arguments.variation_prompt,
        hints=tuple(arguments.hint or ()),
        shots_per_label=arguments.shots_per_label,
        max_tokens=arguments.max_tokens,
        **typed_options(arguments, _EVOLUTION_NUMBERS),
        **spread,
    )


def writer_of(arguments: argparse.Namespace, model: Any) -> Any:
    """Returns the model that writes; our own engines write at temperature 1, or all candidates would be alike."""
    from langchain_dpicl.backends.base import NextTokenBackend
    from langchain_dpicl.serving.models import LocalLLM

    if isinstance(model, NextTokenBackend) and hasattr(model, "generate"):
        return LocalLLM(backend=model, temperature=1.0, max_tokens=arguments.max_tokens, stop=["\n"])
    return model


def evolution_plan_output(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> tuple[dict[str, Any], str]:
    """Returns what `dpicl plan` prints, as JSON values and as text."""
    from langchain_dpicl.evolution.plan import plan_evolution

    plan = plan_evolution(
        sizes,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        adjacency=arguments.adjacency,
        **typed_options(arguments, ["shots_per_label"]),
        **typed_options(arguments, _EVOLUTION_NUMBERS),
    )
    out: dict[str, Any] = {
        "plan": plan.to_dict(),
        "cost": cost_of(plan.cost(record_tokens=arguments.record_tokens), arguments),
        "embedded": plan.embedded,
        "signal": plan.expected(),
    }
    return out, _text(plan, out)


def _text(plan: EvolutionPlan, out: dict[str, Any]) -> str:
    shown, signal, share = out["plan"], out["signal"], 100 * out["signal"]["share_to_be_seen"]
    lines = [
        "epsilon {epsilon:.4f} at delta {delta:g}, adjacency {adjacency} (nothing is spent)".format(**shown),
        "noise    gaussian, multiplier {noise_multiplier:.4f} of the sensitivity "
        "(scale {noise_scale:.3f} on the votes of each candidate)".format(**shown),
        "rounds   {rounds} per label, every unit votes in each: at most {candidates} candidates, {num_survivors} "
        "survivors, {num_variations} variations of each".format(**shown),
    ]
    for label, size in plan.public_sizes:
        lines.append(f"         {'all records' if label is None else label}: {size} declared units")
    lines += [
        "signal   {votes_per_candidate:.1f} votes per candidate if they fell evenly; ".format(**signal)
        + f"three deviations of the noise are {share:.1f} % of the units of the smallest label",
        "cost     no private call; {public_calls:,} public calls, {tokens_in:,} tokens in, {tokens_out:,} out, "
        "money {money:.2f}".format(**out["cost"]),
        "         embedded: {private:,} private texts (each once) and {public:,} public ones".format(**out["embedded"]),
    ]
    return "\n".join(lines)
