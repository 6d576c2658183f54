"""Files of released values written by hand: with the content digest that goes with them, and reports that bear out."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from langchain_dpicl.budget.budget import Budget
from langchain_dpicl.privacy.accounting.events import PureEvent, canonical_json
from langchain_dpicl.privacy.ledger.tickets import ShareTerms, Ticket
from langchain_dpicl.reports.claims import CONTENT_DIGEST, release_claims, with_content_digest
from langchain_dpicl.reports.report import VerifiedReport
from langchain_dpicl.runs.release_run import _digest


def with_digest(report: Mapping[str, Any]) -> dict[str, Any]:
    """A budget's report with the digest that fits, as somebody writes it who knows the format."""
    body = {key: value for key, value in report.items() if key != "digest"}
    return {**body, "digest": hashlib.sha256(canonical_json(body).encode()).hexdigest()}


def assert_found(found: VerifiedReport, *words: str) -> None:
    assert not found.ok
    for word in words:
        assert any(word in problem for problem in found.problems), (word, found.problems)


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A file's JSON object with the content digest that goes with it, as somebody writes it who knows how."""
    report = state.get("report")
    bare = {key: value for key, value in state.items() if key != CONTENT_DIGEST}
    if isinstance(report, Mapping):
        bare["report"] = {key: value for key, value in report.items() if key != CONTENT_DIGEST}
    elif "report" in state:
        return bare
    return with_content_digest(bare)


def edited(state: Mapping[str, Any], edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A file's JSON object after an edit, with all digests made anew, as a forger would."""
    found = copy.deepcopy(dict(state))
    edit(found)
    found["report"]["budget"] = with_digest(found["report"]["budget"])
    return sealed(found)


def component(state: Mapping[str, Any]) -> dict[str, Any]:
    """The component that a file's report is of."""
    return state["report"]["budget"]["shares"][0]["components"][0]  # type: ignore[no-any-return]


def shown(state: Mapping[str, Any]) -> dict[str, Any]:
    """What that component shows."""
    return component(state)["public"]  # type: ignore[no-any-return]


def at(state: Any, path: str) -> tuple[Any, Any]:
    """The dict or list that holds a place, and the place's key in it."""
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        state = state[part]
    return state, last


def resealed(text: str | bytes, **changes: Any) -> str:
    """The text of such a file after some changes; ... takes a key away."""
    state = {key: value for key, value in {**json.loads(text), **changes}.items() if value is not ...}
    return json.dumps(sealed(state))


def rechained(journal: bytes, entries: Sequence[Any]) -> bytes:
    """A run's journal with these releases instead of its own, as somebody writes it who knows how."""
    head, digest, lines = json.loads(journal.splitlines()[0])["entry"], "", []
    for entry in (head, *entries):
        digest = _digest(digest, entry)
        lines.append(json.dumps({"entry": entry, "digest": digest}).encode() + b"\n")
    return b"".join(lines)


def paid(epsilon: float = 1.5) -> dict[str, Any]:
    """The report of a release that cost `epsilon`, at a delta of 1e-6."""
    return json.loads(_paid(epsilon))  # type: ignore[no-any-return]


@cache
def _paid(epsilon: float) -> str:
    budget = Budget(epsilon=epsilon, delta=1e-6)
    budget.declare("few-shot", tickets=[Ticket("t", PureEvent(epsilon / 2))], epsilon=epsilon)
    return json.dumps(report_by_hand(budget.report().to_dict(), "few-shot"))


def report_by_hand(inner: Mapping[str, Any], name: str, /, **changes: Any) -> dict[str, Any]:
    """The report of a release of one component of a ledger's report, whatever it released."""
    for item in inner["shares"]:
        terms = ShareTerms.from_dict({key: value for key, value in item.items() if key != "sealed_at"})
        for own in terms.components:
            if own.name == name:
                return {**release_claims(terms, own, inner), "plan": own.parameters, "budget": inner, **changes}
    raise LookupError(name)
