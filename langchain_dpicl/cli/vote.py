"""Runs `dpicl vote`, `evaluate`, `choose` and `discover`, each one charge for one release or query."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from langchain_dpicl._plain_files import MAX_TEXT
from langchain_dpicl.cli.inputs import (
    Settings,
    check_model,
    holds_something,
    load_model,
    load_named,
    name_of,
    private_examples,
    read_settings,
    read_text,
)
from langchain_dpicl.cli.parser import DONE
from langchain_dpicl.cli.plan import price_text
from langchain_dpicl.cli.spending import (
    BUDGET_NOTES,
    RELEASED,
    SEES_RECORDS,
    Call,
    Say,
    add_shared,
    budget_of,
    check_public,
    check_target,
    check_unchanged,
    dry_run,
    json_line,
    new_command,
    on_ledger,
    one_line,
    public_items,
    public_lines,
    records_of,
    rehearsed,
    release,
    save_or_print,
    say_report,
    share_of,
    voted_on,
)
from langchain_dpicl.exceptions import ConfigurationError, PrivacyBudgetMismatchError, RecordError
from langchain_dpicl.options import Noise, Serving, noise_of
from langchain_dpicl.privacy._validate import check_choice, fail
from langchain_dpicl.reports.rendering import format_rounded_up

if TYPE_CHECKING:
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
    from langchain_dpicl.cli.parser import Parser
    from langchain_dpicl.discovery import DiscoveryPlan, UnitCounter, ValueDiscovery, WordDiscovery, WordsPlan
    from langchain_dpicl.evaluation.evaluators import BoundEvaluator
    from langchain_dpicl.evaluation.plan import ChoicePlan, EvaluationPlan
    from langchain_dpicl.released.counts import ReleasedCounts, ReleasedWords
    from langchain_dpicl.results import VotingResult
    from langchain_dpicl.tasks import FewShotTemplate
    from langchain_dpicl.voting import DPVotingRunnable


_NOTES_OF_VOTE = f"""\
{SEES_RECORDS} Questions are public: nothing hides them.
Each answer takes one of --max-queries tickets, by default one for each different question, or one for each question
where more than serving.memo_size (256) are different. Several runs share the tickets of one --component: give all of
them the same --max-queries. An answer that stands in the file of --memo is free. Answers are printed one a line and
added to --out as JSON lines, each as soon as it is released. A run without tickets left stops with exit code 3.

{BUDGET_NOTES}"""
_SOURCES = {"release": "", "memo": " (from the memo, free)", "zero-shot": " (zero-shot, without the records)"}


def add_vote(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = new_command(
        commands,
        "vote",
        words="a label for each question of a file, or of --query",
        about="Answers public questions with labels that prompts of private records vote for.",
        notes=_NOTES_OF_VOTE,
        run=run,
    )
    command.add_argument("--queries", type=Path, metavar="FILE", help="questions: .jsonl, .csv, or one a line")
    command.add_argument("--query", action="append", default=[], metavar="TEXT", help="a question; repeatable")
    command.add_argument("--out", type=Path, metavar="FILE", help="JSON lines, to which the answers are added")
    add_shared(command, "max_queries", "model", "memo", rare=("rehearsal",))


def run_vote(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Answers the questions; returns the exit code."""
    call = Call(arguments, read_settings(arguments, methods=("voting",)), say, complain)
    asked = list(arguments.query)
    if arguments.queries is not None:
        asked += public_items(arguments.queries, call.settings.records, "--queries")
    if not asked and not (arguments.dry_run and call.settings.get("max_queries")):
        advice = "Give --query TEXT, or for a plan --dry-run --max-queries N."
        raise ConfigurationError(f"--query, --queries: expected a question, found none. {advice}")
    queries, count = _queries(asked, call.settings) if asked or call.settings.data.num_labels() else ([], 0)
    component = {"max_queries": count, **call.settings.component}
    call = dataclasses.replace(call, settings=dataclasses.replace(call.settings, component=component))
    _warn_of_few_tickets(count, call.settings)
    if arguments.dry_run:
        return dry_run(call)
    return _answer(call, queries)


