"""What the commands that spend share: options, the budget that pays, dry runs, and what is printed and saved."""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import json
import secrets
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_dpicl._plain_files import check_path, faults_of
from langchain_dpicl.cli.inputs import (
    Settings,
    add_flags,
    add_settings,
    as_typed,
    check_model,
    check_out,
    holds_something,
    name_of,
    private_examples,
    read_json,
    read_records,
    read_text,
)
from langchain_dpicl.cli.ledger import remaining_text, writes_utf8
from langchain_dpicl.cli.parser import DONE, INTERRUPTED, Parser, exit_code_of
from langchain_dpicl.cli.plan import planned, task_of
from langchain_dpicl.exceptions import ConfigurationError, RunInterruptedError
from langchain_dpicl.options import Noise, noise_of
from langchain_dpicl.privacy._validate import fail

if TYPE_CHECKING:
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler
    from langchain_dpicl.privacy.private_examples import PrivateExamples
    from langchain_dpicl.tasks import FewShotTemplate

Say = Callable[[str], object]

BUDGET_NOTES = """\
Without --ledger every run starts a new budget, kept in memory: two runs on the same records spend twice, and their
epsilons add up. `dpicl ledger create` makes a ledger that all runs share.
"""
SEES_RECORDS = "The model sees the records: run one you trust with them."
_TWICE = "Without --ledger each run has a budget of its own: two runs on the same records spend twice."
RELEASED = "What is printed and saved is released under the budget.\n\n"
_LABELLED = ("label_key", "label", "public_size")
_BUDGET = ("epsilon", "delta", "ledger", "component")
_RARE = ("anchor", "text_key", "dataset_id", "adjacency")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a command that spends.

    Attributes:
      found: what another command's write to --out changes; None: nothing was there at the start.
    """

    arguments: argparse.Namespace
    settings: Settings
    say: Say
    complain: Say
    found: tuple[int, int] | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "found", self.stamp())

    def stamp(self) -> tuple[int, int] | None:
        """Returns when --out was written, and its size; None where nothing is there, or it is empty."""
        if self.arguments.out is not None:
            with contextlib.suppress(OSError, ValueError):  # the check of --out, or the save, says so
                status = self.arguments.out.stat()
                return (status.st_mtime_ns, status.st_size) if status.st_size else None
        return None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is printed but faults and, with --json, the JSON."""
        return bool(self.arguments.quiet or self.arguments.json)

    @property
    def progress(self) -> bool | None:
        """What runs take: a bar on stderr if that is a terminal, or none."""
        return False if self.arguments.quiet else None


def new_command(commands: Any, name: str, *, words: str, about: str, notes: str, run: Any) -> Parser:
    """Adds a command that reads records, spends a budget and releases something; its own options come next."""
    sees = f"{SEES_RECORDS} " if SEES_RECORDS in notes else ""
    command: Parser = commands.add_parser(name, help=words, description=about, notes=notes, epilog=f"{sees}{_TWICE}")
    command.add_argument("file", nargs="?", type=Path, help="private records: plain file, .jsonl or .csv, also .gz")
    command.set_defaults(run=run)
    return command


def add_shared(command: Parser, *flags: str, data: Sequence[str] = _LABELLED, rare: Sequence[str] = ()) -> None:
    """Adds the options that all these commands have, and flags of the command's own."""
    add_flags(command, (*data, "unit_key", *_BUDGET, *flags))
    add_settings(command)
    command.add_argument("--dry-run", action="store_true", help="show the plan; read no record, ask and spend nothing")
    command.add_argument("--json", action="store_true", help="print JSON and nothing else")
    command.add_argument("--quiet", action="store_true", help="print nothing but faults; --out has everything")
    add_flags(command.rare, (*rare, *_RARE))


def records_of(settings: Settings) -> Path:
    """Returns the file of the records."""
    if settings.records is None:
        raise ConfigurationError("FILE: expected the file of the records, found none. Name it, or set data.file.")
    return settings.records


def check_target(arguments: argparse.Namespace, settings: Settings, *, is_added_to: bool = False) -> None:
    """Refuses an --out that could not be written, that is another file of the same command, or that would be lost."""
    out = needed_out(arguments)
    check_out(out, *other_files(arguments, settings))
    if not is_added_to:
        check_kept(out, arguments, settings)


