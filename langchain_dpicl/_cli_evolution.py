"""Options, checks, runs and plans of `dpicl generate` and `dpicl plan` with --mechanism private_evolution."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from langchain_dpicl._cli_options import Option, add_options, check_absent, check_counts, cost_of, typed_options

if TYPE_CHECKING:
    from langchain_dpicl.evolution import PrivateEvolution
    from langchain_dpicl.evolution_planning import EvolutionPlan
    from langchain_dpicl.privacy.examples import PrivateExamples

MECHANISM = "private_evolution"

_NUMBERS = {
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
    add_options(group, _NUMBERS)
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
        check_absent(arguments, (*_NUMBERS, *_RUN), where=f"without --mechanism {MECHANISM}")
    check_counts(arguments, _NUMBERS)


def evolution_from(
    arguments: argparse.Namespace, private: PrivateExamples, *, budget: Any, model: Any, embeddings: Any, **spread: Any
) -> PrivateEvolution:
    """Builds the component, which checks its arguments and spends nothing yet."""
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
        **typed_options(arguments, _NUMBERS),
        **spread,
    )


def writer_of(arguments: argparse.Namespace, model: Any) -> Any:
    """Returns the model that writes; our own engines write at temperature 1, or all candidates would be alike."""
    from langchain_dpicl.backends.base import NextTokenBackend
    from langchain_dpicl.models import LocalLLM

    if isinstance(model, NextTokenBackend) and hasattr(model, "generate"):
        return LocalLLM(backend=model, temperature=1.0, max_tokens=arguments.max_tokens, stop=["\n"])
    return model


def planned_evolution(arguments: argparse.Namespace, sizes: dict[str | None, int]) -> tuple[dict[str, Any], str]:
    """Returns what `dpicl plan` prints, as JSON values and as text."""
    from langchain_dpicl.evolution_planning import plan_evolution

    plan = plan_evolution(
        sizes,
        epsilon=arguments.epsilon,
        delta=arguments.delta,
        adjacency=arguments.adjacency,
        **typed_options(arguments, ["shots_per_label"]),
        **typed_options(arguments, _NUMBERS),
    )
    out: dict[str, Any] = {
        "plan": plan.to_dict(),
        "cost": cost_of(plan.cost(record_tokens=arguments.record_tokens), arguments),
        "embedded": plan.embedded,
        "signal": plan.expected_signal(),
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