def _warn_of_few_tickets(count: int, settings: Settings) -> None:
    """Warns, before the first ticket burns, that the share does not pay for all questions."""
    serving, tickets = settings.get("serving") or Serving(), settings.get("max_queries")
    if isinstance(tickets, int) and count > tickets and serving.on_exhausted == "raise":
        said = f"--max-queries: up to {count:,} questions to pay for, and tickets for {tickets:,}; the others are"
        advice = "Raise it, leave it out, or give Serving(on_exhausted='zero_shot')"
        warnings.warn(f"{said} answered from a memo or not at all. {advice}", stacklevel=2)


def _answer(call: Call, queries: Sequence[Any]) -> int:
    settings, arguments = call.settings, call.arguments
    if arguments.out is not None:
        check_target(arguments, settings, is_added_to=True)
        _check_added_to(arguments.out)
    elif arguments.quiet and not arguments.json:
        raise fail("--out", "a file for the answers, since --quiet prints none", None)
    records_of(settings)
    chosen, budget = rehearsed(settings), budget_of(settings)
    voter: DPVotingRunnable = settings.door(
        private_examples(settings), llm=load_model(settings.model), budget=budget, **chosen, **share_of(settings)
    )
    _ask(call, voter, queries)
    if not call.is_quiet:
        say_report(budget, say=call.say)
    return DONE


def _ask(call: Call, voter: DPVotingRunnable, queries: Sequence[Any]) -> None:
    """Prints and writes every answer as soon as it is released; says how many there are if a fault ends the run."""
    from langchain_dpicl.runs.release_run import new_bar, tick

    answering, done = voter.with_receipts(), 0
    try:
        with new_bar(len(queries), "query", "private answers", progress=call.progress) as bar:
            for query in queries:
                result = answering.invoke(query)
                done += 1
                line = json_line({"query": query, **result.model_dump(mode="json")})
                _keep(line, call)
                is_read: object = True
                if call.arguments.json:
                    is_read = call.say(line)
                elif not call.arguments.quiet:
                    is_read = call.say(_line(query, result))
                tick(bar)
                if call.arguments.out is None and is_read is False and done < len(queries):
                    raise OSError(errno.EPIPE, "nobody reads the answers, and each costs a ticket", "stdout")
    finally:
        if done < len(queries):
            call.complain(f"vote: {done} of {len(queries)} questions are answered.")


def _keep(line: str, call: Call) -> None:
    """Writes an answer before it is printed; prints it if that fails, since it is paid for."""
    out = call.arguments.out
    if out is None:
        return
    try:
        is_cut = holds_something(out) and not _ends_a_line(out)  # by a full disk or a kill
        with out.open("a", encoding="utf-8") as file:  # anew: an editor's save gives the name to another file
            file.write(f"\n{line}\n" if is_cut else f"{line}\n")
    except OSError:
        call.say(line)
        raise


def _line(query: Any, result: VotingResult) -> str:
    """Returns the answer and its question."""
    note = " (no label had enough votes)" if result.abstained else ""
    text = " ".join(map(str, query.values())) if isinstance(query, Mapping) else str(query)
    return f"{result.label}{note}{_SOURCES[result.receipt.source]}\t{one_line(text)}"


def _queries(asked: Sequence[Any], settings: Settings) -> tuple[list[Any], int]:
    """Returns questions as the component takes them, and how many of them it charges for at most.

    Refuses one that could not be asked, before any is paid for.
    """
    private, wording = voted_on(settings)
    serving = settings.get("serving") or Serving()
    most = private.max_chars if serving.max_query_chars is None else serving.max_query_chars
    queries = [_query_of(item, wording.input_variables, settings.data.text_key) for item in asked]
    for number, query in enumerate(queries, start=1):
        _check_query(number, query, wording, most)
    distinct = len(set(map(wording.query, queries)))
    return queries, distinct if distinct <= serving.memo_size else len(queries)  # else answers may be forgotten


def _query_of(item: Any, names: Sequence[str], text_key: str) -> Any:
    """Returns a question as the component takes it: the fields of a line that are variables of the question."""
    if not isinstance(item, (str, Mapping)):
        raise fail("--queries", "a text, or an object of fields, on every line", type(item).__name__)
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


def _check_query(number: int, query: Any, wording: FewShotTemplate, most: int) -> None:
    texts = [query] if isinstance(query, str) else [str(value) for value in query.values()]
    if not any(text.strip() for text in texts):
        raise fail(f"question {number}", "text", "none")
    length = sum(map(len, wording.query(query)))
    if length > most:
        advice = "Shorten it, or set serving.max_query_chars."
        raise fail(f"question {number}", f"at most {most:,} characters", length, advice)


