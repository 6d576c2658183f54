"""Verifies released values (pools, prompts, documents, counts, words) against the component that is charged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_dpicl.privacy._validate import check_choice, check_int, check_real
from langchain_dpicl.privacy.accounting.events import canonical_json
from langchain_dpicl.privacy.extensions.unit_values import UNITS, words_of
from langchain_dpicl.privacy.extensions.word_release import WordRelease, may_leave, word_release
from langchain_dpicl.privacy.ledger.tickets import Component
from langchain_dpicl.privacy.mechanisms.noise import grid_step
from langchain_dpicl.reports.public_words import public_words
from langchain_dpicl.reports.verify import has_members, member, shown_plan

_WITH_LABEL = {"labelled", "public"}
_RELEASED = {"labelled", "rejected"}
_STATUSES = _WITH_LABEL | _RELEASED | {"waiting"}


def _has_plan(component: Component | None, method: str) -> bool:
    return component is not None and component.public.get("method") == method


def is_pool(holder: object) -> bool:
    """Returns whether what was given to the verifier is a labelled pool."""
    return has_members(holder, "entries", *(("report",) if isinstance(holder, Mapping) else ()))


def pool_problems(pool: object, component: Component | None) -> Iterator[str]:
    """Compares a labelled pool with the component that its report charges.

    Formal guarantees:
      - No problem means: every entry that something was released for (labelled or rejected) is paid for by the
        component's tickets, which are those of labelling, and the pool's plan is what the component shows.
      - That a label said to be public is public, and which label an input got, is its sender's word.
    """
    counts = dict.fromkeys(_STATUSES, 0)
    has_votes = False
    for place, entry in enumerate(member(pool, "entries")):
        status, votes = member(entry, "status"), member(entry, "votes")
        counts[check_choice(f"entries[{place}].status", status, _STATUSES)] += 1
        label = member(entry, "label")
        fits = isinstance(label, str) if status in _WITH_LABEL else label is None
        if not fits or (votes is not None and status not in _RELEASED):
            yield f"entries[{place}]: its label or votes do not go with status {status!r}"
        has_votes |= votes is not None
    released = counts["labelled"] + counts["rejected"]
    if component is None:
        if released:
            yield f"entries: {released} hold a release, which no component of the report pays for"
        return
    shown = component.parameters
    if canonical_json(member(pool, "plan")) != canonical_json(shown):
        yield f"plan: expected what {component.name!r} shows, found another"
    if released and not _has_plan(component, "labels"):
        yield f"entries: {released} hold a release, but {component.name!r} shows no labelling"
    elif released:
        yield from _unpaid(counts, component)
        mechanism = shown_plan(shown).release.mechanism
        if has_votes and mechanism.releases != "vector":
            yield f"entries: votes are shown, which {mechanism.name} never releases"


def _unpaid(counts: Mapping[str, int], component: Component) -> Iterator[str]:
    """Compares the releases that a pool holds with what the tickets allow."""
    queries, answers = component.public["max_queries"], component.public["max_answers"]
    released, labelled = counts["labelled"] + counts["rejected"], counts["labelled"]
    if released > check_int("max_queries", queries, low=1):
        yield f"entries: {released} are labelled or rejected, its tickets allow {queries}"
    if answers is not None and labelled > check_int("max_answers", answers, low=1):
        yield f"entries: {labelled} are labelled, its tickets allow {answers}"


PROMPT_FORMAT = "langchain-dpicl/soft-prompt"
PROMPT_VERSION = 1

# What a component shows under "training" where a prompt was trained: by the part of it, "" for all of it.
_TRAINED: Mapping[str, frozenset[str]] = {
    "": frozenset({"init_text", "method", "model", "num_virtual_tokens", "optimizer", "pair_key", "target_key"})
    | {"task", "text_key", "tokenizer", "weights"},
    "optimizer": frozenset({"learning_rate", "name", "schedule", "weight_grid"}),
    "task": frozenset({"kind", "labels", "max_input_tokens", "max_target_tokens", "template", "words"}),
}
# Where the training names what a prompt says of its base model; weights that nothing names are in neither place.
_OF_BASE = {"name": "model", "tokenizer": "tokenizer", "weights": "base_weights"}
_OF_RUN = frozenset({"ledger_id", "step", "steps"})


def prompt_problems(holder: object, report: Mapping[str, Any], component: Component | None) -> Iterator[str]:
    """Compares a trained prompt, or its report alone, with the component that the report charges.

    Formal guarantees:
      - No problem means: the numbers of the prompt are said to be paid for by training steps; the steps said to be made
        are no more than those; and the prompt is for the method, the length, the task, the model and the tokenizer
        that the component shows.
      - That the numbers are the ones that those steps released, that the steps were made, and what the component shows
        of the training beside (rule, fields, digest of the model) is their sender's word.
      - What is neither a prompt nor the report of one has no problem.
    """
    is_prompt = has_members(holder, "arrays", *(("report",) if isinstance(holder, Mapping) else ()))
    if component is None or not _has_plan(component, "training"):
        if is_prompt and component is None:
            yield "arrays: they were trained, which no component of the report pays for"
        elif is_prompt and component is not None:
            yield f"arrays: they were trained, but {component.name!r} shows no training steps"
        return
    yield from _run_problems(report, component, has_all=is_prompt)
    if is_prompt:
        yield from _prompt_problems(holder, component)


def _run_problems(report: Mapping[str, Any], component: Component, *, has_all: bool) -> Iterator[str]:
    """Compares what a report says of a run with the steps that were charged."""
    if has_all and (missing := sorted(_OF_RUN - set(report))):
        yield f"report: expected the ledger and the steps of a training, found no {missing}"
    most = check_int("steps", component.public["steps"], low=1)
    steps, step = report.get("steps", most), report.get("step", 0)
    if canonical_json(steps) != canonical_json(most):
        yield f"report.steps: expected {most}, as {component.name!r} shows, found {steps!r}"
    if type(step) is not int or not 0 <= step <= most:
        yield f"report.step: expected a whole number of at most {most} steps, found {step!r}"


def _prompt_problems(prompt: object, component: Component) -> Iterator[str]:
    """Compares what a prompt says of itself with the training that its component shows."""
    if isinstance(prompt, Mapping):
        for name, value in (("format", PROMPT_FORMAT), ("version", PROMPT_VERSION)):
            if canonical_json(prompt.get(name)) != canonical_json(value):
                yield f"{name}: expected {value!r}, found {prompt.get(name)!r}"
    training = component.public["training"]
    for part, names in _TRAINED.items():
        if missing := sorted(names - set(training[part] if part else training)):
            yield f"{component.name!r} shows no {missing} of its {part or 'training'}"
    shown = {
        "method": training["method"],
        "num_virtual_tokens": training["num_virtual_tokens"],
        **{f"base.{name}": training[where] for name, where in _OF_BASE.items() if where in training},
        **{f"task.{name}": value for name, value in training["task"].items()},
    }
    claims = _prompt_claims(prompt)
    for name in sorted({*shown, *claims}):
        wanted, claimed = (canonical_json(of[name]) if name in of else "nothing" for of in (shown, claims))
        if wanted != claimed:
            yield f"{name}: expected {wanted}, as {component.name!r} shows, found {claimed}"


def _prompt_claims(prompt: object) -> dict[str, Any]:
    """Returns what a prompt says that it was trained for, by where it says so."""
    if isinstance(prompt, Mapping):
        claims = {name: prompt[name] for name in ("method", "num_virtual_tokens", "task", "base") if name in prompt}
    else:
        holder: Any = prompt
        claims = {"method": holder.method, "num_virtual_tokens": holder.num_virtual_tokens}
        claims |= {"task": holder.task.to_dict(), "base": holder.base}
    parts = {part: claims.pop(part, {}) for part in ("task", "base")}
    return claims | {f"{part}.{name}": value for part, held in parts.items() for name, value in held.items()}


def are_documents(holder: object) -> bool:
    """Returns whether what was given to the verifier is released documents."""
    return has_members(holder, "documents" if isinstance(holder, Mapping) else "texts")


def released_document_problems(holder: Any, component: Component | None) -> Iterator[str]:
    """Compares released documents with the component that their report charges.

    Formal guarantees:
      - No problem means: the component's tickets pay for as many topics, of its vocabulary and with counts from
        `least_units` on, or words that its release can hold; for words and pairs of each that theirs can hold; and for
        as many texts of each; the plan shown is the component's.
      - That topics, words and texts are those that were released is their sender's word; some may have been taken out.
    """
    if isinstance(holder, Mapping):
        texts = [(item["topic"], item["number"]) for item in holder["documents"]]
        if any(set(item) != {"text", "topic", "number"} for item in holder["documents"]):
            yield "documents: expected a text, a topic and a number of each, found others"
    else:
        texts = [(item.topic, item.number) for item in holder.texts]
    if component is None or not _has_plan(component, "documents"):
        yield f"documents: {len(texts)} were released, which no component of the report pays for"
        return
    shown = component.parameters
    plan = shown_plan(shown)
    if canonical_json(dict(member(holder, "plan"))) != canonical_json(shown):
        yield f"plan: expected what {component.name!r} shows, found another"
    topics = [(name, count) for name, count in member(holder, "topics")]
    names = [name for name, _ in topics]
    if len(set(names)) != len(names) or len(names) > plan.num_topics:
        yield f"topics: expected at most {plan.num_topics} distinct ones, found {names}"
    yield from topic_problems(topics, plan)
    yield from _group_problems(member(holder, "topic_words" if isinstance(holder, Mapping) else "words"), names, plan)
    planned = plan.documents_per_topic
    numbers = [check_int("number", number, low=0) for _, number in texts]
    if len(set(texts)) != len(texts) or any(number >= planned for number in numbers):
        yield f"documents: expected at most {planned} of each topic, each once"
    if not {topic for topic, _ in texts} <= set(names):
        yield "documents: expected ones of the released topics, found others"


_GROUP = ("label", "words", "pairs")


def _group_problems(words: Any, topics: Sequence[Any], plan: Any) -> Iterator[str]:
    """Compares the words of all topics with what their releases can hold."""
    groups = [tuple(item[key] for key in _GROUP) if isinstance(item, Mapping) else tuple(item) for item in words]
    if any(isinstance(item, Mapping) and set(item) != set(_GROUP) for item in words):
        yield f"topic_words: expected {', '.join(_GROUP)} of each group, found others"
    labels = [label for label, _, _ in groups]
    if len(set(labels)) != len(labels) or not set(labels) <= set(topics):
        yield "topic_words: expected one group of a released topic each, found others"
    for label, *found in groups:
        yield from topic_word_problems(label, *found, plan=plan)


def topic_problems(topics: Sequence[tuple[Any, Any]], plan: Any) -> Iterator[str]:
    """Compares topics and their noisy counts or weights with what the release of topics can hold.

    Args:
      topics: in any order.
      plan: of documents.
    """
    if isinstance(plan.topics, WordRelease):
        found = sorted(topics, key=lambda pair: (-pair[1], pair[0]))
        yield from _as_topics(word_problems([(None, found, ())], _words_alone(plan.topics, None, None)))
        return
    if not {name for name, _ in topics} <= set(plan.topics.rule.declared):
        yield "topics: expected keywords of its vocabulary, found others"
    if any(check_int("topics", count, low=-(2**53)) < plan.least_units for _, count in topics):
        yield f"topics: expected counts from {plan.least_units} on, found fewer units"


def _as_topics(problems: Iterator[str]) -> Iterator[str]:
    return (problem.replace("words:", "topics:", 1) for problem in problems)


def topic_word_problems(topic: str, words: Any, pairs: Any, *, plan: Any) -> Iterator[str]:
    """Compares the words and pairs of one topic with what their releases can hold.

    Args:
      topic: whose words they are.
      words: with noisy weights.
      pairs: the same of pairs.
      plan: of documents.
    """
    if plan.words is None:
        if words or pairs:
            yield "words: expected none, as the plan releases none"
        return
    if not {word for word, _ in words}.isdisjoint(words_of(topic)):
        yield "words: expected others than those of the topic, which leave before"
    yield from word_problems([(topic, words, pairs)], _words_alone(plan.words, plan.pairs, topic))


def _words_alone(words: WordRelease, pairs: WordRelease | None, label: str | None) -> dict[str, Any]:
    """Returns the plan of one release of words and one of pairs, as `word_problems` reads it."""
    return {
        "words": words.to_dict(),
        "pairs": None if pairs is None else pairs.to_dict(),
        "labels": [] if label is None else [label],
    }


def first_word_problems(groups: Sequence[Sequence[Any]], plan: Any) -> Iterator[str]:
    """Compares words that left before texts with what the plan of a generation can release.

    Args:
      groups: of each label, or of some, its name, its words and no pairs.
      plan: of the generation.
    """
    labels = [label for label, _, _ in groups]
    if plan.words is None:
        yield "words: expected none, as the plan releases none"
    elif len(set(labels)) != len(labels) or not set(labels) <= set(plan.sizes):
        yield "words: expected one group of a label each, found others"
    else:
        for label, *found in groups:
            yield from word_problems([(label, *found)], _words_alone(plan.words, None, label))


def have_first_words(holder: object) -> bool:
    """Returns whether words left before what was given to the verifier: demonstrations, or their report."""
    return _first_words(holder) is not None


def released_first_word_problems(holder: object, component: Component | None) -> Iterator[str]:
    """Compares words that left before demonstrations with the component that the report charges.

    Formal guarantees:
      - No problem means: the component's tickets pay for one release of words of each label that has some, with the
        plan that is shown, and what is there is what that plan may release.
      - That the words are those that were released is their sender's word.
    """
    groups = [tuple(item[key] for key in _GROUP) for item in _first_words(holder) or ()]
    if component is None or not _has_plan(component, "generation"):
        yield f"words: of {len(groups)} labels were released, which no component of the report pays for"
        return
    yield from first_word_problems(groups, shown_plan(component.parameters))


def _first_words(holder: object) -> Any:
    report = member(holder, "report")
    return member(report if isinstance(report, Mapping) else holder, "released_words")


def are_counts(holder: object) -> bool:
    """Returns whether what was given to the verifier is released counts."""
    return has_members(holder, "counts", "report" if isinstance(holder, Mapping) else "plan")


def released_count_problems(holder: object, component: Component | None) -> Iterator[str]:
    """Compares released counts with the component that their report charges.

    Formal guarantees:
      - No problem means: the component's ticket pays for one release of counts, with the plan that is shown, and what
        left is what that plan may release: all declared values, or others that reach the threshold.
      - That the counts are those that were released is their sender's word.
    """
    counts = member(holder, "counts")
    pairs = list(counts.items()) if isinstance(counts, Mapping) else [(value, count) for value, count in counts]
    if component is None or not _has_plan(component, "counts"):
        yield f"counts: {len(pairs)} were released, which no component of the report pays for"
        return
    if canonical_json(member(holder, "plan")) != canonical_json(component.parameters):
        yield f"plan: expected what {component.name!r} shows, found another"
    release = shown_plan(component.parameters).release
    values, threshold = [value for value, _ in pairs], release.mechanism.threshold
    expected = [UNITS] if release.rule.name is None else release.rule.declared
    if len(set(values)) != len(values) or (expected is not None and values != list(expected)):
        yield f"counts: expected one for each of {list(expected or ())}, found {values}"
    least = min((check_int("counts", count, low=-(2**53)) for _, count in pairs), default=threshold)
    if threshold is not None and least is not None and least < threshold:
        yield f"counts: expected none below the threshold, {threshold}, found {least}"


def are_words(holder: object) -> bool:
    """Returns whether what was given to the verifier is released words."""
    return has_members(holder, *(("words", "report") if isinstance(holder, Mapping) else ("groups", "plan")))


def released_word_problems(holder: object, component: Component | None) -> Iterator[str]:
    """Compares released words with the component that their report charges.

    Formal guarantees:
      - No problem means: the component's tickets pay for one release of words of each label, with the plan that is
        shown, and what is there is what that plan may release: words in the form in which they are counted, none of
        them denied or (for the public words of this version) left out, pairs of two of them, and noisy weights that
        reach the threshold, on the grid of the noise, the largest first.
      - That the words are those that were released is their sender's word; some may have been taken out since.
    """
    if isinstance(holder, Mapping):
        groups = [tuple(item[key] for key in _GROUP) for item in holder["words"]]
        if any(set(item) != set(_GROUP) for item in holder["words"]):
            yield f"words: expected {', '.join(_GROUP)} of each group, found others"
    else:
        groups = list(member(holder, "groups"))
    if component is None or not _has_plan(component, "words"):
        count = sum(len(words) for _, words, _ in groups)
        yield f"words: {count} were released, which no component of the report pays for"
        return
    if canonical_json(member(holder, "plan")) != canonical_json(component.parameters):
        yield f"plan: expected what {component.name!r} shows, found another"
    yield from word_problems(groups, component.parameters)


def word_problems(groups: Sequence[Sequence[Any]], plan: Mapping[str, Any]) -> Iterator[str]:
    """Compares groups of released words with what their plan can release: labels, weights, words and pairs.

    Args:
      groups: of each label its name, its words and its pairs; the latter two with noisy weights.
      plan: JSON-able public plan of a release of words.
    """
    words = word_release(plan["words"])
    releases = (words, None if plan["pairs"] is None else word_release(plan["pairs"]))
    labels = plan["labels"] or [None]
    if [label for label, _, _ in groups] != labels:
        yield f"words: expected one group for each of {plan['labels'] or 'all units'}, found others"
    known, shown = public_words(), words.rule.to_dict()
    left_out = known.left_out if shown["public_words"] == known.digest else frozenset[str]()
    never = left_out.union(shown["denied"])
    for _, *found in groups:
        for name, items, release in zip(("words", "pairs"), found, releases, strict=True):
            if release is not None:
                yield from _weight_problems(name, items, release)
            elif items:
                yield f"{name}: expected none, as the plan releases no pairs"
        held = {word for word, _ in found[0]}
        if not never.isdisjoint(held):
            yield "words: expected no denied word and no public stop word, found one"
        if not all(map(may_leave, held)):
            yield "words: expected single words as they are counted, lower case and of letters, found another"
        both = [pair.split(" ") for pair, _ in found[1]]
        if any(len(pair) != 2 or pair[0] == pair[1] or not held.issuperset(pair) for pair in both):
            yield "pairs: expected two different ones of the group's words each, found others"


def _weight_problems(name: str, items: Sequence[Any], release: WordRelease) -> Iterator[str]:
    """Compares noisy weights with the noise and the threshold that made them."""
    weights = [check_real(name, weight, low=0.0) for _, weight in items]
    least, step = release.mechanism.threshold, grid_step(release.scale)
    if len({item for item, _ in items}) != len(items):
        yield f"{name}: expected each once, found one twice"
    if any(weight < least for weight in weights):
        yield f"{name}: expected none below the threshold, {least:g}"
    if any(weight % step for weight in weights):
        yield f"{name}: expected multiples of {step:g}, the grid of the noise, found another weight"
    if [item for item, _ in items] != [item for item, _ in sorted(items, key=lambda pair: (-pair[1], pair[0]))]:
        yield f"{name}: expected the largest weight first, ties by spelling, found another order"
