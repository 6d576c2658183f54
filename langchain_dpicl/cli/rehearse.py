"""Runs `dpicl rehearse` and `dpicl try`, which ask a model about public examples and read no private record."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from langchain_dpicl.cli.inputs import (
    Settings,
    add_flags,
    add_settings,
    check_out,
    holds_something,
    load_model,
    read_json,
    read_records,
    read_settings,
)
from langchain_dpicl.cli.plan import money_text, num_wordings, toml_lines
from langchain_dpicl.cli.spending import Call, check_public, save_or_print
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.options import LabelAnswers
from langchain_dpicl.privacy._validate import check_int, check_positive_delta, fail
from langchain_dpicl.privacy.private_examples import label_text

if TYPE_CHECKING:
    from langchain_dpicl.generation.plan import GenerationPlan
    from langchain_dpicl.rehearsal.choice import FreeRival, TriedOption
    from langchain_dpicl.rehearsal.rehearsal import Rehearsal, RehearsalCost
    from langchain_dpicl.tasks import PublicRecords

Say = Callable[[str], object]
Confirm = Callable[[str], bool]

_LEAST = 3
"""Public examples that a rehearsal needs: each is tried on rows of the others."""
_METHODS = ("voting", "pate", "retrieval")
_EXAMPLES = Path(__file__).parent / "data" / "topics.jsonl"
_SHOTS = (1, 2, 4, 8)
_WORDING = ("task", "example_prompt", "suffix", "prefix")
_MADE_UP_SIZE, _DELTA = 2_000, 1e-6
_WRITTEN_TOKENS = 20
_PUBLIC = """\
The examples must be PUBLIC: written by hand, of a published data set, or of people who agreed. A sample of one's
customers' records is private, however small. No ledger is touched, and the result holds no text of an example.
"""
_TRY_NOTES = f"""\
Without FILE it asks about 64 examples on four topics that come with the package. The last line says whether a budget
is worth spending; the exit code is 0 whatever it says.