def other_files(arguments: argparse.Namespace, settings: Settings) -> list[str | Path]:
    """Returns the files that a command reads or keeps, which its --out must not be."""
    paths = [path for name, path in vars(arguments).items() if isinstance(path, Path) and name != "out"]
    kept = (settings.budget.ledger, settings.budget.anchor, settings.get("checkpoint"), settings.guess.rehearsal)
    memo = getattr(settings.get("serving"), "memo", None)
    named = [path for path in (*kept, memo) if isinstance(path, str | Path) and "://" not in str(path)]
    return [records_of(settings), *paths, *named]


def check_kept(file: Path, arguments: argparse.Namespace, settings: Settings) -> None:
    """Refuses to replace a file, which may be paid for, unless it is of the run that this command goes on with."""
    if holds_something(file) and not _goes_on(file, arguments, settings):
        advice = "It may be what an earlier run paid for: name another file, or move that one away."
        if "checkpoint" in arguments:
            advice += " The command of a run that stopped goes on with its --ledger and --checkpoint."
        raise fail("--out", "a file that does not exist yet", str(file), advice)


def _goes_on(file: Path, arguments: argparse.Namespace, settings: Settings) -> bool:
    """Whether the run's checkpoint, or the memo of its workers, holds what the file of the same component holds."""
    checkpoint, has_workers = settings.get("checkpoint"), getattr(arguments, "ray", None) is not None
    is_kept = checkpoint is not None and check_path("checkpoint", checkpoint).exists()
    if settings.budget.ledger is None or not (is_kept or (has_workers and settings.method != "evolution")):
        return False
    try:
        return bool(read_json(file)["report"]["component"] == name_of(settings))
    except (ConfigurationError, LookupError, TypeError):  # a file of something else
        return False


_OF_WORKERS = "memo of the workers"


def check_newest(run: Any, out: Path, *, kept: str | None) -> None:
    """Refuses a run of another ledger than --out, and one that holds less: a save would lose what is paid for.

    Args:
      run: holds what was released.
      out: the file, which may be missing.
      kept: what tells the run of earlier releases; None: it has not yet.
    """
    from langchain_dpicl.released.soft_prompt import OURS

    file = out / OURS if out.is_dir() else out
    if not holds_something(file):
        return
    held, known = read_json(file), json.loads(run.result.to_json())
    ledgers = [state["report"].get("ledger_id", known["report"].get("ledger_id")) for state in (held, known)]
    advice = "It may be an older copy, or lack what was released as a command stopped: bring the newest back, or give"
    advice += " another --out."
    if kept == _OF_WORKERS:
        advice = f"The file stays. The same command goes on if this one stopped. {advice}"
    if ledgers[0] != ledgers[1]:
        raise fail("--ledger", f"the one that paid for {str(file)!r}", "another", "Give another --out.")
    if kept is not None and _paid_for(held, known) - _paid_for(known, known):
        raise fail(kept, f"all that {str(file)!r} holds", "less", advice)


def _is_paid(released: Any) -> bool:
    """Whether a result holds something that was paid for: a pool whose inputs all wait does not."""
    state = json.loads(released.to_json())
    return bool(_paid_for(state, state))


def _paid_for(state: dict[str, Any], known: dict[str, Any]) -> Counter[str]:
    """Counts what a file holds of all that was released: its steps, where each replaces the one before, or its items.

    Args:
      state: the JSON values of the file; what it does not name counts as none.
      known: those of the run that goes on with it, which say what can be there.
    """
    if "step" in known["report"]:
        step = state["report"].get("step")
        return +Counter(step=step if isinstance(step, int) else 0)  # without +, zero steps would count as an item
    named = {**state["report"], **state}
    parts = {name: named.get(name, []) for name, part in {**known["report"], **known}.items() if isinstance(part, list)}
    if wrong := [name for name, part in parts.items() if not isinstance(part, list)]:
        advice = "It was changed by hand: name another file, or move that one away."
        raise fail("--out", f"a list under {wrong[0]!r}", type(parts[wrong[0]]).__name__, advice)
    items = [item for part in parts.values() for each in part for item in _items_in(each)]
    return Counter(json.dumps(item, sort_keys=True) for item in items)  # two texts may be equal


def _items_in(item: Any) -> list[Any]:
    """Returns what was paid for as one, of an item of a list: every word of a group, which grows until its last pair.

    Names of labels cost nothing; inputs of a pool that wait, or came with a label, cost nothing either.
    """
    if not isinstance(item, dict):
        return [item] if isinstance(item, list) else []
    if isinstance(item.get("fields"), dict) and item.get("status") in ("waiting", "public"):
        return []
    parts = {name: part for name, part in item.items() if isinstance(part, list)}
    return [[item.get("label"), name, one] for name, part in parts.items() for one in part] if parts else [item]


