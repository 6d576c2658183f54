"""The plan of a store of documents on the command line: what each part brings and costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from langchain_dpicl.cli.config import Settings
from langchain_dpicl.options import Decoding, LogitNoise, Noise, Topics
from langchain_dpicl.options.rows import noise_of
from langchain_dpicl.privacy._validate import fail

if TYPE_CHECKING:
    from langchain_dpicl.documents.plan import DocumentsPlan

_BOTH = "Give --documents-per-topic 0 for words of each topic alone, without a model, or N for N texts of each."


def documents_plan(settings: Settings, *, topics: Topics | None = None, deny: Iterable[str] = ()) -> DocumentsPlan:
    """Returns the plan of a run with a model whose vocabulary holds all candidates; asks no model.

    Args:
      settings: of the command.
      topics: in place of those of the settings.
      deny: public words that must not leave, beside those of the settings.
    """
    from langchain_dpicl.documents.plan import plan_documents
    from langchain_dpicl.generation.decoding_loop import TextDecoder
    from langchain_dpicl.generation.token_mechanisms import TokenRule
    from langchain_dpicl.generation.word_tree import MOST_COLUMNS
    from langchain_dpicl.planning.expected_utility import RowDesign

    chosen = topics or settings.get("topics") or Topics()
    rows, decoding = settings.get("rows"), settings.get("decoding") or Decoding()
    noise = noise_of(settings.get("noise"), Noise, LogitNoise)
    TextDecoder.of(noise, decoding)  # refuses a temperature that would have no effect
    if decoding.candidates == "all":
        raise fail("decoding.candidates", "a number: a plan asks no model for its vocabulary", decoding.candidates)
    public_size = sum(settings.data.sizes().values())
    size = max(1, public_size // chosen.num_topics)
    if settings.get("documents_per_topic") is None:
        raise fail("documents_per_topic", "a number of texts, or 0", None, _BOTH)
    return plan_documents(
        chosen.vocabulary,
        public_size=public_size,
        epsilon=settings.share_epsilon,
        delta=settings.share_delta,
        adjacency=settings.adjacency,
        text_key=settings.data.text_key,
        num_topics=chosen.num_topics,
        keywords_per_unit=chosen.keywords_per_unit,
        topic_share=chosen.epsilon_share,
        least_units=chosen.min_units,
        topic_size=size,
        words=chosen.words,
        pairs=chosen.pairs,
        deny=(*settings.get("deny", ()), *deny),
        noise_multiplier=noise.multiplier,
        mechanism=TokenRule.of(noise, decoding.temperature),
        design=RowDesign.of(rows, smallest_size=size) or RowDesign.choose(smallest_size=size),
        redraw_every=None if rows is None else rows.redraw_every,
        candidates=decoding.candidates + 1 + (MOST_COLUMNS if decoding.released_words else 0),
        **settings.only("documents_per_topic", "max_tokens"),
    )


def documents_output(settings: Settings, sizes: Any, compares: bool) -> dict[str, Any]:  # noqa: ARG001
    """Returns the plan and what each part costs by itself, as `dpicl plan` prints it."""
    plan = documents_plan(settings)
    size = max(1, sum(sizes.values()) // plan.num_topics)
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
    from langchain_dpicl.documents.plan import DocumentsPlan

    plan = DocumentsPlan.rebuild(out["plan"])
    return "\n".join(plan_lines(plan, parts=out["parts"], topic_size=out["topic_size"]))


def plan_lines(plan: DocumentsPlan, *, parts: dict[str, float], topic_size: int) -> list[str]:
    """Returns what a plan does, brings and costs, part by part."""
    cost = plan.cost()
    each = ", ".join(f"{name} {epsilon:.2f}" for name, epsilon in parts.items())
    lines = [
        f"epsilon  {plan.epsilon:.4f} at delta {plan.delta:g}, adjacency {plan.adjacency}: all parts; alone: {each}",
        *_topic_lines(plan),
        *_word_lines(plan, topic_size),
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


def _word_lines(plan: DocumentsPlan, topic_size: int) -> list[str]:
    words, needed = plan.words, plan.words_from(0.95)
    if words is None or needed is None:
        return ["words    none leave; topics.words=8 releases those that many units of a topic write"]
    pairs = ", and pairs of those that are neighbours" if plan.pairs else ""
    noise = f"noise {words.scale:.2f}, threshold {words.mechanism.threshold:.1f}"
    alone = f"which words of one unit reach with a chance of {words.failure:.1g}"
    lines = [
        f"words    {words.rule.max_words} of each unit, by topic{pairs}; {noise}, {alone}",
        f"         a word of {needed} units of a topic with a chance of 95 %",
    ]
    if needed > topic_size:
        lines.append(f"         a topic has {topic_size} units if they spread evenly: too few for a word")
    return lines


def _text_lines(plan: DocumentsPlan) -> list[str]:
    if plan.generation is None:
        return ["texts    none leave: the words of a topic are its document, and no model is asked"]
    shown, noise = plan.generation.to_dict(), plan.generation.noise_multiplier
    rows = f"{shown['num_slots']} rows per token"
    each = f"{plan.documents_per_topic} of each topic"
    return [f"texts    {each}; {shown['mechanism']}, noise multiplier {noise:.3f}, {rows}"]
