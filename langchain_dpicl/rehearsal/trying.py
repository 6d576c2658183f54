"""Sets what is free beside what is private, at several epsilons: is a budget worth spending on this task?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.options.base import html_table
from langchain_dpicl.planning.expected_utility import ranges, rough_ceiling, shot_law
from langchain_dpicl.privacy._validate import Adjacency, check_int, check_real, fail
from langchain_dpicl.privacy.data.private_examples import PrivateExamples
from langchain_dpicl.rehearsal.choice import (
    FreeRival,
    Proposal,
    Verdict,
    best_votes,
    free_rivals,
    propose_rows,
)
from langchain_dpicl.rehearsal.rehearsal import Rehearsal
from langchain_dpicl.runs.release_run import new_bar, tick

EPSILONS = (1.0, 2.0, 4.0, 8.0)
_MOST_OF = 0.5
"""Share of the largest gain that the recommended epsilon brings."""


@dataclass(frozen=True, slots=True)
class TriedOption:
    """A private component at one epsilon.

    Attributes:
      component: "votes" of queries, "labels" of public inputs, or another one.
      epsilon: the share.
      counted: what the share pays for, in words.
      right: expected chance of the right label.
      low: lower end of its range.
      high: upper end of its range.
      at_most: upper end of the range of that chance with any number of such rows and no noise.
      gain: over the best that is free.
      verdict: what follows.
      design: rows and noise, in words.
      calls: model calls of all releases.
      money: what they cost.
      settings: what to give the component: `epsilon`, and the fields of its options.
    """

    component: str
    epsilon: float
    counted: str
    right: float
    low: float
    high: float
    at_most: float
    gain: float
    verdict: Verdict
    design: str
    calls: int
    money: float
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The option in words."""
        return f"private {self.component}, epsilon {self.epsilon:g}, {self.counted}"

    @property
    def span(self) -> str:
        """The range of the chance, in percent."""
        return f"{100 * self.low:.0f} to {100 * self.high:.0f}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the public numbers as JSON values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True)