def warn_of_embedded(settings: Settings) -> None:
    """Warns before a budget is spent on texts by the model that is there for trying things out."""
    if settings.model.name == "embedded":
        words = "the embedded model writes keywords and phrases of its own public text; --model names one that writes"
        warnings.warn(words, stacklevel=2)


def needed_out(arguments: argparse.Namespace) -> Path:
    """Returns the target of what is released, which a run that spends needs."""
    if arguments.out is None:
        raise ConfigurationError("--out: expected the file for what is released, found none. Name it, or --dry-run.")
    out: Path = arguments.out
    return out


def public_lines(path: Path, records: Path | None, option: str) -> list[str]:
    """Returns the lines of a public file, which is not that of the records."""
    check_public(path, records, option)
    lines = map(str.strip, read_text(path, "lines of text").splitlines())
    return [line for line in lines if line]


def public_items(path: Path, records: Path | None, option: str) -> list[Any]:
    """Returns the public texts or objects of a file: JSON lines, CSV, or one text a line."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".csv")):
        check_public(path, records, option)
        return read_records(path)
    if name.endswith((".json", ".ndjson", ".tsv", ".xlsx", ".parquet")):
        raise fail(option, "JSON lines (.jsonl), CSV (.csv) or one text a line (.txt)", path.name)
    return list(public_lines(path, records, option))


def check_public(path: Path, records: Path | None, option: str) -> None:
    """Refuses the file of the records where a public one is expected."""
    if records is not None and path.exists() and records.exists() and path.samefile(records):
        raise ConfigurationError(f"{option}: expected a PUBLIC file, found the records, {path}.")


# -- the budget ------------------------------------------------------------------------------------------------------


def budget_of(settings: Settings) -> PrivacyBudgetCallbackHandler:
    """Returns a new budget in memory, or opens the ledger that was named."""
    from langchain_dpicl.budget.handler import PrivacyBudgetCallbackHandler

    limits = settings.budget
    _check_outlives(settings)
    if limits.ledger is None:
        return PrivacyBudgetCallbackHandler(**limits.new())
    budget = PrivacyBudgetCallbackHandler.open(limits.ledger, anchor=limits.anchor)
    if limits.adjacency not in {None, budget.adjacency}:
        msg = f"budget.adjacency: expected {budget.adjacency}, as of the ledger, found {limits.adjacency}."
        raise ConfigurationError(msg)
    if not settings.get("component") and settings.data.dataset_id is None:
        advice = "What stands in the ledger under a name is found again, whatever file is read."
        raise ConfigurationError(f"--component: expected a name, or data.dataset_id, with --ledger. {advice}")
    return budget


def _check_outlives(settings: Settings) -> None:
    """Refuses a checkpoint without a ledger."""
    if settings.budget.ledger is None and settings.get("checkpoint") is not None:
        advice = "A budget in memory ends with its command, so that no other one can continue the run."
        raise fail("--checkpoint", "a --ledger beside it", None, advice)


def share_of(settings: Settings) -> dict[str, Any]:
    """Returns what a component takes of its budget besides its settings: its epsilon, a name, its part of delta."""
    taken: dict[str, Any] = {"epsilon": settings.get("epsilon", settings.budget.epsilon)}
    if settings.budget.ledger is not None:
        taken["component"] = name_of(settings)
        noise = settings.get("noise")
        if settings.budget.delta is not None and getattr(noise, "delta", None) is None:
            noise = Noise() if noise is None else noise
            kinds = settings.noise_kinds()
            taken["noise"] = noise_of(noise, *kinds).replace(delta=settings.budget.delta)
    return taken


def voted_on(settings: Settings) -> tuple[PrivateExamples, FewShotTemplate]:
    """Returns the declaration of the records, without one of them, and how prompts of a vote read."""
    private = private_examples(settings, are_read=False)
    return private, task_of(settings, private, rehearsed(settings).get("rows")).wording


def rehearsed(settings: Settings) -> dict[str, Any]:
    """Returns the rows that a rehearsal chooses; nothing where none is named."""
    from langchain_dpicl.rehearsal.rehearsal import Rehearsal

    if settings.guess.rehearsal is None:
        return {}
    if settings.get("rows") is not None:
        raise fail("guess.rehearsal", "a rehearsal, which chooses the rows, or rows", "both")
    return {"rows": Rehearsal.load(settings.guess.rehearsal)}


# -- a dry run -------------------------------------------------------------------------------------------------------


def on_ledger(settings: Settings) -> Settings:
    """Returns the settings with the terms that the named ledger gives a share.

    Refuses one that does not fit, or that the ledger holds at another epsilon, delta or number of queries, and records
    that it holds under another declaration. Warns of what is left of one that it holds.
    """
    from langchain_dpicl.privacy.ledger.writer import check_declared, check_same_terms

    if settings.budget.ledger is None:
        return settings
    budget = budget_of(settings)
    try:
        epsilon = settings.get("epsilon", settings.budget.epsilon)
        if epsilon is None:
            raise fail("epsilon", "this component's share of the ledger", None, "Give --epsilon.")
        own = getattr(settings.get("noise"), "delta", None)
        delta = settings.budget.delta if own is None else own
        delta = budget.budget.default_delta(epsilon) if delta is None else delta
        name = name_of(settings)
        budget.budget.check_fits(name, epsilon=epsilon, delta=delta)
        report, data = budget.report(), settings.data
        if data.public_size is not None and (data.label_key is None or data.num_labels()):
            mine = private_examples(settings, are_read=False).declaration
            check_declared({each["dataset_id"]: each for each in report.datasets}.get(mine["dataset_id"]), mine)
        for share in report.shares:
            for each in share.terms.components:
                if each.name == name:  # its other tickets are known to the component alone
                    wanted = {"epsilon": epsilon, "delta": delta, "plan": settings.only("max_queries")}
                    check_same_terms(dataclasses.replace(each, **wanted), each)
        if (held := budget.budget.use().tickets.get(name)) is not None:
            words = f"{name!r} is a share of this ledger: {held.left:,} of its tickets are left for the same command"
            warnings.warn(words, stacklevel=1)
        limits = settings.budget.replace(epsilon=epsilon, delta=delta, adjacency=budget.adjacency)
        return dataclasses.replace(settings, budget=limits)
    finally:
        budget.budget.close()


def dry_run(call: Call) -> int:
    """Prints the plan of a run; reads no record, asks no model and spends nothing."""
    check_model(call.settings.model)
    _check_outlives(call.settings)
    settings = on_ledger(call.settings)
    private_examples(settings, are_read=False)  # refuses what is missing, which a plan would fill in
    call.say(planned(settings, compares=False, as_json=call.arguments.json))
    return DONE


# -- what is released ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stopped_like_ctrl_c() -> Iterator[None]:
    """Has SIGTERM, and a terminal that closes, stop what runs as Ctrl-C does, unless `nohup` lets it run on."""

    def stop(*_: object) -> None:
        for number in numbers:  # a shell that ends sends SIGHUP too: the second one would stop the save
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    can_be_set = threading.current_thread() is threading.main_thread()
    known = (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)) if can_be_set else ()
    numbers = {number for number in known if signal.getsignal(number) == signal.SIG_DFL}
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@_stopped_like_ctrl_c()
def release(run: Any, call: Call, *, shown: Callable[[Any], str], budget: Any, has_workers: bool = False) -> int:
    """Runs to the end, printing each item; saves what was released, whatever ends the run."""
    arguments, code, stopped, has_some, has_ended = call.arguments, DONE, "", False, False
    fault: OSError | ConfigurationError | None = None
    check_unchanged(call)
    check_newest(run, arguments.out, kept=None if has_workers else "--checkpoint")
    try:
        for item in run.stream(progress=call.progress):
            has_some = True
            if not call.is_quiet and (line := shown(item)):
                call.say(line)
        has_ended = True
    except RunInterruptedError as error:
        code, stopped = exit_code_of(error), as_typed(str(error).split(" Call run()", 1)[0])
    except KeyboardInterrupt:
        code, stopped = INTERRUPTED, "Interrupted. Tickets that burnt stay charged."
    finally:
        # A run that stopped, or has no tickets left, may have nothing to save: the next one needs the file's name, and
        # what an earlier one paid for must stay.
        has_some = has_some or _holds_paid(run)
        is_new = has_ended and not holds_something(arguments.out)
        if has_some or (is_new and _is_paid(run.result)):
            # Workers tell one by one what their memo holds: a run that was stopped knows less than a file may hold.
            check = partial(check_newest, run, arguments.out, kept=_OF_WORKERS) if has_workers else None
            fault = _fault_of_saving(run, call, has_ended=has_ended, is_said=not (has_ended or stopped), check=check)
    if stopped:
        again = _continuation(call, has_workers=has_workers, is_durable=budget.budget.durable, has_some=has_some)
        saved = f"What was released is saved in {arguments.out}." if has_some else "Nothing was released."
        if isinstance(fault, ConfigurationError):  # it says what to do
            again = ""
        call.complain(" ".join(filter(None, (stopped, "" if fault else saved, again))))
    if arguments.json and fault is None and (has_some or "checkpoint" in arguments):
        call.say(run.result.to_json())
    elif not call.is_quiet:
        say_report(budget, say=call.say)
    return code


def _fault_of_saving(
    run: Any, call: Call, *, has_ended: bool, is_said: bool, check: Callable[[], None] | None
) -> OSError | ConfigurationError | None:
    """Saves what was released, or prints it and returns the fault of --out, which is not what stopped a run."""
    try:  # errors speak of the run's `result`
        save_or_print(run.result, call, is_said=is_said, check=check)
    except (OSError, ConfigurationError) as fault:
        if has_ended or getattr(fault, "filename", None) == "stdout":
            raise
        words = fault.strerror if isinstance(fault, OSError) else None
        call.complain(as_typed(str(fault)) if words is None else f"{call.arguments.out}: {words}.")
        return fault
    return None


def _holds_paid(run: Any) -> bool:
    """Whether a run holds what was paid for and it has not yielded: words without pairs, what its checkpoint holds."""
    if run.is_finished:
        return True
    try:
        return _is_paid(run.result)
    except ConfigurationError:  # a search for words that has found none yet has no result
        return False


def say_report(budget: PrivacyBudgetCallbackHandler, *, say: Say) -> None:
    """Prints the report of a budget, and below it what is left."""
    say("\n".join([str(budget.report()), "", *remaining_text(budget.budget)]))


def _continuation(call: Call, *, has_workers: bool, is_durable: bool, has_some: bool) -> str:
    if has_workers:
        return "The same command continues where this one stopped."
    if is_durable and "checkpoint" not in call.arguments:
        return f"The same command{' with another --out' if has_some else ''} releases what is left, if anything is."
    if is_durable and call.settings.get("checkpoint") is None:
        return "With --checkpoint FILE from the start the same command continues where it stopped."
    if is_durable:
        return "The same command continues where this one stopped, if tickets are left."
    return "A new run starts over, on a budget of its own."


_NOT_IN_IT = "What this command released is not in it."


def save_or_print(released: Any, call: Call, *, is_said: bool = False, check: Callable[[], None] | None = None) -> None:
    """Saves what was released; prints it, since it is paid for, if a check or that fails or another wrote to --out."""
    from langchain_dpicl.released.soft_prompt import SoftPrompt

    out, say, complain = call.arguments.out, call.say, call.complain
    try:
        if check is not None:
            check_unchanged(call, _NOT_IN_IT)
            check()
        _save(released, call)
    except (OSError, ConfigurationError):
        printed, told = str(released.to_json()), "The result is printed."
        if isinstance(released, SoftPrompt):  # its JSON has digests in place of its numbers
            files = {name: base64.b64encode(content).decode("ascii") for name, content in released.files().items()}
            printed = json.dumps({"files_in_base64": files})
            told = "The prompt's files are printed in base64, by name: decode each into a new folder."
        complain("The result is neither saved nor printed: nobody reads stdout." if say(printed) is False else told)
        raise
    if is_said:
        complain(f"What was released is saved in {out}, with its report.")


def _save(released: Any, call: Call) -> None:
    """Saves what was released; a new name is linked, which fails where another command has taken it by then."""
    from langchain_dpicl.released.soft_prompt import SoftPrompt, write_folder

    out = call.arguments.out
    check_unchanged(call, _NOT_IN_IT)
    if isinstance(released, SoftPrompt):
        write_folder(out, released.files(), check=lambda: check_unchanged(call, _NOT_IN_IT))
        return
    part = out.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with faults_of(out):
            released.save(part)
            try:
                out.hardlink_to(part)
            except (OSError, NotImplementedError):  # the name is taken, or there are no links here
                check_unchanged(call, _NOT_IN_IT)
                part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def check_unchanged(call: Call, advice: str = "This command charged nothing: name another file.") -> None:
    """Refuses to replace what another command wrote to --out meanwhile."""
    if call.stamp() not in {None, call.found}:
        advice = f"It may be paid for, and stays. {advice}"
        raise fail("--out", "a file that no other command writes meanwhile", str(call.arguments.out), advice)


def json_line(value: dict[str, Any]) -> str:
    """Returns one line of JSON that stdout can show as it is."""
    return json.dumps(value, ensure_ascii=not writes_utf8(sys.stdout))


def one_line(text: str) -> str:
    """Returns a public text on one line."""
    return " ".join(text.split())
