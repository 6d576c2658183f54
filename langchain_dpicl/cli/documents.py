"""Runs `dpicl documents`, which turns private documents into a store of synthetic ones."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli.config import Settings, read_settings
from langchain_dpicl.cli.exit_codes import DONE
from langchain_dpicl.cli.inputs import load_model, private_examples
from langchain_dpicl.cli.spending import (
    BUDGET_NOTES,
    RELEASED,
    SEES_RECORDS,
    Call,
    Say,
    add_shared,
    budget_of,
    check_target,
    new_command,
    on_ledger,
    public_lines,
    release,
    share_of,
    warn_of_embedded,
)
from langchain_dpicl.options import Decoding, LogitNoise, Noise
from langchain_dpicl.options.rows import noise_of
from langchain_dpicl.privacy._validate import fail

if TYPE_CHECKING:
    from langchain_dpicl.documents.plan import DocumentsPlan
    from langchain_dpicl.documents.synthesizer import DocumentSynthesizer

_WORDS = "--vocabulary, --public-texts"
_NOTES = f"""\
{SEES_RECORDS} Topics are keywords of a public vocabulary that many units
hold: --vocabulary names a file of keywords, one a line; --public-texts one of public texts, one a line, whose most
frequent words are taken; without either they are the words of the embedded model. Never name a file of the records.
Records are declared without labels; if their ledger holds them with labels, give another --dataset-id. Both add up.

With --dry-run, or without --out, the plan is printed; nothing is read and nothing is spent. {RELEASED}{BUDGET_NOTES}"""


def add_documents(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = new_command(
        commands,
        "documents",
        words="synthetic documents for any retriever",
        about="Turns private documents into a store of synthetic ones, once, under differential privacy.",
        notes=_NOTES,
        run=run,
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="JSON for documents and report; none: --dry-run")
    words = command.add_mutually_exclusive_group()
    words.add_argument("--vocabulary", type=Path, metavar="FILE", help="public keywords, one a line")
    words.add_argument("--public-texts", type=Path, metavar="FILE", help="public texts, one a line, to take words from")
    command.add_argument("--vocabulary-size", type=int, metavar="N", default=1_000, help="words of it (default 1000)")
    add_shared(command, "model", "checkpoint", data=("public_size",))


def run_documents(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Releases documents, or prints the plan of a dry run; returns the exit code."""
    call = Call(arguments, read_settings(arguments, methods=("documents",)), say, complain)
    settings = call.settings
    if arguments.dry_run or arguments.out is None:
        plan = _plan_documents(arguments, on_ledger(settings))
        say(json.dumps(plan.to_dict(), indent=2) if arguments.json else _documents_text(plan))
        return DONE
    check_target(arguments, settings)
    topics = _topics(arguments, settings)
    warn_of_embedded(settings)
    budget = budget_of(settings)
    made: DocumentSynthesizer = settings.door(
        private_examples(settings),
        **{**share_of(settings), "llm": load_model(settings.model), "budget": budget, "topics": topics},
    )
    if not call.is_quiet:
        say(_documents_text(made.plan))
    shown = "{0.metadata[topic]}: {0.page_content}".format
    code = release(made, call, shown=shown, budget=budget)
    if not call.is_quiet:
        say("\n".join(_topics_text(made)))
    return code


def _topics(arguments: argparse.Namespace, settings: Settings) -> Any:
    """Returns the option with the public vocabulary that was named."""
    from langchain_dpicl.discovery import public_vocabulary
    from langchain_dpicl.options import Topics

    topics = settings.get("topics") or Topics()
    if arguments.vocabulary is None and arguments.public_texts is None and topics.vocabulary is not None:
        return topics
    records = None if settings.data.file is None else Path(settings.data.file)
    if arguments.vocabulary is not None:
        return topics.replace(vocabulary=tuple(public_lines(arguments.vocabulary, records, _WORDS)))
    texts = None if arguments.public_texts is None else public_lines(arguments.public_texts, records, _WORDS)
    return topics.replace(vocabulary=public_vocabulary(texts, size=arguments.vocabulary_size))


def _plan_documents(arguments: argparse.Namespace, settings: Settings) -> DocumentsPlan:
    """Returns the plan of a run with a model whose vocabulary holds all candidates; asks no model."""
    from langchain_dpicl.documents.plan import plan_documents
    from langchain_dpicl.generation.decoding_loop import TextDecoder
    from langchain_dpicl.generation.token_mechanisms import TokenRule
    from langchain_dpicl.planning.expected_utility import RowDesign

    topics, rows, decoding = _topics(arguments, settings), settings.get("rows"), settings.get("decoding") or Decoding()
    noise = noise_of(settings.get("noise"), Noise, LogitNoise)
    TextDecoder.of(noise, decoding)  # refuses a temperature that would have no effect
    if decoding.candidates == "all":
        raise fail("decoding.candidates", "a number: a plan asks no model for its vocabulary", decoding.candidates)
    public_size = sum(settings.data.sizes().values())
    size = topics.topic_size or max(1, public_size // topics.num_topics)
    return plan_documents(
        topics.vocabulary or (),
        public_size=public_size,
        epsilon=settings.share_epsilon,
        delta=settings.share_delta,
        adjacency=settings.adjacency,
        text_key=settings.data.text_key,
        num_topics=topics.num_topics,
        keywords_per_unit=topics.keywords_per_unit,
        topic_share=topics.epsilon_share,
        topic_noise=topics.noise,
        least_units=topics.min_units,
        topic_size=topics.topic_size,
        noise_multiplier=noise.multiplier,
        mechanism=TokenRule.of(noise, decoding.temperature),
        design=RowDesign.of(rows, smallest_size=size) or RowDesign.choose(smallest_size=size),
        redraw_every=None if rows is None else rows.redraw_every,
        candidates=decoding.candidates + 1,
        **settings.only("documents_per_topic", "max_tokens"),
    )


def _documents_text(plan: DocumentsPlan) -> str:
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