{_PUBLIC}"""


def _command(commands: Any, name: str, *, words: str, about: str, notes: str, run: Any) -> Any:
    command = commands.add_parser(name, help=words, description=about, notes=notes)
    command.add_argument(
        "public", nargs="?", type=Path, metavar="FILE", help="PUBLIC examples: JSON lines (.jsonl) or CSV (.csv)"
    )
    add_settings(command)
    add_flags(command, ("model", "text_key", "label_key", "label"))
    command.rare.add_argument(
        "--examples", type=int, metavar="N", default=64, help="most examples that are asked about (default 64)"
    )
    command.rare.add_argument("--shots", type=_numbers, default=_SHOTS, help="examples of a row (default 1,2,4,8)")
    command.rare.add_argument(
        "--origin",
        choices=("same", "neighbour", "made_up"),
        help="whether the examples are of the private records' domain (same, the default), of another one like it, "
        "or made up; the last two widen the printed intervals",
    )
    command.rare.add_argument(
        "--max-calls", type=int, metavar="N", default=10_000, help="refuse what may need more (default 10000)"
    )
    command.add_argument("--yes", action="store_true", help="do not ask before the first call")
    command.add_argument("--quiet", action="store_true", help="print nothing but faults")
    command.add_argument("--json", action="store_true", help="print JSON and nothing else")
    command.set_defaults(run=run)
    return command


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 1,2,4,8, found {text!r}") from None


# -- dpicl rehearse ----------------------------------------------------------------------------------------------------


def add_rehearse(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = _command(
        commands,
        "rehearse",
        words="what rows of public examples are worth, at epsilon 0",
        about="Measures on public examples how often the model is right; plans then rest on that and not on a guess.",
        notes=_PUBLIC,
        run=run,
    )
    command.add_argument("--out", type=Path, help="JSON file for `dpicl plan --rehearsal`, `dpicl try`, and rows=")


def run_rehearse(arguments: argparse.Namespace, *, say: Say, complain: Say, confirm: Confirm) -> int:
    """Rehearses, saves and prints the table. Returns 0; also where the question whether to go on was denied."""
    settings = read_settings(arguments, methods=_METHODS)
    if arguments.public is None:
        raise ConfigurationError("FILE: expected the file of public examples, found none. Name it.")
    call = Call(arguments, settings, say, complain)
    if arguments.out is not None:
        check_out(arguments.out, arguments.public)
        _check_replaced(arguments.out)
    examples = _examples(settings, arguments.public)
    rehearsal = _rehearsed(arguments, settings, examples, say=say, confirm=confirm)
    if rehearsal is None:
        return 0
    if arguments.out is not None:
        save_or_print(rehearsal, call)
    if arguments.json:
        shown = {"rests_on": rehearsal.rests_on, "model": rehearsal.model, "labels": list(rehearsal.labels)}
        say(json.dumps({**shown, **rehearsal.summary(), "shapes": rehearsal.rows()}, indent=2))
    elif not arguments.quiet:
        say(rehearsal.table())
    return 0


def _check_replaced(out: Path) -> None:
    """Refuses to write over a file of something else, which may be paid for."""
    try:
        is_lost = holds_something(out) and "rehearsal" not in read_json(out)["format"]
    except (ConfigurationError, LookupError, TypeError):
        is_lost = True
    if is_lost:
        raise fail("--out", "a new file, or that of an earlier rehearsal", str(out), "Name another file.")


def _examples(settings: Settings, path: Path) -> list[Any]:
    """Reads public examples, which are not the private records of the settings."""
    if path.suffix == ".json":
        raise fail(
            "FILE", "public examples (.jsonl, .csv)", path.name, "A rehearsal goes to --rehearsal of `dpicl try`."
        )
    check_public(path, settings.records, "FILE")
    return read_records(path)


def _rehearsed(
    arguments: argparse.Namespace,
    settings: Settings,
    examples: Sequence[Any],
    *,
    say: Say,
    confirm: Confirm,
    asks: bool = True,
) -> Rehearsal | None:
    """Says what it will cost, asks whether to go on, and rehearses; None: not to go on."""
    from langchain_dpicl.rehearsal.rehearsal import rehearse
    from langchain_dpicl.tasks import PublicRecords

    keys = _keys(settings)
    # Before a cost is shown, and before a model is made.
    known = PublicRecords.of(examples, settings.wording, **keys, instead="")
    if len(examples) < _LEAST:
        raise fail("FILE", f"at least {_LEAST} public examples", len(examples))
    answers = settings.answers
    cost = _cost(arguments, settings, answers, known)
    if getattr(arguments, "demonstrations", None) is not None:
        cost += _cost_of_texts(arguments, settings, examples, cost)
    words = _cost_text(cost, settings)
    if len(examples) > arguments.examples:
        words = f"{arguments.examples} of {len(examples):,} examples (--examples): {words}"
    if asks and not arguments.yes and not confirm(words):
        say("No call was made.")
        return None
    if not (arguments.quiet or arguments.json):
        say(words)
    return rehearse(
        load_model(settings.model),
        examples,
        **settings.only(*_WORDING),
        **keys,
        answers=answers,
        shots=arguments.shots,
        max_examples=arguments.examples,
        max_calls=arguments.max_calls,
        origin=arguments.origin or "same",
        progress=False if arguments.quiet or arguments.json else None,
    )


def _keys(settings: Settings) -> dict[str, Any]:
    data = settings.data
    return {"text_key": data.text_key, "label_key": data.label_key or "label", "labels": data.labels}


def _cost(
    arguments: argparse.Namespace, settings: Settings, answers: LabelAnswers, known: PublicRecords
) -> RehearsalCost:
    from langchain_dpicl.rehearsal.rehearsal import rehearsal_cost

    may_calibrate = answers.calibrate is not False and answers.votes != "text"
    calls = settings.cost.calls_per_row or (1 + len(answers.content_free) if may_calibrate else 1)
    return rehearsal_cost(
        min(len(known.records), arguments.examples),
        num_labels=len(known.labels),
        shots=arguments.shots,
        calls_per_row=calls,
        record_tokens=settings.cost.record_tokens,
        query_tokens=settings.cost.query_tokens,
    )


def _cost_of_texts(
    arguments: argparse.Namespace, settings: Settings, examples: Sequence[Any], votes: RehearsalCost
) -> RehearsalCost:
    """Returns the cost of the texts beside that of the votes; refuses more calls than both together may make."""
    from langchain_dpicl.rehearsal.generation import generation_rehearsal_cost

    texts = generation_rehearsal_cost(
        examples, **_keys(settings), max_tokens=_REHEARSED_TOKENS, record_tokens=settings.cost.record_tokens
    )
    most = (votes + texts).most.public_calls
    if most > arguments.max_calls:
        expected = f"at least the {most:,} calls that this rehearsal and its texts may need"
        advice = "Give fewer --examples or --shots, a larger --max-calls, or no --demonstrations."
        raise fail("--max-calls", expected, arguments.max_calls, advice)
    return texts


def _cost_text(cost: RehearsalCost, settings: Settings) -> str:
    least, most = cost.least, cost.most
    money = most.money(price_in=settings.cost.price_in, price_out=settings.cost.price_out)
    priced = f" and {money:.2f} money" if money else ", no price given"
    return (
        f"{least.public_calls:,} to {most.public_calls:,} calls, at most {most.tokens_in + most.tokens_out:,} tokens"
        f"{priced}; nothing private is read."
    )


# -- dpicl try ---------------------------------------------------------------------------------------------------------


def add_try(commands: Any, *, run: Any) -> None:
    """Adds the command."""
    command = _command(
        commands,
        "try",
        words="what is free beside what a budget would buy",
        about="Compares free answers with private votes, labels and retrieval at epsilon 1, 2, 4 and 8.",
        notes=_TRY_NOTES,
        run=run,
    )
    add_flags(command, ("rehearsal", "public_size", "delta", "adjacency", "max_queries", "public_inputs"))
    command.add_argument("--documents", type=int, help="units that take part in a query of retrieval; adds its rows")
    command.add_argument(
        "--demonstrations", type=int, metavar="N", help="demonstrations of each label; adds what noise leaves of them"
    )
    command.rare.add_argument(
        "--participations",
        type=int,
        metavar="N",
        default=10,
        help="answers that a document may take part in (default 10)",
    )


def _check_alone(arguments: argparse.Namespace) -> None:
    """Refuses what a rehearsal in a file leaves no room for."""
    if arguments.public is not None:
        raise fail("FILE, --rehearsal", "one of the two", "both")
    if arguments.origin is not None:
        raise fail("--origin", "none beside --rehearsal, which has its own", arguments.origin)
    if arguments.demonstrations is not None:
        raise fail("--demonstrations", "FILE, whose texts are written anew", "--rehearsal")


def _tried(arguments: argparse.Namespace) -> Settings:
    """Reads the settings; refuses what retrieval has no rows or no plan for, before a call is made."""
    from langchain_dpicl.retrieval import plan_retrieval, refuse_wordings

    settings = read_settings(arguments, methods=_METHODS)
    if arguments.documents is not None:
        refuse_wordings(settings.get("task"))
        terms: dict[str, Any] = {"participations": arguments.participations, "adjacency": settings.adjacency}
        plan_retrieval(_MADE_UP_SIZE, epsilon=None, noise_multiplier=1.0, delta=_DELTA, width=2, **terms)
    return settings


def _size_and_delta(arguments: argparse.Namespace, settings: Settings) -> tuple[int, float]:
    """Returns the declared units and the delta that are tried; refuses what would be refused after the calls."""
    from langchain_dpicl.privacy.private_examples import PrivateExamples

    size = _MADE_UP_SIZE if settings.data.public_size is None else sum(settings.data.sizes().values())
    check_int("public_size", size, low=1)
    delta = min(_DELTA, 0.1 / size) if settings.budget.delta is None else settings.budget.delta
    PrivateExamples([], public_size=size).check_delta(check_positive_delta(delta))
    check_int("max_queries", settings.get("max_queries", 1), low=1)
    check_int("--documents", arguments.documents or 0, low=0)
    check_int("--demonstrations", 1 if arguments.demonstrations is None else arguments.demonstrations, low=1)
    return size, delta


def run_try(arguments: argparse.Namespace, *, say: Say, confirm: Confirm) -> int:
    """Prints the table and the recommendation. Returns 0, whatever is recommended."""
    from langchain_dpicl.rehearsal.choice import try_components
    from langchain_dpicl.rehearsal.rehearsal import Rehearsal, asked_about

    settings = _tried(arguments)
    size, delta = _size_and_delta(arguments, settings)
    guess, prices = settings.guess, settings.cost
    free: list[FreeRival] = []
    examples: Sequence[Any] = ()
    plans: Mapping[float, GenerationPlan] = {}
    if guess.rehearsal is not None:
        _check_alone(arguments)
        rehearsal: Rehearsal | None = Rehearsal.load(guess.rehearsal)
    else:
        examples = _examples(settings, arguments.public or _EXAMPLES)
        plans = _plans_of_demonstrations(arguments, settings, examples, size=size, delta=delta)
        # Calls of the embedded model cost nothing and stay on this machine.
        is_embedded = settings.model.name == "embedded"
        rehearsal = _rehearsed(arguments, settings, examples, say=say, confirm=confirm, asks=not is_embedded)
        if rehearsal is not None and is_embedded and not settings.only(*_WORDING):
            asked = asked_about(examples, arguments.examples)
            free.append(_instruction_only(settings, asked, rehearsal.labels))
    if rehearsal is None:
        return 0
    trial = try_components(
        rehearsal,
        size,
        delta=delta,
        max_queries=settings.get("max_queries", 100),
        public_inputs=guess.public_inputs,
        adjacency=settings.adjacency,
        free=free,
        wordings=num_wordings(settings),
        private=[]
        if arguments.documents is None
        else _retrieval(arguments, settings, rehearsal, free, size=size, delta=delta),
        price_in=prices.price_in,
        price_out=prices.price_out,
        record_tokens=prices.record_tokens,
        query_tokens=prices.query_tokens,
        answer_tokens=prices.answer_tokens,
        progress=False if arguments.quiet or arguments.json else None,
    )
    trial = dataclasses.replace(trial, options=tuple(_as_asked(one, settings) for one in trial.options))
    has_words = not (arguments.json or arguments.quiet)
    if has_words:
        assumed = () if arguments.public is None else _assumptions(settings, rehearsal, has_instruction=bool(free))
        say("\n".join([*assumed, *_unused(settings), trial.table()]))
    written: list[dict[str, Any]] | None = None
    try:
        written = _demonstrations(arguments, settings, examples, plans)
    finally:  # the calls behind the trial are paid for, also where the model fails at the texts
        if arguments.json:
            more = {} if arguments.demonstrations is None else {"demonstrations": written}
            say(json.dumps({**trial.to_dict(), **more}, indent=2))
    if has_words:
        for row in written:
            say(_DEMONSTRATION.format(**row, price=money_text(row["money"])))
        if trial.recommended is not None:
            say("\n".join(toml_lines(trial.recommended.settings)))
    return 0


def _unused(settings: Settings) -> list[str]:
    """Returns the line on what a table of every epsilon, shape and mechanism has no use for, if there is any."""
    answers = settings.answers
    given = [name for name in ("epsilon", "rows", "noise") if settings.get(name) is not None]
    thresholds = {"abstain_below": answers.abstain_below not in {None, "never"}, "min_votes": answers.min_votes}
    others = {**thresholds, "scores": answers.scores}
    given += [f"answers.{name}" for name, is_asked in others.items() if is_asked]
    return [f"not used: {', '.join(given)} of the settings; the table compares what it finds best"] if given else []


def _as_asked(option: TriedOption, settings: Settings) -> TriedOption:
    """Returns an option whose settings read answers as the rehearsal did, which nothing compares later."""
    asked = settings.answers.replace(abstain_below=None, min_votes=None, scores=False)
    answers = {**asked.to_dict(), **option.settings["answers"]}
    return dataclasses.replace(option, settings={**option.settings, "answers": answers})


def _assumptions(settings: Settings, rehearsal: Rehearsal, *, has_instruction: bool) -> Iterator[str]:
    """Yields what was assumed for want of an option, and what could not be tried."""
    assumed = [] if settings.data.public_size is not None else [f"{_MADE_UP_SIZE:,} declared units (--public-size)"]
    assumed += [] if settings.get("max_queries") else ["100 answers (--max-queries)"]
    if settings.model.name == "embedded":
        assumed.append("the embedded model, for trying things out (--model)")
    if assumed:
        yield f"assumed: {', '.join(assumed)}"
    missing = [] if has_instruction else ["instruction only (the embedded model with the usual wording has it)"]
    if True not in rehearsal.readings and settings.answers.calibrate is None:
        missing.append("calibrated (needs label probabilities and a query of one variable, or one called input)")
    if missing:
        yield f"not tried: {', '.join(missing)}"


_DEMONSTRATION = (
    "private demonstrations, epsilon {epsilon:g}, {count} of each label: {fidelity:.0%} of tokens are those of the "
    "rows without noise ({low:.0%} to {high:.0%}); {calls:,} calls, {price}"
)
_TEXT_TOKENS, _REHEARSED_TOKENS = 60, 16


def _plans_of_demonstrations(
    arguments: argparse.Namespace, settings: Settings, examples: Sequence[Any], *, size: int, delta: float
) -> dict[float, GenerationPlan]:
    """Returns the plan at each epsilon, which needs no call; none where no demonstrations are asked for."""
    from langchain_dpicl.generation.plan import Segment, plan_generation
    from langchain_dpicl.rehearsal.choice import EPSILONS
    from langchain_dpicl.tasks import PublicRecords

    if arguments.demonstrations is None:
        return {}
    labels = PublicRecords.of(examples, settings.wording, **_keys(settings), instead="").labels
    return {
        epsilon: plan_generation(
            {label: max(1, size // len(labels)) for label in labels},
            epsilon=epsilon,
            delta=delta,
            adjacency=settings.adjacency,
            shots_per_label=arguments.demonstrations,
            segments=(Segment("text", _TEXT_TOKENS),),
        )
        for epsilon in EPSILONS
    }


def _demonstrations(
    arguments: argparse.Namespace,
    settings: Settings,
    examples: Sequence[Any],
    plans: Mapping[float, GenerationPlan],
) -> list[dict[str, Any]]:
    """Returns what noise leaves of private demonstrations at each epsilon; no accuracy, which the texts decide."""
    from langchain_dpicl.rehearsal.generation import rehearse_generation

    if not plans:
        return []
    rehearsal = rehearse_generation(
        load_model(settings.model),
        examples,  # the number of calls is that of labels and shapes
        **_keys(settings),
        max_tokens=_REHEARSED_TOKENS,
        max_calls=arguments.max_calls,
        progress=False if arguments.quiet else None,
    )
    prices, found = settings.cost, []
    for epsilon, plan in plans.items():
        cost = plan.cost(record_tokens=prices.record_tokens)
        low, high = rehearsal.interval(plan)
        found.append(
            {
                "epsilon": epsilon,
                "count": arguments.demonstrations,
                "fidelity": rehearsal.fidelity(plan),
                "low": low,
                "high": high,
                "rests_on": rehearsal.rests_on,
                "calls": cost.private_calls + cost.public_calls,
                "money": cost.money(price_in=prices.price_in, price_out=prices.price_out),
            }
        )
    return found


def _instruction_only(settings: Settings, examples: Sequence[Any], labels: Sequence[str]) -> FreeRival:
    """Returns the chance of a prompt of examples that the model itself wrote, one per label."""
    from langchain_dpicl.baselines import PublicVotingRunnable, demonstrations_from_instruction
    from langchain_dpicl.options import Decoding, Rows
    from langchain_dpicl.rehearsal.choice import FreeRival

    model = load_model(settings.model)
    keys: dict[str, Any] = {**_keys(settings), "labels": labels}
    likeliest = Decoding(top_k=1)  # equal commands print equal tables
    written = demonstrations_from_instruction(llm=model, **keys, max_tokens=_WRITTEN_TOKENS, decoding=likeliest)
    voter = PublicVotingRunnable.from_public_examples(
        written.examples, llm=model, **keys, rows=Rows(slots=1, shots=len(labels))
    )
    found = voter.batch([record[keys["text_key"]] for record in examples])
    right = [label == label_text(record[keys["label_key"]]) for label, record in zip(found, examples, strict=True)]
    name = "instruction only: a prompt of examples that the model wrote"
    return FreeRival(name, 0, bool(voter.report["content_free"]), sum(right) / len(right))


def _retrieval(
    arguments: argparse.Namespace,
    settings: Settings,
    rehearsal: Rehearsal,
    free: Sequence[FreeRival],
    *,
    size: int,
    delta: float,
) -> Iterator[TriedOption]:
    """Yields votes of retrieved documents: rows of one document, which are taken to be worth a random one."""
    from langchain_dpicl.rehearsal.choice import EPSILONS, TriedOption, against_free
    from langchain_dpicl.retrieval import plan_retrieval

    queries, prices = settings.get("max_queries", 100), settings.cost
    labels = len(rehearsal.labels)
    reads = max(rehearsal.readings, key=lambda read: rehearsal.facts(shots=1.0, calibrated=read).right)
    calls = 1 + len(rehearsal.content_free) if reads else 1
    for epsilon in EPSILONS:
        plan = plan_retrieval(
            size,
            epsilon=epsilon,
            delta=delta,
            participations=arguments.participations,
            width=labels,
            adjacency=settings.adjacency,
        )
        found = plan.expected(participants=arguments.documents, source=rehearsal, calibrated=reads)
        cost = plan.cost(
            participants=arguments.documents,
            record_tokens=prices.record_tokens,
            query_tokens=prices.query_tokens,
            answer_tokens=prices.answer_tokens,
            calls_per_row=calls,
            num_queries=queries,
        )
        rights = [
            plan.right_chance(facts, participants=arguments.documents)
            for facts in rehearsal.resampled(((1, 1.0),), reads)
        ]
        gain, verdict = against_free(rehearsal, found["right_label_prob"], np.array(rights), free=free)
        yield TriedOption(
            component="retrieval",
            epsilon=epsilon,
            counted=f"{arguments.documents:,} documents a query",
            right=found["right_label_prob"],
            low=found["right_label_low"],
            high=found["right_label_high"],
            at_most=found["ceiling_high"],
            gain=gain,
            verdict=verdict,
            design=f"{plan.release.num_slots} slots, gaussian, {arguments.participations} answers of each document"
            + (", calibrated" if reads else ""),
            calls=cost.private_calls + cost.public_calls,
            money=cost.money(price_in=prices.price_in, price_out=prices.price_out),
            settings={
                "epsilon": epsilon,
                "retrieval": {"participations": arguments.participations},
                "answers": {"calibrate": reads},
            },
        )
