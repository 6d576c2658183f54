"""Runs `dpicl documents`, which turns private documents into a store of synthetic ones."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli.config import Settings, read_settings
from langchain_dpicl.cli.document_plans import documents_plan, parts_of, plan_lines
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
from langchain_dpicl.options import Topics

if TYPE_CHECKING:
    from langchain_dpicl.documents.plan import DocumentsPlan
    from langchain_dpicl.documents.synthesizer import DocumentSynthesizer

_WORDS = "--vocabulary, --public-texts"
_NOTES = f"""\
{SEES_RECORDS} With --documents-per-topic 0 it releases the words
that many units of a topic write, and asks no model; with N it releases N texts of each topic; with --set topics.words=8
both. Topics are words that
many units write, or keywords of a public vocabulary: --vocabulary names a file of keywords, one a line; --public-texts
one of public texts, one a line, whose most frequent words are taken; --vocabulary-size N alone takes words of the
embedded model. Never name a file of the records. Words of many people are released unchanged, names too: read them.
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
    command.rare.add_argument(
        "--vocabulary-size", type=int, metavar="N", help="words of them (1000), or of the embedded model's public texts"
    )
    command.rare.add_argument("--deny", type=Path, metavar="FILE", help="PUBLIC words that must not leave, one a line")
    add_shared(command, "documents_per_topic", "model", "checkpoint", data=("public_size",))


def run_documents(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Releases documents, or prints the plan of a dry run; returns the exit code."""
    call = Call(arguments, read_settings(arguments, methods=("documents",)), say, complain)
    settings = call.settings
    if arguments.dry_run or arguments.out is None:
        own = on_ledger(settings)
        plan = documents_plan(own, topics=_topics(arguments, own), deny=_denied(arguments, own))
        say(json.dumps(plan.to_dict(), indent=2) if arguments.json else _text_of(plan, own))
        return DONE
    check_target(arguments, settings)
    topics = _topics(arguments, settings)
    if settings.get("documents_per_topic"):
        warn_of_embedded(settings)
    budget = budget_of(settings)
    made: DocumentSynthesizer = settings.door(
        private_examples(settings),
        **share_of(settings),
        **({"llm": load_model(settings.model)} if settings.get("documents_per_topic") else {}),
        budget=budget,
        topics=topics,
        deny=_denied(arguments, settings),
    )
    if not call.is_quiet:
        say(_text_of(made.plan, settings))
    shown = "{0.metadata[topic]}: {0.page_content}".format
    code = release(made, call, shown=shown, budget=budget)
    if not call.is_quiet:
        say("\n".join(_topics_text(made)))
    return code


def _topics(arguments: argparse.Namespace, settings: Settings) -> Any:
    """Returns the option with the public vocabulary that was named."""
    from langchain_dpicl.discovery import public_vocabulary

    topics = settings.get("topics") or Topics()
    if arguments.vocabulary is None and arguments.public_texts is None and arguments.vocabulary_size is None:
        return topics
    size = 1_000 if arguments.vocabulary_size is None else arguments.vocabulary_size
    records = None if settings.data.file is None else Path(settings.data.file)
    if arguments.vocabulary is not None:
        return topics.replace(vocabulary=tuple(public_lines(arguments.vocabulary, records, _WORDS)))
    texts = None if arguments.public_texts is None else public_lines(arguments.public_texts, records, _WORDS)
    return topics.replace(vocabulary=public_vocabulary(texts, size=size))


def _denied(arguments: argparse.Namespace, settings: Settings) -> tuple[str, ...]:
    """Returns the public words that must not leave: those of the settings, and of a file."""
    records = None if settings.data.file is None else Path(settings.data.file)
    named = () if arguments.deny is None else public_lines(arguments.deny, records, "--deny")
    return (*settings.get("deny", ()), *named)


def _text_of(plan: DocumentsPlan, settings: Settings) -> str:
    size = max(1, sum(settings.data.sizes().values()) // plan.num_topics)
    return "\n".join(plan_lines(plan, parts=parts_of(plan), topic_size=size))


def _topics_text(made: DocumentSynthesizer) -> list[str]:
    if not made.topics:
        return ["no keyword reached the least count: no topic, no text, no word"]
    width = max(5, *(len(topic) for topic, _ in made.topics))
    head = "noisy count" if made.plan.least_units is not None else "noisy weight"
    rows = (f"{topic:<{width}}  {count:>{len(head)},.0f}" for topic, count in made.topics)
    return [f"{'topic':<{width}}  {head}", *rows]
