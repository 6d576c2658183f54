"""Runs `dpicl evaluate` and `dpicl choose`, which measure prompts on private records."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from langchain_dpicl._plain_files import MAX_TEXT, read_plain
from langchain_dpicl.cli.config import Settings, read_settings
from langchain_dpicl.cli.exit_codes import DONE
from langchain_dpicl.cli.inputs import load_model, load_named, private_examples
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
    save_or_print,
    say_report,
)
from langchain_dpicl.exceptions import ConfigurationError
from langchain_dpicl.privacy._validate import check_choice, fail
from langchain_dpicl.privacy.extensions.part_split import Part, name_of_parts, sizes_of_parts

if TYPE_CHECKING:
    from langchain_dpicl.cli.parser import Parser
    from langchain_dpicl.evaluation.evaluators import BoundEvaluator
    from langchain_dpicl.evaluation.plan import ChoicePlan, EvaluationPlan

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
    if len(arguments.prompt) != 1:
        raise fail("--prompt", "one file; `dpicl choose` compares several", len(arguments.prompt))
    if arguments.dry_run:
        return _dry_run(call, _evaluation_plan(call, evaluator))
    check_target(arguments, call.settings)
    model = _model(call.settings)
    baseline = None if arguments.baseline is None else _template(arguments.baseline) | model
    return _released(call, dp_evaluate, _template(arguments.prompt[0]) | model, evaluators=evaluator, baseline=baseline)


def run_choose(arguments: argparse.Namespace, *, say: Say, complain: Say) -> int:
    """Chooses a prompt; returns the exit code."""
    from langchain_dpicl.evaluation import dp_choose

    call, evaluator = _call_of(arguments, "choice", say, complain)
    if len(arguments.prompt) < 2:
        raise fail("--prompt", "two files or more, each with its own --prompt", len(arguments.prompt))
    names = _names(arguments.prompt)
    if arguments.dry_run:
        return _dry_run(call, _choice_plan(call, evaluator, len(names)))
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
    name = arguments.evaluator
    evaluator = Exact() if name is None else load_named("--evaluator", name)
    if not isinstance(evaluator, Evaluator):
        raise fail("--evaluator", "a Score or a Judge of langchain_dpicl.evaluation", type(evaluator).__name__)
    return Call(arguments, settings, say, complain), evaluator


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns the name of each prompt: that of its file, or its path where two files have one name."""
    names = [path.stem for path in paths]
    names = names if len(set(names)) == len(names) else list(map(str, paths))
    if len(set(names)) < len(names):
        raise fail("--prompt", "different files", names)
    return names


def _template(path: Path) -> Any:
    from langchain_core.prompts import PromptTemplate

    try:
        return PromptTemplate.from_template(read_plain(path, MAX_TEXT).decode("utf-8-sig").rstrip("\r\n"))
    except ValueError as error:  # a brace without its partner, or bytes that are no UTF-8; the file is public
        raise ConfigurationError(f"--prompt: expected an f-string template in UTF-8, found {path}: {error}.") from None


def _model(settings: Settings) -> Any:
    """Returns the model of a chain, which LangChain calls."""
    if settings.model.name == "embedded":
        from langchain_dpicl.serving.models import EmbeddedLLM

        return EmbeddedLLM(max_tokens=8)
    if Path(settings.model.name).is_dir():
        advice = "Wrap the folder: my_models.py with llm = LocalLLM(...), and --model my_models:llm."
        raise fail("--model", "embedded, provider:model or module:name", settings.model.name, advice)
    return load_model(settings.model)


def _released(call: Call, release: Any, *chains: Any, **asked: Any) -> int:
    settings, arguments = call.settings, call.arguments
    budget = budget_of(settings)
    result = release(
        *chains,
        private_examples(settings),
        budget=budget,
        progress=call.progress,
        sample=_sample(call),
        **asked,
        **_share(settings),
    )
    save_or_print(result, arguments.out, say=call.say)
    if arguments.json:
        call.say(result.to_json())
    elif not arguments.quiet:
        call.say(f"{result}\n")
        say_report(call, budget)
    return DONE


def _sample(call: Call) -> int | None:
    found: int | None = call.settings.get("sample") if call.arguments.sample is None else call.arguments.sample
    return found


def _share(settings: Settings) -> dict[str, Any]:
    """Returns the epsilon, the name and the other parameters of the call."""
    name = settings.get("component")
    if name is None and settings.budget.ledger is not None:
        name = f"{settings.method}-{settings.data.dataset_id}"
    epsilon = settings.get("epsilon", settings.budget.epsilon)
    return {**settings.only("inputs", "timeout", "part"), "component": name, "epsilon": epsilon}


# -- a dry run -------------------------------------------------------------------------------------------------------


def _evaluation_plan(call: Call, evaluator: Any) -> EvaluationPlan:
    from langchain_dpicl.evaluation import plan_evaluation
    from langchain_dpicl.evaluation.evaluators import paired

    bound, chains = _bound(call, evaluator), 1 if call.arguments.baseline is None else 2
    return plan_evaluation(
        widths=[(paired(bound) if chains == 2 else bound).widths],
        calls_per_unit=chains * (1 if bound.judge is None else 2),
        **_terms(call),
    )


def _choice_plan(call: Call, evaluator: Any, candidates: int) -> ChoicePlan:
    from langchain_dpicl.evaluation.plan import plan_choice

    bound = _bound(call, evaluator)
    return plan_choice(
        candidates=candidates,
        calls_per_unit=candidates * (1 if bound.judge is None else 2),
        is_rounded=len(set(bound.scores)) > 2,
        **_terms(call),
    )


def _bound(call: Call, evaluator: Any) -> BoundEvaluator:
    data = call.settings.data
    labels = data.labels or tuple(str(label) for label in data.sizes() if label is not None) or None
    fields = (data.text_key, *(data.fields or ()), *(() if data.label_key is None else (data.label_key,)))
    bound: BoundEvaluator = evaluator.bind(fields, data.label_key, labels)
    return bound


def _terms(call: Call) -> dict[str, Any]:
    settings = on_ledger(call.settings)
    part, size = settings.get("part"), sum(settings.data.sizes().values())
    name = settings.data.dataset_id or "private-examples"
    if part is not None:
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
    calls, expected = plan.cost().private_calls, plan.expected()
    if call.arguments.json:
        call.say(json.dumps({"plan": plan.to_dict(), "expected": expected, "calls": calls}, indent=2))
        return DONE
    if "lead" in expected:
        words = f"lead     {100 * expected['lead']:.2f} % of the range of marks above all others wins with 90 %"
    else:
        words = (
            f"width    of the 95 % interval at an accuracy of .8: +-{100 * expected['population']:.2f} points for the "
            f"population, +-{100 * expected['data']:.2f} for these records"
        )
    call.say(
        f"epsilon  {plan.epsilon:.4f} at delta {plan.delta:g}, adjacency {plan.adjacency}\n"
        f"reads    {plan.sample:,} of the declared units on average; {calls:,} calls\n{words}"
    )
    return DONE
