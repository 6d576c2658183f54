"""Runs `dpicl plan`: noise, calls, money and expected signal of every method, before anything is spent."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from langchain_dpicl.cli.inputs import (
    Settings,
    add_flags,
    add_settings,
    answers_in_text,
    name_of,
    private_examples,
    read_settings,
    toml_text,
)
from langchain_dpicl.exceptions import (
    ConfigurationError,
    NoisyPlanWarning,
    PrivacyBudgetExceededError,
    RestsOnGuessWarning,
)
from langchain_dpicl.options import (
    ConfidentGNMax,
    Decoding,
    Evolution,
    FewShotTask,
    LogitNoise,
    Noise,
    NoiseName,
    Rows,
    Student,
    noise_of,
    noise_with,
)
from langchain_dpicl.privacy._validate import fail, round_up_at
from langchain_dpicl.reports.rendering import format_rounded_up

if TYPE_CHECKING:
    from langchain_dpicl.documents import DocumentsPlan
    from langchain_dpicl.evolution import EvolutionPlan
    from langchain_dpicl.generation.plan import DesignOption, GenerationPlan, TokenRule
    from langchain_dpicl.pate.plan import LabellingOption, LabellingPlan
    from langchain_dpicl.planning.expected_utility import RowDesign
    from langchain_dpicl.planning.row_law import RowSource
    from langchain_dpicl.planning.share_plan import Cost
    from langchain_dpicl.privacy.private_examples import PrivateExamples
    from langchain_dpicl.rehearsal.choice import FreeRival, Proposal
    from langchain_dpicl.rehearsal.rehearsal import Rehearsal
    from langchain_dpicl.retrieval import RetrievalPlan
    from langchain_dpicl.runs.query_plan import QueryOption, QueryPlan, RowsPlan
    from langchain_dpicl.soft_prompts.plan import TrainingPlan
    from langchain_dpicl.tasks import VotingTask


_BOTH = "Give --documents-per-topic 0 for words of each topic alone, without a model, or N for N texts of each."


class _NotDeclaredError(Exception):
    """Leaves the open plan of a budget, so that nothing is declared in it."""


def plan_of_run(settings: Settings, private: PrivateExamples, **more: Any) -> Any:
    """Returns the plan of the component that a run builds, on a budget in memory and a model that is never asked.

    Refuses what a run would refuse before it spends. What the text of a plan says of guesses and noise is no warning.
    """
    from langsmith.run_helpers import tracing_context

    from langchain_dpicl.budget.budget import Budget

    kept = {name: value for name, value in settings.component.items() if name not in _FILES}
    if settings.budget.ledger is not None:
        kept["component"] = name_of(settings)
    door, budget = dataclasses.replace(settings, component=kept).door, Budget(**_terms(settings))
    plan: Any = None
    with warnings.catch_warnings(), tracing_context(enabled=False):  # tracing asks LangSmith's server
        given = {"llm": _model(settings), "budget": budget, "epsilon": settings.share_epsilon, **more}
        if settings.method != "documents":  # whose text says nothing of noise on its tokens
            warnings.simplefilter("ignore", NoisyPlanWarning)
        warnings.simplefilter("ignore", RestsOnGuessWarning)
        try:
            # A share that is declared alone is priced with second opinions, which take longer than the plan.
            with contextlib.suppress(_NotDeclaredError), budget.plan():
                plan = door(private, **given).plan
                raise _NotDeclaredError
        except PrivacyBudgetExceededError as error:
            raise _too_little_noise(settings, error.requested) from None
    return plan


_FILES = ("checkpoint", "serving")
"""Parameters that open files, which leave the plan as it is."""


def _model(settings: Settings) -> Any:
    """Returns a made-up model of the kind that the settings name: one that votes in text, or an engine."""
    from langchain_dpicl.backends.fake import FakeBackend

    if settings.method in _REHEARSED and _votes_in_text(settings):
        from langchain_core.language_models import FakeListLLM

        from langchain_dpicl.backends.langchain.texts import TextVoteBackend

        return TextVoteBackend(FakeListLLM(responses=["an answer"]))  # which asks it once whether it writes
    return FakeBackend(_refuse_call, vocabulary=_vocabulary(settings.get("decoding") or Decoding()))


def _refuse_call(*_: Any) -> NoReturn:
    raise ConfigurationError("plan: expected no call of a model, found one.")


def _votes_in_text(settings: Settings) -> bool:
    """Whether the model's answer in text is its vote, as far as its name says so."""
    return settings.answers.votes == "text" or answers_in_text(settings.model.name)