class Trial:
    """What is free beside what is private, and one recommendation. `try_components` makes it.

    Formal guarantees:
      - A function of a rehearsal and public numbers: nothing private was read, and epsilon is 0.

    Attributes:
      rests_on: what all chances rest on.
      num_labels: labels that an answer can have.
      public_size: declared units.
      delta: of each share.
      free: what costs no privacy.
      options: what does.
      is_same: whether the examples are of the records' domain.
    """

    rests_on: str
    num_labels: int
    public_size: int
    delta: float
    free: tuple[FreeRival, ...]
    options: tuple[TriedOption, ...]
    is_same: bool = True

    @property
    def best_free(self) -> FreeRival:
        """The best that is free."""
        return max(self.free, key=lambda rival: rival.right)

    @property
    def recommended(self) -> TriedOption | None:
        """The least epsilon that brings at least half of the largest sure gain; None: do not spend."""
        return _thriftiest([one for one in self.options if one.verdict == "beats what is free"])

    @property
    def advice(self) -> str:
        """The recommendation in one line."""
        best, free = self.recommended, self.best_free
        if best is not None:
            private = f"private {best.component} at epsilon {best.epsilon:g}: {_percent(best.right)} ({best.span})"
            return f"{private}, {best.verdict} ({_percent(free.right)}, {free.name})"
        unsure = _thriftiest([one for one in self.options if one.verdict == "perhaps better than what is free"])
        if unsure is not None:
            private = (
                f"private {unsure.component} at epsilon {unsure.epsilon:g}: {_percent(unsure.right)} ({unsure.span})"
            )
            return f"none yet: {private} is perhaps better than {_percent(free.right)} ({free.name}); {self._how}"
        if free.right <= 1.0 / self.num_labels + _BY_CHANCE:
            guessing = _percent(1.0 / self.num_labels)
            what = f"nothing tried is better than guessing among {self.num_labels} labels ({guessing})"
            return f"do not spend: {what}; another model or wording may be"
        return f"do not spend: {free.name} says {_percent(free.right)} for nothing"

    @property
    def _how(self) -> str:
        """What would make it surer."""
        if self.is_same:
            return "four times as many public examples (max_examples=, --examples) halve the range"
        return "examples of the records' own domain would make it surer"

    def to_dict(self) -> dict[str, Any]:
        """Returns the public numbers as JSON values."""
        return {
            "rests_on": self.rests_on,
            "labels": self.num_labels,
            "public_size": self.public_size,
            "delta": self.delta,
            "free": [dataclasses.asdict(rival) for rival in self.free],
            "options": [option.to_dict() for option in self.options],
            "recommended": None if self.recommended is None else self.recommended.to_dict(),
            "advice": self.advice,
        }

    def table(self) -> str:
        """Returns free and private answers as a text table, with the recommendation as its last line."""
        wide = 2 + max(map(len, [*(one.name for one in self.free), *(one.name for one in self.options)]))
        lines = [
            f"{self.rests_on}; {self.num_labels} labels, {self.public_size:,} declared units, delta {self.delta:g}",
            f"{'':<{wide}}{'right':>6}  {'range':<10}{'at most':>8}{'calls':>11}{'money':>9}",
        ]
        lines += [f"{rival.name:<{wide}}{_percent(rival.right):>6}  free, epsilon 0" for rival in self.free]
        for option in self.options:
            lines += _option_lines(option, wide)
        lines += _LEGEND
        lines.append(f"recommended: {self.advice}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        shown = {rival.name: f"{_percent(rival.right)}, free" for rival in self.free}
        for option in self.options:
            shown[option.name] = f"{_percent(option.right)} ({option.span}), {option.verdict}"
        return html_table("Trial", {"rests on": self.rests_on, **shown, "recommended": self.advice})


def _thriftiest(options: Sequence[TriedOption]) -> TriedOption | None:
    """Returns the option of the least epsilon that brings at least half of the largest gain."""
    most = max((one.gain for one in options), default=0.0)
    enough = (one for one in options if one.gain >= _MOST_OF * most)
    return min(enough, key=lambda one: (one.epsilon, -one.gain), default=None)


_LEGEND = (
    "right: of answers; range: nine times in ten; at most: without noise, at the upper end of its range;",
    "40 x 4: 40 votes of prompts of 4 records, fill: records drawn for each place of a prompt",
)
_BY_CHANCE = 0.05
"""Above guessing by no more than this, what is free tells nothing."""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _option_lines(option: TriedOption, wide: int) -> Iterator[str]:
    yield (
        f"{option.name:<{wide}}{_percent(option.right):>6}  {option.span:<10}{_percent(option.at_most):>8}"
        f"{option.calls:>11,}{option.money:>9,.2f}"
    )
    yield f"  {option.verdict}; {option.design}"


def try_components(
    rehearsal: Rehearsal,
    public_size: int,
    *,
    delta: float,
    max_queries: int = 100,
    public_inputs: int | None = None,
    epsilons: Sequence[float] = EPSILONS,
    adjacency: Adjacency = "add_remove",
    free: Iterable[FreeRival] = (),
    private: Iterable[TriedOption] = (),
    max_calls: int | None = None,
    wordings: int = 1,
    price_in: float = 0.0,
    price_out: float = 0.0,
    record_tokens: int = 60,
    query_tokens: int = 60,
    answer_tokens: int = 1,
    progress: bool | None = False,
) -> Trial:
    """Compares what is free with private votes and labels at several epsilons, before anything is spent.

    Args:
      rehearsal: what the model did with public examples; see `rehearse`.
      public_size: declared number of units.
      delta: of each share.
      max_queries: answers that private votes pay for.
      public_inputs: inputs that PromptPATE labels; None: labels are left out.
      epsilons: shares to compare.
      adjacency: neighbouring relation.
      free: further answers that cost no privacy, with their chances.
      private: further components, with theirs.
      max_calls: most private calls of one query.
      wordings: as of `propose_rows`.
      price_in: per million prompt tokens.
      price_out: per million answer tokens.
      record_tokens: cap of a record.
      query_tokens: cap of a query.
      answer_tokens: cap of an answer.
      progress: True shows a bar, False hides it, None shows it on a terminal only.

    Raises:
      ConfigurationError: a number is out of range, or a delta that a ledger would refuse.
    """
    if not epsilons:
        raise fail("epsilons", "at least one", tuple(epsilons))
    check_int("max_queries", max_queries, low=1)
    PrivateExamples([], public_size=public_size).check_delta(delta)
    prices = [check_real(name, price, low=0.0) for name, price in (("price_in", price_in), ("price_out", price_out))]
    caps = {"record_tokens": record_tokens, "query_tokens": query_tokens, "answer_tokens": answer_tokens}
    also = tuple(free)
    counts = [("votes", max_queries, "queries")]
    if public_inputs is not None:
        counts.append(("labels", check_int("public_inputs", public_inputs, low=1), "public inputs"))

    def option(component: str, count: int, what: str, epsilon: float) -> TriedOption:
        found = propose_rows(
            rehearsal,
            public_size,
            epsilon=epsilon,
            delta=delta,
            max_queries=count,
            adjacency=adjacency,
            max_calls=max_calls,
            wordings=wordings,
            free=also,
        )
        calls = 1 + len(rehearsal.content_free) if found.calibrated else 1
        cost = found.plan.cost(**caps, calls_per_row=calls)
        return TriedOption(
            component=component,
            epsilon=epsilon,
            counted=f"{count:,} {what}",
            right=found.right,
            low=found.low,
            high=found.high,
            at_most=_most(rehearsal, found),
            gain=found.gain,
            verdict=found.verdict,
            design=_in_words(found),
            calls=cost.private_calls + cost.public_calls,
            money=cost.money(price_in=prices[0], price_out=prices[1]),
            settings=_settings(found, epsilon, is_labels=component == "labels"),
        )

    prompts = [rival for rival in free_rivals(rehearsal) if not rival.shots]
    plans: list[TriedOption] = []
    asked = [(*what, epsilon) for what in counts for epsilon in epsilons]
    with new_bar(len(asked), "plan", "plans", progress=progress) as bar:
        for terms in asked:
            plans.append(option(*terms))
            tick(bar)
    return Trial(
        rests_on=rehearsal.rests_on,
        num_labels=len(rehearsal.labels),
        public_size=public_size,
        delta=delta,
        free=(*prompts, *also, best_votes(rehearsal)),
        options=(*plans, *private),
        is_same=rehearsal.origin == "same",
    )


def _most(rehearsal: Rehearsal, found: Proposal) -> float:
    law = shot_law(found.plan.release, found.plan.public_size)
    ends = rehearsal.interval(rough_ceiling, labels=len(rehearsal.labels), law=law, calibrated=found.calibrated)
    return ranges(found.right, found.low, found.high, ceiling=found.at_most, most=ends)["ceiling_high"]


def _in_words(found: Proposal) -> str:
    design, noise = found.design, found.plan.release.mechanism.name
    reading = ", calibrated" if found.calibrated else ""
    if design.rows == "units":
        return f"{design.num_slots} units, {noise}{reading}"
    return f"{design.num_slots} x {design.shots_per_slot}, fill {design.overfill:g}, {noise}{reading}"


def _settings(found: Proposal, epsilon: float, *, is_labels: bool) -> dict[str, Any]:
    # The chances are those without a threshold, which labels have unless it is taken away.
    answers = {"calibrate": found.calibrated, **({"abstain_below": "never"} if is_labels else {})}
    return {
        "epsilon": epsilon,
        "max_queries": found.plan.max_queries,
        "noise": found.plan.release.mechanism.name,
        "rows": found.design.option(),
        "answers": answers,
    }
