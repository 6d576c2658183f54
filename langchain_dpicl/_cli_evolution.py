"""What `dpicl generate` and `dpicl plan` do with --mechanism private_evolution: options, checks, a run and a plan.

Prints nothing and reads no record: whoever calls hands over `PrivateExamples`. The model of such a run sees no record.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from langchain_dpicl.exceptions import ConfigurationError

if TYPE_CHECKING:
    from langchain_dpicl.evolution import PrivateEvolution
    from langchain_dpicl.evolution_planning import EvolutionPlan
    from langchain_dpicl.privacy.examples import PrivateExamples

MECHANISM = "private_evolution"

_NUMBERS = ("rounds", "num_candidates", "num_survivors", "num_variations")
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
    group.add_argument("--rounds", type=int, help="noisy histograms per label (default 5)")
    group.add_argument("--num-candidates", type=int, help="first candidates per label (default as in a later round)")
    group.add_argument("--num-survivors", type=int, help="candidates that go on after a round (default 10)")
    group.add_argument("--num-variations", type=int, help="variations of each survivor (default 3)")
    if runs:
        group.add_argument("--embeddings", help="module:attribute of LangChain embeddings, which SEE the records")
        group.add_argument("--variation-prompt", help="template of the prompt for a variation of {text}")
        group.add_argument(
            "--hint", action="append", help="public sentence behind the instruction, in turn; repeatable"
        )


def check_evolution(arguments: argparse.Namespace) -> None:
    """Refuses options of the other mechanisms beside this one, and its own beside others: they would change nothing."""
    is_own = arguments.mechanism == MECHANISM
    for name in _NONE if is_own else (*_NUMBERS, *_RUN):
        if getattr(arguments, name, None) is not None:
            typed = f"--{name.replace('_', '-')}"
            beside = f"with --mechanism {MECHANISM}" if is_own else f"without --mechanism {MECHANISM}"
            raise ConfigurationError(f"{typed}: expected none {beside}.")
    for name in _NUMBERS:
        value, low = getattr(arguments, name), 0 if name == "num_variations" else 1
        if value is not None and value < low:
            raise ConfigurationError(f"--{name.replace('_', '-')}: expected an integer >= {low}, found {value}.")


def numbers_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the numbers that were typed."""
    return {name: getattr(arguments, name) for name in _NUMBERS if getattr(arguments, name) is not None}


def evolution_from(
    arguments: argparse.Namespace, private: PrivateExamples, *, budget: Any, model: Any, embeddings: Any, **spread: Any
) -> PrivateEvolution:
    """Checks everything, and has spent nothing yet."""
    from langchain_dpicl.evolution import PrivateEvolution

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
        **numbers_of(arguments),
        **spread,
    )


def writer_of(arguments: argparse.Namespace, model: Any) -> Any:
    """Returns the model that writes; an engine of ours writes at temperature 1, or all candidates would be alike."""
    from langchain_dpicl.backends.base import NextTokenBackend
    from langchain_dpicl.models import LocalLLM

    if isinstance(model, NextTokenBackend) and hasattr(model, "generate"):
        return LocalLLM(backend=model, temperature=1.0, max_tokens=arguments.max_tokens, stop=["\n"])
    return model


def planned_evolution(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> str:
    """Returns what `dpicl plan` prints."""
    from langchain_dpicl.evolution_planning import plan_evolution

    shots = arguments.shots_per_label
    plan = plan_evolution(
        sizes,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        adjacency=arguments.adjacency,
        **({} if shots is None else {"shots_per_label": shots}),
        **numbers_of(arguments),
    )
    cost = plan.cost(record_tokens=arguments.record_tokens)
    out: dict[str, Any] = {
        "plan": plan.to_dict(),
        "cost": {
            "private_calls": cost.private_calls,
            "public_calls": cost.public_calls,
            "tokens_in": cost.tokens_in,
            "tokens_out": cost.tokens_out,
            "money": cost.money(price_in=arguments.price_in, price_out=arguments.price_out),
        },
        "embedded": plan.embedded,
        "signal": plan.expected_signal(),
    }
    return json.dumps(out, indent=2) if arguments.json else _text(plan, out)


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