def _check_added_to(out: Path) -> None:
    """Refuses to add answers to a file of something else, which may be paid for."""
    line = ""
    if out.exists():
        out.open("a").close()  # one that is read-only is refused before an answer is paid for
        with out.open(encoding="utf-8", errors="replace") as file:
            line = file.readline(MAX_TEXT).strip()
    try:
        is_other = bool(line) and "query" not in json.loads(line)
    except (ValueError, TypeError, RecursionError):
        is_other = True
    if is_other:
        raise fail("--out", "a new file, or one of answers", str(out), "Name another file.")


def _ends_a_line(file: Path) -> bool:
    with file.open("rb") as opened:
        opened.seek(-1, os.SEEK_END)
        return opened.read() == b"\n"


_PROMPTS = """\
A prompt is a file with an f-string template, such as "{text} Queue:"; its variables are fields of the records (or see
inputs in --set). Without --evaluator an answer is right if it names the label; --evaluator names a Score or a Judge of
Python. """
_EVALUATE_NOTES = f"""\
{SEES_RECORDS} {_PROMPTS}With --baseline another prompt answers the same records, and the difference has an
interval of its own.
A few hundred public records that look alike tell a good prompt from a bad one for free: see `dpicl rehearse`.
{RELEASED}{BUDGET_NOTES}"""
_CHOOSE_NOTES = f"""\
{SEES_RECORDS} {_PROMPTS}Every prompt answers the same records. How many prompts there are hardly changes what it
costs in epsilon; the calls are prompts times records. Only the name of the chosen prompt is released.
{RELEASED}{BUDGET_NOTES}"""