def _vocabulary(decoding: Decoding) -> list[bytes]:
    """Returns as many made-up tokens as there are candidates; under a grammar they can spell any text."""
    if decoding.candidates == "all":
        raise fail("decoding.candidates", "a number: a plan asks no model for its vocabulary", decoding.candidates)
    least = 0 if decoding.grammar is None else 256
    numbers = range(max(least, int(decoding.candidates)))
    return [number.to_bytes(max(1, (number.bit_length() + 7) // 8), "big") for number in numbers]


def documents_plan(settings: Settings, **more: Any) -> DocumentsPlan:
    """Returns the plan of a run."""
    if settings.get("documents_per_topic") is None:
        raise fail("documents_per_topic", "a number of texts, or 0", None, _BOTH)
    plan: DocumentsPlan = plan_of_run(settings, declared(settings), **more)
    return plan


def topic_size(sizes: Mapping[str | None, int], num_topics: int) -> int:
    """Returns the number of units of a topic, if all that are declared spread evenly."""
    return max(1, sum(sizes.values()) // num_topics)


def documents_output(settings: Settings, compares: bool) -> Output:  # noqa: ARG001
    """Returns the plan and what each part costs by itself, as `dpicl plan` prints it."""
    plan = documents_plan(settings)
    size = topic_size(settings.data.sizes(), plan.num_topics)
    return {"plan": plan.to_dict(), "parts": parts_of(plan), "topic_size": size, **plan.expected()}


def parts_of(plan: DocumentsPlan) -> dict[str, float]:
    """Returns the epsilon of topics, words and texts, each by itself at the plan's delta; together they cost less."""
    from langchain_dpicl.planning.share_plan import pricing_delta
    from langchain_dpicl.privacy import accounting
    from langchain_dpicl.privacy.ledger.tickets import event_of_tickets

    texts = () if plan.generation is None else plan.generation.tickets()
    first, *others = plan.tickets()
    words = [ticket for ticket in others if ticket not in texts]
    parts = {"topics": [first], "words": words, "texts": list(texts)}
    return {
        name: accounting.epsilon_upper_bound(
            event_of_tickets(tickets, partition=plan.partition), delta=pricing_delta(plan), adjacency=plan.adjacency
        )
        for name, tickets in parts.items()
        if tickets
    }


def documents_text(out: dict[str, Any]) -> str:
    """Returns the plan in words."""
    from langchain_dpicl.documents import DocumentsPlan

    plan = DocumentsPlan.rebuild(out["plan"])
    return "\n".join(plan_lines(plan, parts=out["parts"], size=out["topic_size"]))


def plan_lines(plan: DocumentsPlan, *, parts: dict[str, float], size: int) -> list[str]:
    """Returns what a plan does, brings and costs, part by part; `size` as `topic_size` has it."""
    cost = plan.cost()
    each = ", ".join(f"{name} {format_rounded_up(epsilon, 3)}" for name, epsilon in parts.items())
    lines = [
        f"epsilon  {price_text(plan.to_dict())}: all parts; alone: {each}",
        *_topic_lines(plan),
        *_word_lines(plan, size),
        *_text_lines(plan),
        f"cost     up to {cost.private_calls:,} private calls, {cost.public_calls:,} public ones",
    ]
    if plan.releases_words:
        lines.append("         Released words are words of the records, names too; read them, or give a review.")
    return lines


def _topic_lines(plan: DocumentsPlan) -> list[str]:
    rule, found = plan.topics.rule.to_dict(), plan.found_from(0.95)
    if plan.least_units is None:
        kind = f"words that many units write, {rule['max_values']} of each unit; Gaussian noise on sums of weights"
        return [
            f"topics   at most {plan.num_topics}: {kind}",
            f"         a word of {found} units with a chance of 95 %",
        ]
    noise = f"{plan.topics.mechanism.name} noise, deviation {plan.deviation:.1f} units"
    keywords = f"{len(rule['values']):,} public keywords, {rule['max_values']} of each unit"
    return [
        f"topics   at most {plan.num_topics} of {keywords}; {noise}",
        f"         from a noisy count of {plan.least_units} on: a keyword of {found} units with a chance of 95 %",
    ]


def _word_lines(plan: DocumentsPlan, size: int) -> list[str]:
    words, needed = plan.words, plan.words_from(0.95)
    if words is None or needed is None:
        return ["words    none leave; topics.words=8 releases those that many units of a topic write"]
    pairs = ", and pairs of those that are neighbours" if plan.pairs else ""
    noise = f"noise {words.scale:.2f}, threshold {words.mechanism.threshold:.1f}"
    alone = f"which words of one unit reach with a chance of {format_rounded_up(words.failure, 2)}"
    lines = [
        f"words    {words.rule.max_words} of each unit, by topic{pairs}; {noise}, {alone}",
        f"         a word of {needed} units of a topic with a chance of 95 %",
    ]
    if needed > size:
        lines.append(f"         but a topic has {size} units if they spread evenly over {plan.num_topics}")
    return lines


def _text_lines(plan: DocumentsPlan) -> list[str]:
    if plan.generation is None:
        return ["texts    none leave: the words of a topic are its document, and no model is asked"]
    shown = plan.generation.to_dict()
    rows = f"{shown['num_slots']} rows per token"
    each = f"{plan.documents_per_topic} of each topic"
    return [f"texts    {each}; {shown['mechanism']}, noise multiplier {_noise_text(shown)}, {rows}"]


Output = dict[str, Any]

_NOTES = """\
Nothing is read and nothing is spent. Keys of --config and --set are those of the options in Python, besides [guess]
(what is assumed: skill, growth and correlation of rows, or rehearsal, the file of `dpicl rehearse`; participants,
labels, ...; agreement of generation) and [cost] (price_in, price_out, record_tokens, query_tokens, ...). The
recommendation is printed as TOML, to be put into a --config file.
"""


def add_plan(commands: Any, *, run: Callable[[argparse.Namespace], int]) -> None:
    """Adds the command."""
    words = "noise, calls, money and expected signal"
    command = commands.add_parser(
        "plan", help=words, description=f"Shows {words}, before anything is spent.", notes=_NOTES
    )
    command.add_argument("--method", choices=tuple(_PLANNERS), help="what is planned (default: generation)")
    add_flags(command, ("epsilon", "delta", "adjacency", "public_size", "max_queries", "max_tokens"))
    add_flags(command, ("rehearsal", "public_inputs", "documents_per_topic"))
    add_settings(command)
    command.add_argument("--no-compare", action="store_true", help="skip the comparison of designs")
    command.add_argument("--json", action="store_true", help="print JSON and nothing else")
    command.set_defaults(run=run)


_REHEARSED = ("voting", "retrieval", "pate")
"""The methods whose rows vote, which is what a rehearsal measures."""


def plan_output(arguments: argparse.Namespace) -> str:
    """Returns what the command prints."""
    settings = read_settings(arguments, methods=tuple(_PLANNERS))
    _check_rehearsed(settings, "--method", "--rehearsal", "Name it.")
    _check_given(settings)
    return planned(settings, compares=not arguments.no_compare, as_json=arguments.json)


def planned(settings: Settings, *, compares: bool, as_json: bool) -> str:
    """Returns the plan of a method in words or as JSON; reads no record and spends nothing."""
    _check_rehearsed(settings, "method", "guess.rehearsal")
    planner, in_words = _PLANNERS[settings.method]
    out = planner(settings, compares)
    if out["plan"]["epsilon"] > settings.share_epsilon:
        raise _too_little_noise(settings, out["plan"]["epsilon"])
    return json.dumps(out, indent=2) if as_json else in_words(out)


def _too_little_noise(settings: Settings, epsilon: float) -> ConfigurationError:
    """Returns the error of given noise that costs more than the share."""
    name, advice = "noise.multiplier", "Raise noise.multiplier, or leave it out."
    if isinstance(settings.get("noise"), ConfidentGNMax):
        name, advice = "noise.vote_stddev, noise.test_stddev", "Raise them."
    elif _given_noise(settings) is None:
        name = "noise.clip, decoding.temperature"
        advice = "Give one of the two, or raise the temperature or rows.slots."
    found = float(format_rounded_up(epsilon))
    return fail(name, f"noise that costs at most epsilon {settings.share_epsilon}", found, advice)


def price_text(plan: Mapping[str, Any]) -> str:
    """Returns what a plan costs at most; the word epsilon comes before it."""
    epsilon, delta = format_rounded_up(plan["epsilon"], 4), format_rounded_up(plan["delta"])
    return f"{epsilon} at delta {delta}, adjacency {plan['adjacency']}"


def _noise_text(plan: Mapping[str, Any], places: int = 4) -> str:
    """Returns a plan's noise multiplier as text, rounded up: who sets what stands there has enough noise."""
    return f"{round_up_at(plan['noise_multiplier'], places):.{places}f}"


def _check_rehearsed(settings: Settings, method: str, rehearsal: str, advice: str = "") -> None:
    """Refuses a rehearsal that the plan of a method would not read."""
    if settings.guess.rehearsal is not None and settings.method not in _REHEARSED:
        raise fail(method, f"one of {list(_REHEARSED)} beside {rehearsal}", settings.method, advice)


def _check_given(settings: Settings) -> None:
    """Names all that a plan lacks at once."""
    own_delta = getattr(settings.get("noise"), "delta", None)
    given = {
        "--public-size": settings.data.public_size,
        "--epsilon": settings.budget.epsilon if settings.get("epsilon") is None else settings.get("epsilon"),
        "--delta": settings.budget.delta if own_delta is None else own_delta,
    }
    if settings.method == "voting":
        given["--max-queries"] = settings.get("max_queries")
    if missing := [flag for flag, value in given.items() if value is None]:
        raise ConfigurationError(f"{', '.join(missing)}: expected a value, found none. `dpicl plan --help` shows them.")


def declared(settings: Settings, labels: Sequence[str] = ()) -> PrivateExamples:
    """Returns the declaration of the records, without one of them; refuses what a run would refuse.

    What a plan can do without is filled in: the field of the label, and `labels` where none are named.
    """
    from langchain_dpicl.privacy.private_examples import Pool

    data = settings.data
    label_key = data.label_key or ("label" if data.text_key != "label" else "label of the text")
    if data.num_labels():
        data = data.replace(label_key=label_key)
    elif labels and (settings.get("task") or FewShotTask()).labels is None:
        data = data.replace(label_key=label_key, labels=tuple(labels))
    private = private_examples(dataclasses.replace(settings, data=data), are_read=False)
    # A sample of a fixed size checks how many units there are, which is as many as are declared.
    units = sum(data.sizes().values())
    private._open = lambda _: Pool(lambda: units, lambda _: ())  # noqa: SLF001  of no records
    private.check_delta(max(settings.share_delta, settings.budget.delta or 0))
    return private


def _terms(settings: Settings) -> dict[str, Any]:
    """Returns the share's epsilon and delta, and the adjacency."""
    return {"epsilon": settings.share_epsilon, "delta": settings.share_delta, "adjacency": settings.adjacency}


def _named_labels(settings: Settings) -> tuple[str, ...]:
    """Returns the labels that are named: of the task, or of the records; none: ()."""
    sizes = settings.data.public_size
    named = tuple(map(str, sizes)) if isinstance(sizes, Mapping) else ()
    return (settings.get("task") or FewShotTask()).labels or settings.data.labels or named


def _labels(settings: Settings, source: RowSource) -> tuple[str, ...]:
    """Returns the labels that are named, as many made-up ones as are guessed, or those that were rehearsed."""
    made_up = tuple(f"made-up label {number}" for number in range(1, 1 + (settings.guess.labels or 0)))
    labels: tuple[str, ...] = _named_labels(settings) or made_up or getattr(source, "labels", ())
    if len(labels) < 2:
        advice = "Give --set guess.labels=N, or --public-size LABEL=N for each."
        raise fail("guess.labels", "the number of labels, at least 2", len(labels) or None, advice)
    return labels


def _max_queries(settings: Settings) -> Any:
    value = settings.get("max_queries")
    if value is None:
        raise fail("max_queries", "a number", None, "Give --max-queries N.")
    return value


def _given_noise(settings: Settings) -> float | None:
    """Returns the noise multiplier that was given; None: the plan finds it."""
    return getattr(settings.get("noise"), "multiplier", None)


def _cost_of(cost: Cost, settings: Settings, *, max_queries: int | None = None) -> Output:
    """Returns what a plan's calls cost as JSON values, per query too where it answers queries."""
    calls = cost.private_calls + cost.public_calls
    return {
        **({} if max_queries is None else {"calls_per_query": calls / max_queries}),
        **dataclasses.asdict(cost),
        "money": _money(cost, settings),
    }


def _money(cost: Cost, settings: Settings) -> float:
    return cost.money(price_in=settings.cost.price_in, price_out=settings.cost.price_out)


def money_text(money: float) -> str:
    """Returns what calls cost in words: without a price, 0.00 would read as free."""
    return f"money {money:.{2 if money >= 0.1 else 4}f}" if money else "no price given"


def _caps(settings: Settings, calls_per_row: int) -> dict[str, int]:
    """Returns the public caps of a call as `cost` takes them."""
    names = ("record_tokens", "query_tokens", "answer_tokens")
    return {**{name: getattr(settings.cost, name) for name in names}, "calls_per_row": calls_per_row}


def toml_lines(settings: Mapping[str, Any]) -> list[str]:
    """Returns settings as lines of TOML."""
    return [f"  {name} = {toml_text(value)}" for name, value in settings.items()]


# -- columns ---------------------------------------------------------------------------------------------------------

_COLUMNS: Mapping[str, tuple[str, str]] = {
    "teachers": ("<11", "{teachers}"),
    "mechanism": ("<17", "{mechanism}"),
    "rows": ("<7", "{rows}"),
    "M x k": ("<10", "{num_slots} x {shots_per_slot}"),
    "fill": (">5", "{fill}"),
    "c": (">4", "{redraw_every}"),
    " sampling": ("<10", " {sampling}"),
    "inputs": (">8", "{max_queries:,}"),
    "batch": (">9", "{expected_batch_size:,}"),
    "steps": (">9", "{steps:,}"),
    "noise": (">9", "{noise}"),
    "multiplier": (">12", "{multiplier}"),
    "on the average": (">17", "{noise_scale:.3g}"),
    "in clips": (">11", "{noise_to_clip:.3g}"),
    "row right": (">11", "{row_right:.1%}"),
    "right token": (">13", "{right_token_prob:.1%}"),
    "right label": (">13", "{right_label_prob:.1%}"),
    "at most": (">9", "{ceiling_prob:.1%}"),
    "calls": (">12", "{private_calls:,}"),
    "money": (">11", "{in_money}"),
    "unlimited": (">11", "{ceiling_prob:.1%}"),
    "local tokens": (">14", "{local_tokens:,}"),
    "": ("", "{reading}"),
}
"""Alignment, width and cell of a column, by its head."""


def _table(heads: Sequence[str], options: Iterable[Output]) -> list[str]:
    """Returns a line of heads, and one for each compared option."""
    cells = [heads, *([_COLUMNS[head][1].format(**_in_texts(one)) for head in heads] for one in options)]
    lines = ([f"{cell:{_COLUMNS[head][0]}}" for head, cell in zip(heads, line, strict=True)] for line in cells)
    return [f"  {''.join(line)}" for line in lines]


def _in_texts(option: Output) -> Output:
    """Returns an option with what its columns show besides its own numbers."""
    is_filled = option.get("rows") == "slots" and option["sampling"] in {"poisson", "disjoint"}
    return {
        **option,
        "fill": f"{option['overfill']:g}" if is_filled else "-",
        "noise": _noise_text(option, 3),
        "multiplier": _noise_text(option),
        "local_tokens": option.get("prefilled_tokens", 0) + option.get("decoded_tokens", 0),
        "in_money": f"{option['money']:,.2f}" if option.get("money") else "-",
        "reading": " calibrated" if option.get("calibrated") else "",
    }


# -- generation ------------------------------------------------------------------------------------------------------


def _generation(settings: Settings, compares: bool) -> Output:
    from langchain_dpicl.generation.plan import local_cost, noise_advice, published_epsilon, signal_of, word_shares

    agreement, caps = _agreed(settings), settings.cost.record_tokens
    plan: GenerationPlan = plan_of_run(settings, declared(settings))
    agreed: dict[str, Any] = {"one_shot": agreement, "public_agreement": settings.guess.public_agreement}
    signal = signal_of(plan, **agreed)
    out: Output = {
        "plan": plan.to_dict(),
        "cost": _cost_of(plan.cost(record_tokens=caps), settings),
        "local": dataclasses.asdict(local_cost(plan, record_tokens=caps)),
        "signal": {
            "one_shot_agreement": agreement,
            "rests_on": "a guess",
            **signal,
            "advice": noise_advice(signal),
        },
        "options": [],
    }
    if plan.rule.is_logit:
        out["published_epsilon"] = published_epsilon(plan)
    if plan.words is not None:
        out["words_from"], out["word_shares"] = plan.words_from(), []
        if compares and _given_noise(settings) is None:
            out["word_shares"] = word_shares(plan, epsilon=settings.share_epsilon)
    if compares:
        out |= _generation_options(settings, plan)
    return out


def _agreed(settings: Settings) -> float:
    """Returns the guessed agreement on tokens, which no file of `dpicl rehearse` holds."""
    from langchain_dpicl.generation.plan import AGREEMENT

    if others := settings.guess.given("skill", "growth", "correlation", "rehearsal"):
        raise fail("guess", "agreement and public_agreement for a generation", list(others))
    if settings.guess.labels is not None and not _named_labels(settings):
        advice = "Give --public-size LABEL=N for each."
        raise fail("guess.labels", "labels with their names for a generation", settings.guess.labels, advice)
    return AGREEMENT if settings.guess.agreement is None else settings.guess.agreement


def _generation_options(settings: Settings, plan: GenerationPlan) -> Output:
    """Returns the options, best first, and the recommended ones."""
    from langchain_dpicl.generation.plan import best_drawn, compare, thriftiest

    guess, rule = settings.guess, plan.rule
    options = compare(
        dict(plan.sizes),
        **_terms(settings),
        base=plan.design,
        redraw_every=plan.release.redraw_every,
        shots_per_label=plan.shots_per_label,
        segments=plan.segments,
        candidates=plan.candidates,
        record_tokens=settings.cost.record_tokens,
        agreement=_agreed(settings),
        public_agreement=guess.public_agreement,
        full_vocabulary=guess.full_vocabulary or rule.is_logit,
        rule=rule,
        words=plan.words,
    )

    def shown(option: DesignOption) -> Output:
        numbers = option.to_dict()
        return {**numbers, "settings": _generation_settings(settings, option, rule)}

    comparison: Output = {"options": [shown(option) for option in options]}
    comparison["recommendation"] = comparison["options"][0]
    drawn = best_drawn(options)
    if drawn is not None:
        comparison["recommendation_drawn"] = shown(drawn)
        comparison["recommendation_local"] = shown(thriftiest(options))
    return comparison


def _generation_settings(settings: Settings, option: DesignOption, rule: TokenRule) -> Output:
    """Returns the settings of a design, with what was asked of its mechanism."""
    mechanism, redraw_every = option.plan.rule.mechanism, option.plan.release.redraw_every
    redrawn = {} if redraw_every == 1 else {"redraw_every": redraw_every}
    found: Output = {"noise": mechanism, "rows": {**option.plan.design.option(), **redrawn}}
    noise, decoding = settings.get("noise"), settings.get("decoding")
    if mechanism != rule.mechanism or not isinstance(noise, LogitNoise):
        return found
    # Designs are compared at equal epsilon, which decides the noise; clip and temperature together would decide it too.
    has_temperature = decoding is not None and decoding.temperature is not None
    left_out = {"multiplier", "clip"} if has_temperature else {"multiplier"}
    asked = {name: value for name, value in noise.to_dict().items() if name not in left_out}
    return {**found, "noise": asked} | ({"decoding": {"temperature": decoding.temperature}} if has_temperature else {})


def _generation_text(out: dict[str, Any]) -> str:
    plan, cost, local = out["plan"], out["cost"], out["local"]
    lines = [
        f"epsilon {price_text(plan)} (nothing is spent)",
        *_token_noise_text(plan, out),
        *_words_text(plan, out),
        "rows     {rows}, {num_slots} x {shots_per_slot} shot(s), {how}, {candidates} candidates".format(
            **plan, how=_sample_text(plan)
        ),
    ]
    for row in plan["labels"]:
        who = "all records" if row["label"] is None else row["label"]
        lines.append(f"         {who}: {row['public_size']} declared units, sampling rate {row['sampling_rate']:.5f}")
    lines += _token_signal_text(out["signal"])
    lines.append(
        "cost     {private_calls:,} private + {public_calls:,} public calls, {tokens_in:,} tokens in, "
        "{tokens_out:,} out, ".format(**cost)
        + money_text(cost["money"])
    )
    lines.append(
        "local    {prefills:,} prompts of {prefilled_tokens:,} tokens read + {decoded_tokens:,} tokens decoded, "
        "where a sample's cache is kept".format(**local)
    )
    return "\n".join(lines + _generation_options_text(out))


def _words_text(plan: dict[str, Any], out: dict[str, Any]) -> list[str]:
    """Returns what words that leave before the texts need and cost, and what other parts of epsilon would do."""
    if "words" not in plan:
        return []
    release, whose = plan["words"], "" if plan["labels"][0]["label"] is None else " of a label"
    noise = f"noise {release['scale']:.2f}, threshold {release['mechanism']['threshold']:.1f}"
    alone = f"which words of one unit reach with a chance of {format_rounded_up(release['failure'], 2)}"
    lines = [
        f"words    before the texts, {release['rule']['max_values']} of each unit; {noise}, {alone}",
        f"         a word of {out['words_from']} units{whose} with a chance of 95 %; names too: read them",
    ]
    if out["word_shares"]:
        lines.append("         alone at a part of epsilon: units that a word needs, and the texts' noise (roughly)")
    for row in out["word_shares"]:
        needed = "no words" if row["words_from"] is None else f"{row['words_from']:,} units"
        lines.append(f"           {row['share']:>4.0%}  {needed:>12}  multiplier {_noise_text(row)}")
    least = min(row["public_size"] for row in plan["labels"])
    if out["words_from"] > least:
        lines.append(f"         the smallest one declares {least} units: too few for a word")
    return lines


def _token_noise_text(plan: dict[str, Any], out: dict[str, Any]) -> list[str]:
    if "published_epsilon" not in out:
        noise = f"multiplier {_noise_text(plan)} of the sensitivity " + "(scale {noise_scale:.3f} on the sum)"
        return ["noise    {mechanism}, ".format(**plan) + noise.format(**plan)]
    blend = ", blend weight {blend_weight:g}".format(**plan) if "blend_weight" in plan else ""
    numbers = f"multiplier {_noise_text(plan)} of the range: " + "clip {clip:.4g}, temperature {temperature:.4g}"
    lines = ["noise    {mechanism}, ".format(**plan) + numbers.format(**plan) + blend]
    paper = out["published_epsilon"]
    if plan.get("free_tokens") is None:
        price = "no finite epsilon" if paper is None else f"epsilon {format_rounded_up(paper, 4)}"
        lines.append(f"         the paper's accounting: {price} for it (advanced composition; sampling earns nothing)")
    return lines


def _sample_text(plan: dict[str, Any]) -> str:
    if plan["sampling"] == "disjoint":
        return "one deal of disjoint batches"
    return f"a new sample every {plan['redraw_every']} token(s)"


def _token_signal_text(signal: dict[str, Any]) -> list[str]:
    whose = "" if signal["label"] is None else f"for {signal['label']}, the smallest declared label: "
    empty, right = 100 * signal["empty_slot_prob"], 100 * signal["right_token_prob"]
    share, one = 100 * signal["agreement"], 100 * signal["one_shot_agreement"]
    is_logit = "public_agreement" in signal
    lines = [
        f"expected {whose}"
        + "{expected_rows:.1f} rows in use, {expected_shots:.2f} shots each, ".format(**signal)
        + f"{empty:.1f} % empty slots",
        f"signal   {whose}signal-to-noise {signal['signal_to_noise']:.2f}, right token {right:.1f} %",
        "         rests on a GUESS"
        + (", which no rehearsal measures" if is_logit else ": rehearse_generation in Python measures it, free"),
        f"guess    {share:.1f} % of rows want the same token (guess.agreement: {one:.1f} % of one-shot); not measured",
    ]
    if is_logit:
        lines[1] += f" ({100 * signal['ceiling_prob']:.1f} % at unlimited epsilon: it is drawn from a softmax)"
        public = 100 * signal["public_agreement"]
        lines.append(
            f"         its chance after the public prompt: {public:.1f} % (guess.public_agreement); not measured"
        )
    if signal["advice"]:
        lines.append(f"advice   do not spend like this: {signal['advice']}")
    return lines


def _generation_options_text(out: dict[str, Any]) -> list[str]:
    if not out["options"]:
        return []
    has_logits = "recommendation_drawn" in out
    heads = ["mechanism", "rows", "M x k", "fill", "c", " sampling", "noise", "right token", "calls"]
    heads += ["unlimited", "local tokens"] if has_logits else []
    lines = ["", "designs at equal records per token and equal epsilon, best first:", *_table(heads, out["options"])]
    lines += ["", "recommended:", *toml_lines(out["recommendation"]["settings"])]
    if has_logits:
        lines += [
            "drawn, as a model draws:",
            *toml_lines(out["recommendation_drawn"]["settings"]),
            "fewest local tokens within 5 points:",
            *toml_lines(out["recommendation_local"]["settings"]),
            "",
            "right token: chance that the released token is the one most rows want; unlimited: at unlimited epsilon",
        ]
    return lines


# -- what votes rest on ----------------------------------------------------------------------------------------------


def _source(settings: Settings) -> RowSource:
    """Returns where the numbers of rows come from: the rehearsal that was named, which has the labels, or a guess."""
    from langchain_dpicl.planning.row_law import RowGuess
    from langchain_dpicl.rehearsal.rehearsal import Rehearsal

    guess = settings.guess
    if others := guess.given("agreement", "public_agreement"):
        advice = "These say how often whole rows are right; agreement is of tokens."
        raise fail("guess", "skill, growth and correlation, or a rehearsal, for votes", list(others), advice)
    if guess.rehearsal is not None:
        found = Rehearsal.load(guess.rehearsal)
        if labels := _named_labels(settings):
            found.check_fits(labels=labels)
        return found
    return RowGuess(**guess.given("skill", "growth", "correlation"))


def _readings(settings: Settings, source: RowSource) -> dict[bool, int]:
    """Returns the calls per row, by whether rows are divided by those on content-free inputs."""
    answers = settings.answers
    asked, calls = answers.calibrate, settings.cost.calls_per_row
    content_free: Sequence[str] = getattr(source, "content_free", answers.content_free)
    known: Sequence[bool] = getattr(source, "readings", (bool(asked),))
    reads = [read for read in known if asked is None or read == asked]
    if not reads:
        raise fail("answers.calibrate", f"one of {list(known)}, as rows were rehearsed", asked)
    # Where nothing is asked for or rehearsed, rows are calibrated unless the model answers in text.
    calibrates = asked is None and not hasattr(source, "readings") and not _votes_in_text(settings)
    return {read: calls or (1 + len(content_free) if read or calibrates else 1) for read in reads}


def _best_reading(plan: RowsPlan, source: RowSource, readings: Mapping[bool, int], labels: int) -> bool:
    """Returns how more rows of a shape are right: as they are, or calibrated."""
    from langchain_dpicl.planning.expected_utility import shot_law
    from langchain_dpicl.planning.row_law import mean_facts

    law = shot_law(plan.release, plan.public_size)
    return max(readings, key=lambda read: mean_facts(source, labels=labels, law=law, calibrated=read).right)


def _signal(expected: Output, proposal: Proposal | None) -> Output:
    """Returns what is expected; of rows that a rehearsal chose, what was predicted apart from the choice."""
    from langchain_dpicl.planning.expected_utility import ranges

    taken = expected["without_noise_prob"] - expected["right_label_prob"] - expected.get("abstain_prob", 0.0)
    signal = {**expected, "noise_takes": max(0.0, taken)}
    if proposal is not None:
        most = signal["ceiling_low"], signal["ceiling_high"]
        signal |= ranges(proposal.right, proposal.low, proposal.high, ceiling=proposal.at_most, most=most)
    return signal


def _verdict(
    signal: Output, source: RowSource, proposal: Proposal | None, rights: Callable[[Rehearsal], Sequence[float]]
) -> Output:
    """Returns what is free and how the plan compares with it, as far as a rehearsal says so."""
    from langchain_dpicl.rehearsal.choice import against_free, best_free
    from langchain_dpicl.rehearsal.rehearsal import Rehearsal

    if not isinstance(source, Rehearsal):
        return {}
    free: FreeRival = best_free(source)
    if proposal is not None:
        return {"free": dataclasses.asdict(free), "verdict": proposal.verdict}
    _, verdict = against_free(source, signal["right_label_prob"], np.array(rights(source)))
    return {"free": dataclasses.asdict(free), "verdict": verdict}


def _resampled(plan: RowsPlan, rehearsal: Rehearsal, calibrated: bool) -> Sequence[float]:
    """Returns the chance of the right label on each resample of a rehearsal."""
    from langchain_dpicl.planning.expected_utility import right_chances, shot_law

    law = shot_law(plan.release, plan.public_size)
    found: list[float] = right_chances(plan.release, plan.public_size, rehearsal.resampled(law, calibrated)).tolist()
    return found


def _signal_text(out: Output, *, abstained: str = "", fewer: str = "ask fewer queries") -> list[str]:
    """Returns the lines on the right label, what it rests on, and what is free."""
    from langchain_dpicl.planning.expected_utility import MUCH_NOISE

    signal = out["signal"]
    numbers = {name: 100 * value for name, value in signal.items() if isinstance(value, (int, float))}
    lines = [
        "signal   right label {right_label_prob:.0f} % ({right_label_low:.0f} to {right_label_high:.0f}), at most "
        "{ceiling_prob:.0f} % ({ceiling_low:.0f} to {ceiling_high:.0f}) whatever the noise; ".format(**numbers)
        + f"the noise takes {_points(signal['noise_takes'])}"
        + abstained,
        "         {row_right:.0f} % of rows are right, with a correlation of ".format(**numbers)
        + f"{signal['row_correlation']:.2f}; {_rests_on(signal['rests_on'])}",
    ]
    if "free" in out:
        lines.append(f"free     {_percent(out['free']['right'])} by {out['free']['name']}, at epsilon 0")
        lines.append(f"verdict  {out['verdict']}")
    if signal["noise_takes"] > MUCH_NOISE:
        warned = "" if "verdict" in out else "do not spend like this: "  # a verdict says whether to spend
        lines.append(
            f"advice   {warned}the noise takes {_points(signal['noise_takes'])}; {fewer}, "
            "declare more records, or raise epsilon"
        )
    return lines


def _verdict_of_option(option: Output, free: Output | None) -> str | None:
    """Returns how an option of the comparison stands beside what is free; None: that is not known."""
    from langchain_dpicl.rehearsal.choice import verdict_of

    return None if free is None else verdict_of(option["right_label_prob"] - free["right"])


def _measured_lines(out: Output) -> list[str]:
    """Returns what the chances of compared designs are where a rehearsal measured them."""
    if "free" not in out:
        return []
    return [
        "  as measured: the best of several looks better than it is. Signal and verdict are lowered by that for rows",
        "  that the rehearsal chose, not for given ones. It chose them for the usual noise of their shape: where",
        "  another noise comes first here, --set noise=NAME chooses rows for that one",
    ]


def _advice_lines(out: Output) -> list[str]:
    """Returns the lines on the best settings; where a free answer is as good, to spend nothing goes before them."""
    if "recommendation" not in out:
        return []
    best, free = out["recommendation"], out.get("free")
    settings = toml_lines(best["settings"])
    # Rows that were asked for have a verdict of their own; the best of the comparison may be better.
    verdict = out.get("verdict") if "verdict" in best else _verdict_of_option(best, free)
    if free is None or verdict != "no better than what is free":
        return ["", "recommended:", *settings]
    nothing = f"recommended: spend nothing; {_percent(free['right'])} by {free['name']}, at epsilon 0"
    return ["", nothing, "the best that can be bought all the same:", *settings]


def _rests_on(words: str) -> str:
    if words == "a guess":
        return "rests on a GUESS: `dpicl rehearse FILE` measures it, free"
    return f"rests on {words}"


def _points(share: float) -> str:
    return f"{100 * share:.0f} point{'' if round(100 * share) == 1 else 's'}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _votes_settings(
    settings: Settings, design: RowDesign, mechanism: str, *, calibrated: bool | None = None, **more: Any
) -> Output:
    """Returns the settings that take a shape of rows, a mechanism and a reading, with the other answers as asked."""
    asked = settings.answers
    answers = (asked if calibrated is None else asked.replace(calibrate=calibrated)).to_dict()
    return {"noise": mechanism, "rows": design.option(), **({"answers": answers} if answers else {}), **more}


# -- votes -----------------------------------------------------------------------------------------------------------


def _abstention(settings: Settings, labels: int, *, usual: str) -> float | None:
    """Returns the share of the expected votes that an answer needs, as a run would."""
    below = settings.answers.abstain_below or usual
    if below == "never":
        return None
    return 0.5 / labels if below == "auto" else float(below)


def _vote_mechanism(settings: Settings) -> NoiseName | None:
    """Returns the mechanism that was asked for; scores are released by the Gaussian one alone."""
    has_scores = settings.answers.scores
    asked: NoiseName | None = noise_of(settings.get("noise"), Noise).mechanism or ("gaussian" if has_scores else None)
    if has_scores and asked != "gaussian":
        raise fail("noise", "'gaussian' with answers.scores (the others release only an index)", asked)
    return asked


def num_wordings(settings: Settings) -> int:
    """Returns how many public wordings slots read in turn."""
    return 1 + len((settings.get("task") or FewShotTask()).wordings)


def _mechanisms(settings: Settings, first: str) -> tuple[str, ...]:
    """Returns the mechanisms that are compared, the plan's own first."""
    from langchain_dpicl.privacy.extensions.registry import MECHANISMS

    if settings.answers.scores:
        return (first,)
    return tuple(sorted(MECHANISMS, key=lambda name: name != first))


def _proposal(settings: Settings, source: RowSource, size: int, max_queries: int) -> Proposal | None:
    """Returns the rows that a rehearsal speaks for; None: there is none, or rows are asked for."""
    from langchain_dpicl.planning.expected_utility import RowDesign
    from langchain_dpicl.rehearsal.choice import propose_rows
    from langchain_dpicl.rehearsal.rehearsal import Rehearsal

    if not isinstance(source, Rehearsal) or RowDesign.of(settings.get("rows"), smallest_size=size) is not None:
        return None
    return propose_rows(
        source,
        size,
        **_terms(settings),
        max_queries=max_queries,
        mechanism=_vote_mechanism(settings),
        calibrate=settings.answers.calibrate,
        wordings=num_wordings(settings),
    )


def _plan_of_votes(settings: Settings, private: PrivateExamples, proposal: Proposal | None, **more: Any) -> Any:
    """Returns the plan of a run on the rows and with the noise that a rehearsal chose, or on its own."""
    if proposal is not None:
        asked, mechanism = settings.get("rows") or Rows(), proposal.plan.release.mechanism.name
        shape: dict[str, Any] = proposal.design.option()
        more["rows"] = Rows(**shape, redraw_every=asked.redraw_every)
        more["noise"] = noise_of(settings.get("noise"), Noise).replace(mechanism=mechanism)
    return plan_of_run(settings, private, **more)


def task_of(settings: Settings, private: PrivateExamples, rehearsal: Rehearsal | None) -> VotingTask:
    """Returns what is voted on; refuses a rehearsal of another task, as far as that is known before the model is."""
    from langchain_dpicl.tasks import VotingTask, wording_digest

    task = VotingTask.of(private, settings.wording, settings.answers)
    if rehearsal is not None:
        rehearsal.check_fits(
            labels=task.labels,
            wording=wording_digest(task),
            reads="text votes" if task.votes == "text" else None,
            content_free=task.content_free if settings.answers.calibrate else (),  # a rehearsal may choose none
        )
    return task


def _check_task(settings: Settings, private: PrivateExamples, names: tuple[str, ...], source: RowSource) -> None:
    """Refuses a rehearsal in place of rows as the run will. Of a made-up label or field no wording is known."""
    from langchain_dpicl.rehearsal.rehearsal import Rehearsal

    rehearsal = source if isinstance(source, Rehearsal) and settings.get("rows") is None else None
    if rehearsal and (private.label_key, set(names)) == (settings.data.label_key, set(rehearsal.labels)):
        task_of(settings, private, rehearsal)


def _voting(settings: Settings, compares: bool) -> Output:
    from langchain_dpicl.runs.query_plan import compare_queries

    source, max_queries = _source(settings), _max_queries(settings)
    names, readings = _labels(settings, source), _readings(settings, source)
    private, labels, wordings = declared(settings, names), len(names), num_wordings(settings)
    _check_task(settings, private, names, source)
    size = private.public_size_of(None)
    proposal = _proposal(settings, source, size, max_queries)
    plan: QueryPlan = _plan_of_votes(settings, private, proposal)
    reads = _best_reading(plan, source, readings, labels) if proposal is None else proposal.calibrated
    share = _abstention(settings, labels, usual="never")
    expected = plan.expected(source, calibrated=reads, abstain_below=share)
    # What was predicted apart from the choice is of the proposal's own noise, without abstention.
    own = proposal if share is None and _given_noise(settings) is None else None
    signal = _signal(expected, own)
    cost = plan.cost(**_caps(settings, readings[reads]))
    out: Output = {
        "plan": {"labels": labels, **plan.to_dict()},
        "cost": _cost_of(cost, settings, max_queries=plan.max_queries),
        "signal": signal,
        **_verdict(signal, source, own, lambda found: _resampled(plan, found, reads)),
        "options": [],
    }
    if proposal is not None:
        out["recommendation"] = {**proposal.to_dict(), "settings": _proposed(settings, proposal)}
    if compares:
        votes: Any = plan.release.aggregation
        options = compare_queries(
            size,
            **_terms(settings),
            max_queries=max_queries,
            labels=labels,
            aggregation=votes,
            mechanisms=_mechanisms(settings, plan.release.mechanism.name),
            base=plan.design,
            abstain_below=share,
            wordings=wordings,
            source=source,
            readings=readings,
        )
        out["options"] = [_query_option(option, settings, readings) for option in options]
        out.setdefault("recommendation", out["options"][0])
    return out


def _proposed(settings: Settings, proposal: Proposal) -> Output:
    mechanism = proposal.plan.release.mechanism.name
    return _votes_settings(settings, proposal.design, mechanism, calibrated=proposal.calibrated)


def _query_option(option: QueryOption, settings: Settings, readings: Mapping[bool, int]) -> Output:
    """Returns one compared design with its money, and the settings that take it."""
    cost = option.plan.cost(**_caps(settings, readings[option.calibrated]))
    calibrated = option.calibrated if len(readings) > 1 else None
    mechanism = option.plan.release.mechanism.name
    return {
        **option.to_dict(),
        "money": _money(cost, settings),
        "settings": _votes_settings(settings, option.plan.design, mechanism, calibrated=calibrated),
    }


def _vote_noise_text(plan: Mapping[str, Any]) -> str:
    return "noise    {mechanism}, multiplier {needed} of the sensitivity (scale {noise_scale:.3f} on the votes)".format(
        **plan, needed=_noise_text(plan)
    )


def _vote_rows_text(out: Output) -> list[str]:
    return [
        "         {public_size} declared units, sampling rate {sampling_rate:.5f}".format(**out["plan"]),
        "expected {expected_rows:.1f} rows in use, {expected_shots:.2f} shots each, ".format(**out["signal"])
        + f"{100 * out['signal']['empty_slot_prob']:.1f} % empty slots",
    ]


def _vote_cost_text(cost: Mapping[str, Any], *, unit: str) -> str:
    return (
        "cost     {calls_per_query:.1f} calls per {unit}: {private_calls:,} private + {public_calls:,} public calls, "
        "{tokens_in:,} tokens in, {tokens_out:,} out, ".format(unit=unit, **cost)
        + money_text(cost["money"])
    )


def _shape_text(plan: Mapping[str, Any]) -> str:
    """Returns the shape of rows, with its fill where slots have one."""
    fill = f", fill {plan['overfill']:g}" if plan["rows"] == "slots" and plan["sampling"] == "poisson" else ""
    return "rows     {rows}, {num_slots} x {shots_per_slot} shot(s)".format(**plan) + fill


def _voting_text(out: dict[str, Any]) -> str:
    plan = out["plan"]
    abstained = f", abstention {100 * out['signal']['abstain_prob']:.1f} %" if plan["constants"] else ""
    lines = [
        f"epsilon {price_text(plan)}, for {plan['max_queries']:,} queries (nothing is spent)",
        _vote_noise_text(plan),
        f"{_shape_text(plan)}, a new sample for every query, {plan['labels']} labels",
        *_vote_rows_text(out),
        *_signal_text(out, abstained=abstained),
        _vote_cost_text(out["cost"], unit="query"),
    ]
    if out["options"]:
        lines += ["", "designs at equal epsilon, best first:", *_measured_lines(out)]
        heads = ("mechanism", "rows", "M x k", "fill", "noise", "row right", "right label", "calls", "money", "")
        lines += _table(heads, out["options"])
    lines += _advice_lines(out)
    return "\n".join(lines)


# -- retrieval -------------------------------------------------------------------------------------------------------


def _retrieval(settings: Settings, compares: bool) -> Output:
    del compares  # one shape
    from langchain_core.embeddings import DeterministicFakeEmbedding

    from langchain_dpicl.planning.row_law import RowFacts

    retrieval, participants, source = settings.get("retrieval"), settings.guess.participants, _source(settings)
    if retrieval is None:
        advice = "Give --set retrieval.participations=N --set retrieval.similarity_threshold=X."
        raise fail("retrieval.participations", "a number", None, advice)
    names, readings = _labels(settings, source), _readings(settings, source)

    def facts(calibrated: bool) -> RowFacts:
        return source.facts(labels=len(names), shots=1.0, calibrated=calibrated)

    near = retrieval.replace(embeddings=DeterministicFakeEmbedding(size=2), balances=None)
    plan: RetrievalPlan = plan_of_run(settings, declared(settings, names), retrieval=near)
    reads = max(readings, key=lambda read: facts(read).right)
    answers = settings.answers
    found = plan.expected(participants=participants, source=source, calibrated=reads, answers=answers)
    signal = _signal({**found, "row_correlation": facts(reads).correlation}, None)
    if answers.min_votes is None:  # an answer needs more votes where the noise is larger: it makes the abstentions
        signal["noise_takes"] = max(0.0, found["without_noise_prob"] - found["right_label_prob"])
    cost = plan.cost(participants=participants, **_caps(settings, readings[reads]))

    def rights(found: Rehearsal) -> list[float]:
        drawn = found.resampled(((1, 1.0),), reads)
        return [plan.right_chance(one, participants=participants, answers=answers) for one in drawn]

    return {
        "plan": plan.to_dict(),
        "cost": _cost_of(cost, settings, max_queries=1),
        "signal": {"participants": participants, **signal},
        **_verdict(signal, source, None, rights),
    }


def _retrieval_text(out: dict[str, Any]) -> str:
    plan, cost, signal = out["plan"], out["cost"], out["signal"]
    filter_, slots = plan["participation"], plan["participation"]["num_slots"]
    once = "once for all queries (nothing is spent)"
    rows = "one for each unit that takes part" if slots is None else f"{slots} slots, however many units take part"
    calls = "{calls_per_query:.1f} calls per query, {tokens_in:,} tokens in, {tokens_out:,} out, ".format(**cost)
    lines = [
        f"epsilon {price_text(plan)}, {once}",
        f"filter   each of {plan['public_size']:,} declared units takes part in {filter_['participations']} answers",
        "noise    gaussian, {noise_stddev:.2f} votes on every one of {width} labels; ".format(**plan)
        + "noise alone reaches {noise_floor:.1f} in one of twenty queries".format(**signal),
        f"rows     {rows}",
        f"expected {signal['participants']} units take part in a query: a GUESS (guess.participants)",
        *_signal_text(
            out,
            abstained=f"; too few votes for any {_percent(signal['abstain_prob'])}",
            fewer="let units take part in fewer answers",
        ),
        f"cost     {calls}{money_text(cost['money'])}; each document is embedded once besides",
    ]
    return "\n".join(lines)


# -- labels for public inputs ----------------------------------------------------------------------------------------

_DRAWN = {
    "fresh": "fresh, a new secret sample for every input",
    "one_sample": "one secret sample for all inputs",
    "fixed": "fixed, every unit stays in its slot",
}


def _pate(settings: Settings, compares: bool) -> Output:
    guess, source = settings.guess, _source(settings)
    names, readings = _labels(settings, source), _readings(settings, source)
    private, labels = declared(settings, names), len(names)
    if guess.public_inputs is None:
        raise fail("guess.public_inputs", "the number of public inputs", None, "Give --public-inputs N.")
    _check_task(settings, private, names, source)
    inputs, size = _num_inputs(settings, guess.public_inputs), private.public_size_of(None)
    proposal = _proposal(settings, source, size, inputs)
    plan: LabellingPlan = _plan_of_votes(settings, private, proposal, max_queries=inputs)
    reads = _best_reading(plan, source, readings, labels) if proposal is None else proposal.calibrated
    # What was predicted apart from the choice is without a threshold; the usual one rejects next to nothing.
    is_usual = settings.answers.abstain_below in {None, "auto", "never"}
    own = proposal if is_usual and _given_noise(settings) is None else None
    signal = _signal(plan.expected(source, calibrated=reads, labels=labels), own)
    cost = plan.cost(**_caps(settings, readings[reads]))
    needed = plan.right_rows_needed(guess.chance, source=source, calibrated=reads, labels=labels)
    out: Output = {
        "plan": {"labels": labels, "public_inputs": guess.public_inputs, **plan.to_dict()},
        "cost": _cost_of(cost, settings, max_queries=plan.max_queries),
        "student": _cost_of(_student_cost(plan, settings), settings),
        "signal": {"chance": guess.chance, "right_rows_needed": needed, **signal},
        **_verdict(signal, source, own, lambda found: _resampled(plan, found, reads)),
        "teachers": _teacher_prices(plan, settings, labels),
        "options": [],
    }
    if proposal is not None:
        taken = {**_proposed(settings, proposal), "max_queries": plan.max_queries}
        out["recommendation"] = {**proposal.to_dict(), "settings": taken}
    if compares:
        options = _pate_options(settings, source, readings, plan.release.mechanism.name, size=size, labels=labels)
        out["options"] = [
            {
                **option.to_dict(),
                "overfill": option.plan.design.overfill,
                "money": _money(option.plan.cost(**_caps(settings, option.calls_per_row)), settings),
                "settings": _pate_settings(settings, option, option.calibrated if len(readings) > 1 else None),
            }
            for option in options
        ]
        out.setdefault("recommendation", out["options"][0])
    return out


_WITH_LATER_INPUTS = "{max_queries:,} public inputs, {public_inputs:,} of them known"


def _student_cost(plan: LabellingPlan, settings: Settings) -> Cost:
    """Returns what `PromptPATEExampleSelector` pays at most to choose a student's prompt, beside the labels."""
    from langchain_dpicl.pate.example_selector import num_held_back
    from langchain_dpicl.planning.share_plan import Cost

    usual = Student()
    caps = _caps(settings, settings.cost.calls_per_row or 1)
    calls = usual.num_candidates * num_held_back(usual, plan.max_queries) * caps["calls_per_row"]
    alone, both = plan.cost(**caps), plan.cost(**caps, student_calls=calls, student_shots=usual.shots)
    return Cost(*(new - old for new, old in zip(dataclasses.astuple(both), dataclasses.astuple(alone), strict=True)))


def _num_inputs(settings: Settings, public_inputs: int) -> int:
    """Returns how many inputs the share pays for: all of them, unless fewer are asked for, or later ones too."""
    from langchain_dpicl.privacy._validate import check_int

    asked = settings.get("max_queries")
    return public_inputs if asked is None else check_int("max_queries", asked, low=1)


def _pate_options(
    settings: Settings, source: RowSource, readings: Mapping[bool, int], mechanism: str, *, size: int, labels: int
) -> list[LabellingOption]:
    """Returns what is compared, best first."""
    from langchain_dpicl.pate.plan import kind_of_teachers, propose_labelling
    from langchain_dpicl.planning.expected_utility import RowDesign
    from langchain_dpicl.privacy.extensions.registry import TEACHERS

    rows, guess = settings.get("rows"), settings.guess
    teachers = kind_of_teachers(rows or Rows())
    asks_teachers = rows is not None and teachers != "fresh"
    # Which teachers there are is compared beside their shape: a design says the shape alone.
    shape = None if rows is None else rows.replace(sampling="poisson" if teachers == "fixed" else rows.sampling)
    design, wordings = RowDesign.of(shape, smallest_size=size), num_wordings(settings)
    if design is not None:
        design.check_wordings(wordings)
    asked = settings.get("max_queries")
    inputs = max(guess.public_inputs or 1, asked or 1)
    if asked is None and not _can_reach(source, readings, labels, guess.chance):
        asked = inputs  # fewer inputs would not reach it either
    return propose_labelling(
        size,
        **_terms(settings),
        public_inputs=inputs,
        labels=labels,
        teachers=(teachers,) if asks_teachers else TEACHERS,
        mechanisms=_mechanisms(settings, mechanism),
        designs=None if design is None else [design],
        max_queries=asked,
        abstain_below=_abstention(settings, labels, usual="auto"),
        source=source,
        readings=readings,
        chance=guess.chance,
        wordings=wordings,
    )


def _can_reach(source: RowSource, readings: Iterable[bool], labels: int, chance: float) -> bool:
    """Whether any number of rows without noise is right with the wanted chance."""
    shapes = itertools.product((1.0, 4.0, 8.0), readings)
    return any(source.facts(labels=labels, shots=shots, calibrated=read).ceiling() >= chance for shots, read in shapes)


def _pate_settings(settings: Settings, option: LabellingOption, calibrated: bool | None) -> Output:
    design, mechanism = option.plan.design, option.plan.release.mechanism.name
    most = option.plan.max_queries
    found = _votes_settings(settings, design, mechanism, calibrated=calibrated, max_queries=most)
    if option.plan.teachers == "one_sample":
        found["rows"]["redraw_every"] = "run"
    return found


def _teacher_prices(plan: LabellingPlan, settings: Settings, labels: int) -> Output:
    """Returns what the same noise on as many one-shot teachers costs, for each way of drawing them."""
    from langchain_dpicl.pate.plan import compare_teachers
    from langchain_dpicl.planning.expected_utility import noise_deviation

    noise = noise_deviation(plan.release) if settings.guess.noise is None else settings.guess.noise
    terms = {"num_teachers": plan.design.num_slots, "noise": noise, "max_queries": plan.max_queries}
    rows = compare_teachers(plan.public_size, **terms, delta=plan.delta, labels=labels)  # type: ignore[arg-type]
    return {**terms, "prices": [row.to_dict() for row in rows]}


def _needed_text(signal: Mapping[str, Any]) -> str:
    """Returns the line on how many rows must be right for the wanted chance."""
    wanted, needed = _percent(signal["chance"]), signal["right_rows_needed"]
    if signal["ceiling_prob"] < signal["chance"]:
        least = "" if needed is None else f"; {_percent(needed)} of rows would have to be right"
        most = _percent(signal["ceiling_prob"])
        return f"needed   no noise level reaches {wanted}: with rows this alike at most {most}{least}"
    if needed is None:
        return f"needed   no share of right rows reaches {wanted} at this noise"
    return f"needed   {_percent(needed)} of rows right for {wanted} right labels (guess.chance)"


def _pate_text(out: dict[str, Any]) -> str:
    plan, signal = out["plan"], out["signal"]
    rejects = plan["constants"] or plan["threshold"] is not None
    rejected = f", rejected {100 * signal['abstain_prob']:.1f} %" if rejects else ""
    some = "{max_queries:,} of {public_inputs:,} public inputs"
    inputs = some if plan["max_queries"] <= plan["public_inputs"] else _WITH_LATER_INPUTS
    lines = [
        f"epsilon {price_text(plan)}, for labels of {inputs.format(**plan)} (nothing is spent)",
        _vote_noise_text(plan),
        f"teachers {_DRAWN[plan['teachers']]}",
        f"{_shape_text(plan)}, {plan['labels']} labels",
        *_vote_rows_text(out),
        *_signal_text(out, abstained=rejected, fewer="label fewer inputs"),
        _needed_text(signal),
        _vote_cost_text(out["cost"], unit="label"),
        "student  PromptPATEExampleSelector makes up to {public_calls:,} public calls more, {tokens_in:,} tokens in, "
        "{tokens_out:,} out, ".format(**out["student"])
        + money_text(out["student"]["money"]),
        "",
        *_teachers_text(out["teachers"]),
    ]
    if out["options"]:
        lines += ["", "plans at equal epsilon, best first:", *_measured_lines(out)]
        heads = ("teachers", "mechanism", "rows", "M x k", "fill", "inputs", "noise", "row right", "right label")
        lines += _table((*heads, "at most", "calls", "money", ""), out["options"])
    lines += _advice_lines(out)
    return "\n".join(lines)


def _teachers_text(teachers: dict[str, Any]) -> list[str]:
    head = "Gaussian noise of {noise:.4g} votes on {num_teachers} one-shot teachers, {max_queries:,} input(s), by kind:"
    line = "  {teachers:<11}epsilon {bound:<9} {adjacency}, sampling rate {sampling_rate:.5f}"
    rows = ({**row, "bound": format_rounded_up(row["epsilon"], 4)} for row in teachers["prices"])
    return [head.format(**teachers), *(line.format(**row) for row in rows)]


# -- training --------------------------------------------------------------------------------------------------------

_PAPER = (
    "Duan et al. (2023): batch 1,024, clip .01 to 4 (mostly .05 to .2), learning rate .005 to .05, 10 to 100 epochs, "
    "1 to 50 virtual tokens"
)
# Batches that are compared, in quarters of the one that was asked for.
_QUARTERS = (1, 2, 4, 8, 16)


def _training(settings: Settings, compares: bool) -> Output:
    size, training = declared(settings).public_size_of(None), settings.get("training")
    noise_with(settings.get("noise"), "gaussian")  # refuses another
    if training is None:
        raise fail("training", "a table with expected_batch_size, and epochs or steps", None)
    batch = training.expected_batch_size
    if batch > size:
        raise fail("training.expected_batch_size", f"at most {size} records", batch)
    length = {"steps": training.steps, "epochs": training.epochs}
    plan = _training_plan(settings, size, batch, **length, noise_multiplier=_given_noise(settings))
    prices = settings.cost
    cost = plan.cost(record_tokens=prices.record_tokens, examples_per_unit=prices.examples_per_unit)
    out: Output = {
        "plan": plan.to_dict(),
        "noise_to_clip": plan.noise_to_clip,
        "cost": {"gradients": cost.private_calls, "tokens": cost.tokens_in},
        "paper": _PAPER,
        "options": [],
    }
    if compares:
        others = sorted({max(1, quarters * batch // 4) for quarters in _QUARTERS})
        steps = {other: -(-plan.steps * batch // other) for other in others if other <= size}  # rounded up
        plans = [_training_plan(settings, size, other, steps=steps[other], is_rough=True) for other in steps]
        out["options"] = [_training_option(other) for other in plans]
    return out


def _training_plan(settings: Settings, size: int, batch: int, **terms: Any) -> TrainingPlan:
    from langchain_dpicl.soft_prompts.plan import plan_training

    clip = settings.get("training").l2_clip_norm
    return plan_training(
        size, **_terms(settings), expected_batch_size=batch, l2_clip_norm=clip, width=settings.guess.parameters, **terms
    )


def _training_option(plan: TrainingPlan) -> Output:
    return {
        "expected_batch_size": plan.expected_batch_size,
        "steps": plan.steps,
        "noise_multiplier": round_up_at(plan.noise_multiplier),
        "noise_scale": plan.noise_scale,
        "noise_to_clip": plan.noise_to_clip,
    }


def _training_text(out: dict[str, Any]) -> str:
    plan, cost = out["plan"], out["cost"]
    lines = [
        f"epsilon {price_text(plan)}, for {plan['steps']:,} training steps (nothing is spent)",
        "noise    {mechanism}, multiplier {needed} of the sensitivity "
        "(scale {noise_scale:.3g} on each coordinate of the average gradient)".format(**plan, needed=_noise_text(plan)),
        "         all of it together is {noise_to_clip:.3g} clips long; an average gradient is at most 1".format(**out),
        "steps    {expected_batch_size:,} expected of {public_size:,} declared units, sampling rate "
        "{sampling_rate:.5f}, {epochs:.3g} epochs".format(**plan),
        "gradient {width:,} parameters, clip {l2_clip_norm:g}".format(**plan),
        "cost     {gradients:,} gradients of single examples, {tokens:,} tokens read".format(**cost),
        f"paper    {out['paper']}",
    ]
    if out["options"]:
        lines += ["", "batches at equal epsilon and equal epochs (noise roughly: up to some percent more than needed):"]
        lines += _table(("batch", "steps", "multiplier", "on the average", "in clips"), out["options"])
    return "\n".join(lines)


# -- private evolution -----------------------------------------------------------------------------------------------


def _evolution(settings: Settings, compares: bool) -> Output:
    del compares  # one search
    from langchain_core.embeddings import DeterministicFakeEmbedding

    plan: EvolutionPlan = plan_of_run(settings, declared(settings), embeddings=DeterministicFakeEmbedding(size=2))
    writes_first = not (settings.get("evolution") or Evolution()).candidates
    return {
        "plan": plan.to_dict(),
        "cost": _cost_of(plan.cost(record_tokens=settings.cost.record_tokens, writes_first=writes_first), settings),
        "embedded": plan.embedded,
        "signal": plan.expected(),
    }


def _evolution_text(out: dict[str, Any]) -> str:
    shown, signal, share = out["plan"], out["signal"], 100 * out["signal"]["share_to_be_seen"]
    lines = [
        f"epsilon {price_text(shown)} (nothing is spent)",
        f"noise    gaussian, multiplier {_noise_text(shown)} of the sensitivity "
        "(scale {noise_scale:.3f} on the votes of each candidate)".format(**shown),
        "rounds   {rounds} per label, every unit votes in each: at most {candidates} candidates, {num_survivors} "
        "survivors, {num_variations} variations of each".format(**shown),
    ]
    for row in shown["labels"]:
        who = "all records" if row["label"] is None else row["label"]
        lines.append(f"         {who}: {row['public_size']} declared units")
    lines += [
        "signal   {votes_per_candidate:.1f} votes per candidate if they fell evenly; ".format(**signal)
        + f"three deviations of the noise are {share:.1f} % of the units of the smallest label",
        "cost     no private call; {public_calls:,} public calls, {tokens_in:,} tokens in, {tokens_out:,} out, ".format(
            **out["cost"]
        )
        + money_text(out["cost"]["money"]),
        "         embedded: {private:,} private texts (each once) and {public:,} public ones".format(**out["embedded"]),
    ]
    return "\n".join(lines)


_PLANNERS: Mapping[str, tuple[Callable[[Settings, bool], Output], Callable[[Output], str]]] = {
    "generation": (_generation, _generation_text),
    "documents": (documents_output, documents_text),
    "evolution": (_evolution, _evolution_text),
    "voting": (_voting, _voting_text),
    "retrieval": (_retrieval, _retrieval_text),
    "pate": (_pate, _pate_text),
    "training": (_training, _training_text),
}
