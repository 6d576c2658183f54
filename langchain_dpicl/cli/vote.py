"""Runs `dpicl vote`, which answers public questions from private records."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from langchain_dpicl.cli.config import read_settings
from langchain_dpicl.cli.exit_codes import DONE
from langchain_dpicl.cli.inputs import load_model, private_examples
from langchain_dpicl.cli.spending import (
    BUDGET_NOTES,
    SEES_RECORDS,
    Call,
    Say,
    add_shared,
    budget_of,
    check_target,
    dry_run,
    json_line,
    new_command,
    one_line,
    public_items,
    records_of,
    rehearsed,
    say_report,
    share_of,
)
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import fail

if TYPE_CHECKING:
    from langchain_dpicl.results import VotingResult
    from langchain_dpicl.voting import DPVotingRunnable

_NOTES = f"""\
{SEES_RECORDS} Questions are public: nothing hides them.
Each answer takes one of --max-queries tickets, by default one for each question. Several runs share the tickets of one
--component: give all of them the same --max-queries. An answer that stands in the file of --memo is free.
Answers are printed one a line and added to --out as JSON lines, each as soon as it is released. A run without tickets
left stops with exit code 3.

{BUDGET_NOTES}"""
_SOURCES = {"release": "", "memo": " (from the memo, free)", "zero-shot": " (zero-shot, without the records)"}


def add_vote(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = new_command(
        commands,
        "vote",
        words="a label for each question of a file, or of --query",
        about="Answers public questions with labels that prompts of private records vote for.",
        notes=_NOTES,
        run=run,
    )
    command.add_argument("--queries", type=Path, metavar="FILE", help="questions: .jsonl, .csv, or one a line")
    command.add_argument("--query", action="append", default=[], metavar="TEXT", help="a question; repeatable")
    command.add_argument("--out", type=Path, metavar="FILE", help="JSON lines, to which the answers are added")
    add_shared(command, "max_queries", "model", "memo", rare=("rehearsal",))


def run_vote(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Answers the questions; returns the exit code."""
    call = Call(arguments, read_settings(arguments, methods=("voting",)), say, complain)
    records = call.settings.data.file
    asked = list(arguments.query)
    if arguments.queries is not None:
        asked += public_items(arguments.queries, None if records is None else Path(records), "--queries")
    if not asked and not (arguments.dry_run and call.settings.get("max_queries")):
        advice = "Give --query TEXT, or for a plan --dry-run --max-queries N."
        raise ConfigurationError(f"--query, --queries: expected a question, found none. {advice}")
    component = {"max_queries": len(asked), **call.settings.component}
    call = dataclasses.replace(call, settings=dataclasses.replace(call.settings, component=component))
    if arguments.dry_run:
        return dry_run(call)
    return _answer(call, asked)


def _answer(call: Call, asked: Sequence[Any]) -> int:
    settings, arguments = call.settings, call.arguments
    if arguments.out is not None:
        check_target(arguments, settings)
    elif arguments.quiet and not arguments.json:
        raise fail("--out", "a file for the answers, since --quiet prints none", None)
    records_of(settings)
    chosen, budget = rehearsed(settings), budget_of(settings)
    voter: DPVotingRunnable = settings.door(
        private_examples(settings), llm=load_model(settings.model), budget=budget, **chosen, **share_of(settings)
    )
    queries = [_query_of(item, voter, settings.data.text_key) for item in asked]
    for number, query in enumerate(queries, start=1):
        _check_query(number, query, voter)
    with _appending(arguments.out) as out:
        _ask(call, voter, queries, out)
    if not call.is_quiet:
        say_report(call, budget)
    return DONE


def _ask(call: Call, voter: DPVotingRunnable, queries: Sequence[Any], out: IO[str] | None) -> None:
    """Prints and writes every answer as soon as it is released; says how many there are if a fault ends the run."""
    from langchain_dpicl.runs.release_run import new_bar, tick

    answering, done = voter.with_receipts(), 0
    try:
        with new_bar(len(queries), "query", "private answers", progress=call.progress) as bar:
            for query in queries:
                result = answering.invoke(query)
                done += 1
                line = json_line({"query": query, **result.model_dump(mode="json")})
                _keep(line, out, call)
                if call.arguments.json:
                    call.say(line)
                elif not call.arguments.quiet:
                    call.say(_line(query, result))
                tick(bar)
    finally:
        if done < len(queries):
            call.complain(f"vote: {done} of {len(queries)} questions are answered.")


def _keep(line: str, out: IO[str] | None, call: Call) -> None:
    """Writes an answer before it is printed; prints it if that fails, since it is paid for."""
    if out is None:
        return
    try:
        out.write(f"{line}\n")
        out.flush()
    except OSError:
        call.say(line)
        raise


def _line(query: Any, result: VotingResult) -> str:
    """Returns the answer and its question."""
    note = " (no label had enough votes)" if result.abstained else ""
    text = " ".join(map(str, query.values())) if isinstance(query, Mapping) else str(query)
    return f"{result.label}{note}{_SOURCES[result.receipt.source]}\t{one_line(text)}"


def _query_of(item: Any, voter: DPVotingRunnable, text_key: str) -> Any:
    """Returns a question as the component takes it: the fields of a line that are variables of the question."""
    names = voter.wording.input_variables
    if not isinstance(item, Mapping):
        if len(names) > 1:
            advice = "Put one question on a line of a .jsonl or .csv file, for --queries."
            raise fail("question", f"the fields {list(names)}", "one text", advice)
        return item
    usual = names[0] if len(names) == 1 else "input"
    keys = {name: text_key if name == usual and name not in item else name for name in names}
    if missing := [key for key in keys.values() if key not in item]:
        raise fail("--queries", f"fields {list(keys.values())} on every line", f"{missing} missing")
    return {name: item[key] for name, key in keys.items()}


def _check_query(number: int, query: Any, voter: DPVotingRunnable) -> None:
    """Refuses a question that could not be asked, before the first one is paid for."""
    texts = [query] if isinstance(query, str) else [str(value) for value in query.values()]
    if not any(text.strip() for text in texts):
        raise fail(f"question {number}", "text", "none")
    length = sum(map(len, voter.wording.query(query)))
    most = voter.private.max_chars if voter.max_query_chars is None else voter.max_query_chars
    if length > most:
        advice = "Shorten it, or set serving.max_query_chars."
        raise fail(f"question {number}", f"at most {most:,} characters", length, advice)


@contextlib.contextmanager
def _appending(out: Path | None) -> Iterator[IO[str] | None]:
    if out is None:
        yield None
        return
    with out.open("a", encoding="utf-8") as file:
        yield file