def add_evaluate(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = new_command(
        commands,
        "evaluate",
        words="how good a prompt is on the records",
        about="Measures a prompt on private records: noisy counts of right and wrong answers.",
        notes=_EVALUATE_NOTES,
        run=run,
    )
    command.add_argument("--prompt", action="append", default=[], type=Path, metavar="FILE", help="template under test")
    command.add_argument("--baseline", type=Path, metavar="FILE", help="another template, for the same records")
    _add_rest(command)


def add_choose(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = new_command(
        commands,
        "choose",
        words="the best of several prompts on the records",
        about="Chooses the best of several prompts on private records; only its name is released.",
        notes=_CHOOSE_NOTES,
        run=run,
    )
    command.add_argument(
        "--prompt", action="append", default=[], type=Path, metavar="FILE", help="a template, once per candidate"
    )
    _add_rest(command)


def _add_rest(command: Parser) -> None:
    command.add_argument("--evaluator", metavar="NAME", help="a Score or Judge, as module:name (default: the label)")
    command.add_argument("--sample", type=int, metavar="N", help="records that are read, on average (default: all)")
    command.add_argument("--out", type=Path, metavar="FILE", help="JSON for result and report")
    add_shared(command, "model", "part")


def run_evaluate(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Measures a prompt; returns the exit code."""
    from langchain_dpicl.evaluation import dp_evaluate

    call, evaluator = _call_of(arguments, "evaluation", say, complain)
    _check_prompts(arguments, call.settings)
    if len(arguments.prompt) != 1:
        raise fail("--prompt", "one file; `dpicl choose` compares several", len(arguments.prompt))
    if arguments.dry_run:
        prompts = {"chain": arguments.prompt[0], "baseline": arguments.baseline}
        return _dry_run(call, _evaluation_plan(call, _bound(call, evaluator, prompts)))
    check_target(arguments, call.settings)
    model = _model(call.settings)
    baseline = None if arguments.baseline is None else _template(arguments.baseline) | model
    return _released(call, dp_evaluate, _template(arguments.prompt[0]) | model, evaluators=evaluator, baseline=baseline)


def run_choose(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Chooses a prompt; returns the exit code."""
    from langchain_dpicl.evaluation import dp_choose

    call, evaluator = _call_of(arguments, "choice", say, complain)
    _check_prompts(arguments, call.settings)
    if len(arguments.prompt) < 2:
        raise fail("--prompt", "two files or more, each with its own --prompt", len(arguments.prompt))
    names = _names(arguments.prompt)
    if arguments.dry_run:
        bound = _bound(call, evaluator, dict(zip(names, arguments.prompt, strict=True)))
        return _dry_run(call, _choice_plan(call, bound, len(names)))
    check_target(arguments, call.settings)
    model = _model(call.settings)
    chains = {name: _template(path) | model for name, path in zip(names, arguments.prompt, strict=True)}
    return _released(call, dp_choose, chains, evaluator=evaluator)


def _call_of(arguments: argparse.Namespace, method: str, say: Say, complain: Say) -> tuple[Call, Any]:
    """Returns the call, and the evaluator that it names."""
    from langchain_dpicl.evaluation import Exact
    from langchain_dpicl.evaluation.evaluators import Evaluator

    settings = read_settings(arguments, methods=(method,))
    if settings.budget.ledger is not None and settings.budget.delta is not None:
        advice = "A share of a ledger has the delta in proportion to its epsilon."
        raise fail("--delta", "none with --ledger", settings.budget.delta, advice)
    if settings.model.private_process:
        raise fail("model.private_process", "false: LangChain calls the model, in this process", True)
    name = arguments.evaluator
    evaluator = Exact() if name is None else load_named("--evaluator", name)
    if not isinstance(evaluator, Evaluator):
        raise fail("--evaluator", "a Score or a Judge of langchain_dpicl.evaluation", type(evaluator).__name__)
    return Call(arguments, settings, say, complain), evaluator


def _check_prompts(arguments: argparse.Namespace, settings: Settings) -> None:
    """Refuses the records as a template, whose text is sent and quoted."""
    baseline = getattr(arguments, "baseline", None)
    for option, path in (*(("--prompt", path) for path in arguments.prompt), ("--baseline", baseline)):
        if path is not None:
            check_public(path, settings.records, option)


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns the name of each prompt: that of its file, or its path where two files have one name."""
    names = [path.stem for path in paths]
    names = names if len(set(names)) == len(names) else list(map(str, paths))
    if len(set(names)) < len(names):
        raise fail("--prompt", "different files", names)
    return names


def _template(path: Path) -> Any:
    from langchain_core.prompts import PromptTemplate

    text = read_text(path, "an f-string template")
    try:
        return PromptTemplate.from_template(text.rstrip("\r\n"))
    except ValueError as error:  # a brace without its partner; the file is public
        raise ConfigurationError(f"--prompt: expected an f-string template, found {path}: {error}.") from None


def _model(settings: Settings) -> Any:
    """Returns the model of a chain, which LangChain calls."""
    from langchain_core.runnables import Runnable

    _check_chain_model(settings)
    if settings.model.name == "embedded":
        from langchain_dpicl.serving import EmbeddedLLM

        return EmbeddedLLM(max_tokens=8)
    model = load_model(settings.model)
    if not isinstance(model, Runnable) and not callable(model):  # LangChain makes a step of either
        raise fail("--model", "a LangChain model", type(model), "Wrap an engine: LocalLLM(backend=engine).")
    return model


def _check_chain_model(settings: Settings) -> None:
    name = settings.model.name
    if name != "embedded" and Path(name).is_dir():
        advice = "Wrap the folder: my_models.py with llm = LocalLLM(...), and --model my_models:llm."
        raise fail("--model", "embedded, provider:model or module:name", name, advice)
    check_model(settings.model)


def _released(call: Call, release: Any, *chains: Any, **asked: Any) -> int:
    settings, arguments = call.settings, call.arguments
    budget, private = budget_of(settings), private_examples(settings)
    check_unchanged(call)
    result = release(
        *chains,
        private,
        budget=budget,
        progress=call.progress,
        sample=_sample(call),
        **asked,
        **_share(settings),
    )
    save_or_print(result, call)
    if arguments.json:
        call.say(result.to_json())
    elif not arguments.quiet:
        call.say(f"{result}\n")
        say_report(budget, say=call.say)
    return DONE


def _sample(call: Call) -> int | None:
    found: int | None = call.settings.get("sample") if call.arguments.sample is None else call.arguments.sample
    return found


def _share(settings: Settings) -> dict[str, Any]:
    """Returns the epsilon, the name and the other parameters of the call."""
    name = settings.get("component") if settings.budget.ledger is None else name_of(settings)
    epsilon = settings.get("epsilon", settings.budget.epsilon)
    if epsilon is None and settings.budget.ledger is not None:
        raise fail("epsilon", "this component's share of the ledger", None, "Give --epsilon.")
    return {**settings.only("inputs", "timeout", "part"), "component": name, "epsilon": epsilon}


# -- a dry run -------------------------------------------------------------------------------------------------------


def _evaluation_plan(call: Call, bound: BoundEvaluator) -> EvaluationPlan:
    from langchain_dpicl.evaluation import plan_evaluation
    from langchain_dpicl.evaluation.evaluators import paired

    chains = 1 if call.arguments.baseline is None else 2
    return plan_evaluation(
        widths=[(paired(bound) if chains == 2 else bound).widths],
        calls_per_unit=chains * (1 if bound.judge is None else 2),
        **_terms(call),
    )


def _choice_plan(call: Call, bound: BoundEvaluator, candidates: int) -> ChoicePlan:
    from langchain_dpicl.evaluation.plan import plan_choice

    return plan_choice(
        candidates=candidates,
        calls_per_unit=candidates * (1 if bound.judge is None else 2),
        is_rounded=len(set(bound.scores)) > 2,
        **_terms(call),
    )


def _bound(call: Call, evaluator: Any, prompts: Mapping[str, Path | None]) -> BoundEvaluator:
    """Returns the evaluator on the declared fields; refuses a prompt, under its name, that shows others."""
    from langchain_dpicl.evaluation.chains import fields_shown

    private, inputs = private_examples(call.settings, are_read=False), call.settings.get("inputs")
    bound: BoundEvaluator = evaluator.bind(private.fields, private.label_key, private.labels)
    for name, path in prompts.items():
        if path is not None:
            fields_shown(_template(path), known=private.fields, hidden=bound.hidden, inputs=inputs, name=name)
    return bound


def _terms(call: Call) -> dict[str, Any]:
    settings = on_ledger(call.settings)
    part, size = settings.get("part"), sum(settings.data.sizes().values())
    name = settings.data.dataset_id or "private-examples"
    if part is not None:
        from langchain_dpicl.privacy.extensions.outcome_counts import Part, name_of_parts, sizes_of_parts

        check_choice("part", part, get_args(Part))
        size, name = sizes_of_parts(size)[part], name_of_parts(name)
    return {
        "public_size": size,
        "part": part,
        "epsilon": settings.share_epsilon,
        "delta": settings.share_delta,
        "sample": _sample(call),
        "adjacency": settings.adjacency,
        "partition": name,
    }


def _dry_run(call: Call, plan: EvaluationPlan | ChoicePlan) -> int:
    """Prints the plan; reads no record, asks no model and spends nothing."""
    _check_chain_model(call.settings)
    calls, expected = plan.cost().private_calls, plan.expected()
    if call.arguments.json:
        call.say(json.dumps({"plan": plan.to_dict(), "expected": expected, "calls": calls}, indent=2))
        return DONE
    if "lead" in expected:
        from langchain_dpicl.evaluation.choose import NO_LEAD

        lead = f"{format_rounded_up(100 * expected['lead'], 3)} % of the range of marks"
        words = f"lead     {NO_LEAD if expected['lead'] > 1.0 else f'{lead} above all others wins with 90 %'}"
    else:
        words = (
            f"width    of the 95 % interval at an accuracy of .8: +-{100 * expected['population']:.2f} points for the "
            f"population, +-{100 * expected['data']:.2f} for these records"
        )
    call.say(
        f"epsilon  {price_text(plan.to_dict())}\n"
        f"reads    {plan.sample:,} of the declared units on average; {calls:,} calls\n{words}"
    )
    return DONE


_NOTES_OF_DISCOVER = f"""\
Without --by it counts units. With --by FIELD it finds the values of a field that enough units hold; with --value, once
per value, it counts those. With --words it finds words of the texts that many units write; read them before you send
them on, names are released too. No model is asked. {RELEASED}No result depends on a declared size. Without
--public-size the report gives the largest size that --delta allows, about 0.1/delta, as the size of the records.

{BUDGET_NOTES}"""


def add_discover(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = new_command(
        commands,
        "discover",
        words="counts of units, labels or other values; words of the texts",
        about="Counts units, labels or values under differential privacy, and finds unknown ones, or words.",
        notes=_NOTES_OF_DISCOVER,
        run=run,
    )
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON for what is released and its report; none: --dry-run"
    )
    command.add_argument("--by", metavar="FIELD", help="field whose values are counted; without it units are")
    command.add_argument("--value", action="append", help="a value that may occur, once per value; none: find them")
    command.add_argument("--max-values", type=int, metavar="N", help="values that a unit counts for (1), or words (8)")
    command.add_argument("--keep-case", action="store_true", help="upper and lower case make different values")
    command.add_argument("--words", action="store_true", help="find words of the text, for each label by itself")
    command.add_argument("--pairs", action="store_true", help="with --words: pairs of found words that are neighbours")
    command.add_argument("--deny", type=Path, metavar="FILE", help="with --words: PUBLIC words that must not be found")
    add_shared(command)


def run_discover(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Releases and prints counts or words, or the plan of a dry run; returns the exit code."""
    settings = read_settings(arguments, methods=("counts",))
    if others := sorted(set(settings.component) - {"epsilon", "noise", "component"}):
        raise fail("settings", "--by, --value, --max-values and --keep-case for what is counted", others)
    if arguments.by is None and arguments.value is not None:
        raise fail("--by", "the field that holds the values", None)
    if arguments.by is not None and arguments.by == settings.data.label_key:
        advice = "Its values are declared: without --by, dpicl discover counts the units of each label."
        raise fail("--by", "a field other than label_key", arguments.by, advice)
    # A field that is declared leaves the declaration as it is, so that other components share the data set.
    if arguments.by is not None and arguments.by not in (settings.data.fields or ()):
        settings = dataclasses.replace(settings, data=settings.data.replace(text_key=arguments.by))
    try:
        return _discover(arguments, settings, say=say, complain=complain)
    except PrivacyBudgetMismatchError as error:
        if settings.data.text_key != arguments.by or "'text_key'" not in str(error):
            raise
        advice = "--by declares its field as the text, unless data.fields names it from the first release on."
        raise PrivacyBudgetMismatchError(f"{error} {advice}") from None


def _discover(arguments: argparse.Namespace, settings: Settings, *, say: Say, complain: Say) -> int:
    what = _what_is_found(arguments, settings)
    noise = noise_of(settings.get("noise"), Noise)
    if arguments.dry_run or arguments.out is None:
        terms = on_ledger(_sized(settings))
        alone = terms.budget.replace(ledger=None, anchor=None)  # a budget in memory, of the share's size
        plan = _run(arguments, dataclasses.replace(terms, budget=alone), what, noise, are_read=False)[0].plan
        planned = f"{_discovery_text(plan)}\nspent    nothing: this is a plan; --out FILE without --dry-run releases"
        say(json.dumps(plan.to_dict(), indent=2) if arguments.json else planned)
        return DONE
    call = Call(arguments, settings, say, complain)
    check_target(arguments, settings)
    run, budget = _run(arguments, _sized(settings), what, noise)
    if not call.is_quiet:
        say(_discovery_text(run.plan))
    code = release(run, call, shown=lambda _: "", budget=budget)
    if not call.is_quiet and code == DONE:
        say("\n".join(_found_text(run.result)))
    return code


def _what_is_found(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Returns what a unit counts for, as constructors take it; refuses options of the other kind of release."""
    if not arguments.words:
        if arguments.pairs or arguments.deny is not None:
            raise fail("--pairs, --deny", "neither without --words", "one of them")
        most = 1 if arguments.max_values is None else arguments.max_values
        return {"values": arguments.value, "max_values": most, "fold_case": not arguments.keep_case}
    if arguments.value is not None or arguments.keep_case:
        raise fail("--value, --keep-case", "neither beside --words", "one of them")
    denied = () if arguments.deny is None else public_lines(arguments.deny, records_of(settings), "--deny")
    most = 8 if arguments.max_values is None else arguments.max_values
    return {"max_values": most, "deny": tuple(denied), "pairs": arguments.pairs}


def _run(
    arguments: argparse.Namespace, settings: Settings, what: dict[str, Any], noise: Noise, *, are_read: bool = True
) -> tuple[UnitCounter | ValueDiscovery | WordDiscovery, PrivacyBudgetCallbackHandler]:
    from langchain_dpicl.discovery import UnitCounter, ValueDiscovery, WordDiscovery

    budget = budget_of(settings)
    try:
        private = private_examples(settings, are_read=are_read)
    except RecordError as error:
        if settings.data.text_key != arguments.by:
            raise
        # The field of --by is read as the text; the message quotes no record.
        said = str(error).replace("give text_key=", "give --by")
        checked = f"`dpicl check FILE --text-key {arguments.by}`"
        raise RecordError(said.replace("`dpicl check FILE`", checked)) from None
    paid = {"noise": noise, **settings.only("component"), **share_of(settings), "budget": budget}
    if arguments.words:
        return WordDiscovery.from_private_examples(private, **what, **paid), budget
    if arguments.by is not None and arguments.value is None:
        del what["values"]
        return ValueDiscovery.from_private_examples(private, field=arguments.by, **what, **paid), budget
    return UnitCounter.from_private_examples(private, field=arguments.by, **what, **paid), budget


def _sized(settings: Settings) -> Settings:
    """Returns the settings with a declared size: where none is given, the largest that the budget's delta allows."""
    if settings.data.public_size is not None:
        return settings
    budget = budget_of(settings)
    delta = budget.delta
    budget.budget.close()
    return dataclasses.replace(settings, data=settings.data.replace(public_size=_most_units(delta)))


def _most_units(delta: float) -> int:
    """Returns the largest number of units of two digits that goes with a delta."""
    if delta == 0:
        advice = "Give --public-size N: a rough guess will do, as counts do not depend on it."
        raise fail("--public-size", "the declared number of units, at delta 0", None, advice)
    most = str(max(1, int(0.1 / delta)))
    return int(most[:2].ljust(len(most), "0"))  # three digits would read like a count


def _discovery_text(plan: DiscoveryPlan | WordsPlan) -> str:
    from langchain_dpicl.discovery import WordsPlan

    if isinstance(plan, WordsPlan):
        return _words_plan_text(plan)
    what = "units" if plan.release.rule.name is None else f"values of {plan.release.rule.name!r}"
    lines = [
        f"epsilon  {price_text(plan.to_dict())}, counts of {what}",
        f"noise    discrete Laplace, scale {float(plan.release.scale):.3f}, deviation {plan.deviation:.2f} units",
    ]
    if plan.threshold is not None:
        lines.append(
            f"found    from a noisy count of {plan.threshold} on: a value of {plan.found_from(0.95)} units with a "
            f"chance of 95 %, one of a single unit with at most {format_rounded_up(plan.threshold_delta, 2)}"
        )
    return "\n".join(lines)


def _words_plan_text(plan: WordsPlan) -> str:
    release, rule = plan.release, plan.release.rule
    kinds = "words and pairs of them" if plan.pairs is not None else "words"
    split = f", each of {len(plan.labels)} labels by itself" if plan.labels else ""
    chances = f"chance of 95 %, one of a single unit with at most {format_rounded_up(release.failure, 2)}"
    lines = [
        f"epsilon  {price_text(plan.to_dict())}, {kinds} of {rule.name!r}{split}",
        f"noise    Gaussian, deviation {release.scale:.2f}; a unit's words, {rule.max_words} at most, add 1 in squares",
        f"found    from a sum of {plan.threshold:.1f} on: a word of {plan.found_from(0.95)} units with a {chances}",
    ]
    return "\n".join(lines)


def _found_text(released: ReleasedCounts | ReleasedWords) -> list[str]:
    from langchain_dpicl.released.counts import ReleasedCounts

    return _counts_text(released) if isinstance(released, ReleasedCounts) else _words_text(released)


def _words_text(released: ReleasedWords) -> list[str]:
    if not released.words:
        return ["no word reached the threshold"]
    lines = ["Read these words before you send them on: names that many people write are among them."]
    for label, words, pairs in released.groups:
        named = "" if label is None else f"{label}: "
        lines.append(f"{named}{len(words)} words: {', '.join(word for word, _ in words)}")
        lines += [f"{named}{len(pairs)} pairs: {', '.join(pair for pair, _ in pairs)}"] if pairs else []
    return lines


def _counts_text(released: ReleasedCounts) -> list[str]:
    if not released.counts:
        return ["nothing reached the threshold"]
    from langchain_dpicl.privacy.extensions.value_counts import noise_margin

    margin = noise_margin(released.release.scale, 0.95)  # not `public_size`, which is never below 1
    width = max(5, *map(len, released.counts))
    rows = (f"{value:<{width}}  {count:>11,}  {max(0, count - margin):>8,}" for value, count in released.counts.items())
    return [f"{'value':<{width}}  noisy count  at least (95 % each)", *rows]
