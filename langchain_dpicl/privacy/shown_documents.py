"""Verifies the parameters that a report shows of synthetic documents, and the documents that carry the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from langchain_dpicl.privacy._validate import check_int, fail
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.document_tickets import BY_COINS, TOPIC_TEMPLATE, places
from langchain_dpicl.privacy.extensions.count_histograms import CountPlan, count_release
from langchain_dpicl.privacy.mechanisms.randomness import SecureRandom
from langchain_dpicl.privacy.shown import (
    Book,
    has_members,
    member,
    shown_problems,
    terms_problems,
)
from langchain_dpicl.privacy.tickets import Component
from langchain_dpicl.privacy.unit_keywords import UnitKeywords
from langchain_dpicl.privacy.units import KEYWORDS

_KEYS = frozenset({"adjacency", "delta", "epsilon", "generation", "least_units", "topics"})


def shows_documents(component: Component) -> bool:
    """Returns whether a component has the ticket of topics."""
    return any(ticket.template == TOPIC_TEMPLATE for ticket in component.tickets)


def document_problems(component: Component, book: Book) -> Iterator[str]:
    """Compares the store that a component shows with its tickets, its data set, its share and its price.

    Formal guarantees:
      - No problem means: the histogram shown makes exactly the one ticket over all units; the texts shown make the
        other ones, each of a place that the data set declares; topics split that data set; and every number shown is
        that of the release, of the share or of its price.
    """
    shown, histogram = component.parameters, _histogram(component)
    if set(shown) != _KEYS:
        yield f"shows {sorted(set(shown) ^ _KEYS)} beside or instead of what synthetic documents show"
    check_int("least_units", shown["least_units"], low=1)
    declared = book.dataset(component)
    if declared.by != KEYWORDS or declared.labels != places(len(declared.labels)):
        yield "its data set is not split by topics that are released later"
    if histogram.rule.name != declared.text_key:
        yield f"shows keywords of {histogram.rule.name!r}, the texts of its data set are {declared.text_key!r}"
    first = tuple(ticket for ticket in component.tickets if ticket.label is None)
    if first != histogram.tickets(TOPIC_TEMPLATE):
        yield "shows a histogram that makes other tickets than it has"
    texts = _texts(component, histogram)
    if {ticket.label for ticket in texts.tickets} != set(declared.labels):
        yield f"has texts of other places than {list(declared.labels)}"
    if texts.public.get("sampling") not in BY_COINS:
        yield "shows texts on samples of a fixed size, of topics whose sizes are private"
    yield from (f"texts: {problem}" for problem in shown_problems(texts, book))
    if histogram.adjacency != book.adjacency:
        yield f"shows a histogram under {histogram.adjacency!r}, the ledger's adjacency is {book.adjacency!r}"
    yield from terms_problems(component, book)


def _histogram(component: Component) -> CountPlan:
    release = count_release(component.public["topics"])
    if not isinstance(release.rule, UnitKeywords):
        raise fail("topics", "a histogram of keywords", release.rule.kind)
    return release


def _texts(component: Component, histogram: CountPlan) -> Component:
    """Returns the texts as a component of their own, whose noise gap is what the histogram leaves of the whole one."""
    shown = component.public["generation"]
    if not isinstance(shown, Mapping) or not {"candidates", "labels", "shots_per_label", "max_tokens"} <= set(shown):
        raise fail("generation", "the plan of a generation token by token", type(shown).__name__)
    gap = component.implementation_delta - histogram.implementation_delta
    tickets = tuple(ticket for ticket in component.tickets if ticket.label is not None)
    per_release = SecureRandom.implementation_delta("binomial")  # below every gap of a token
    if gap < per_release:
        raise fail("implementation_delta", "that of the histogram and of the texts", component.implementation_delta)
    return dataclasses.replace(component, tickets=tickets, public=shown, implementation_delta=gap)


def are_documents(holder: object) -> bool:
    """Returns whether what was given to the verifier is released documents."""
    return has_members(holder, "documents" if isinstance(holder, Mapping) else "texts")


def released_document_problems(holder: Any, component: Component | None) -> Iterator[str]:
    """Compares released documents with the component that their report charges.

    Formal guarantees:
      - No problem means: the component's tickets pay for as many topics, of its vocabulary and with counts from
        `least_units` on, and for as many texts of each; the plan shown is the component's.
      - That topics and texts are those that were released is their sender's word.
    """
    if isinstance(holder, Mapping):
        texts = [(item["topic"], item["number"]) for item in holder["documents"]]
        if any(set(item) != {"text", "topic", "number"} for item in holder["documents"]):
            yield "documents: expected a text, a topic and a number of each, found others"
    else:
        texts = [(item.topic, item.number) for item in holder.texts]
    if component is None or not shows_documents(component):
        yield f"documents: {len(texts)} were released, which no component of the report pays for"
        return
    shown, histogram = component.parameters, _histogram(component)
    if canonical_json(dict(member(holder, "plan"))) != canonical_json(shown):
        yield f"plan: expected what {component.name!r} shows, found another"
    topics = member(holder, "topics")
    names = [name for name, _ in topics]
    most = len({ticket.label for ticket in component.tickets} - {None})
    if len(set(names)) != len(names) or len(names) > most or not set(names) <= set(histogram.rule.declared or ()):
        yield f"topics: expected at most {most} distinct keywords of its vocabulary, found {names}"
    if any(check_int("topics", count, low=-(2**53)) < shown["least_units"] for _, count in topics):
        yield f"topics: expected counts from {shown['least_units']} on, found fewer units"
    planned = shown["generation"]["shots_per_label"]
    numbers = [check_int("number", number, low=0) for _, number in texts]
    if len(set(texts)) != len(texts) or any(number >= planned for number in numbers):
        yield f"documents: expected at most {planned} of each topic, each once"
    if not {topic for topic, _ in texts} <= set(names):
        yield "documents: expected ones of the released topics, found others"
