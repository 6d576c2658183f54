"""What the owners of a ledger declare of it, in its header: public text, which no rule reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain_dpicl.privacy._validate import check_choice, fail
from langchain_dpicl.privacy.ledger.amounts import check_name
from langchain_dpicl.privacy.ledger.store import public_fields

MOST_OF_ABOUT, MOST_HOSTS = 500, 100
"""Characters of one declared text, and hosts with a country: a first line is read often."""


@dataclass(frozen=True, slots=True)
class LedgerAbout:
    """What the owners of a ledger declare for those who approve it: public text, which nothing checks.

    Attributes:
      purpose: what the records are used for; "": not declared, as with the others.
      owner: who answers for the ledger.
      approver: who agreed to its limits.
      retention: how long records, ledger and releases are kept.
      countries: hosts that receive private text, each with the country where it stands, sorted.
    """

    purpose: str = ""
    owner: str = ""
    approver: str = ""
    retention: str = ""
    countries: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, about: Any) -> LedgerAbout | None:
        """Reads texts by name, and `countries` as a mapping from host to country; nothing declared is None.

        Raises:
          ConfigurationError: a name is another, a text is blank, not printable, or longer than 500 characters, or there
            are more than 100 hosts.
        """
        if about is not None and not isinstance(about, Mapping):
            raise fail("about", "a mapping", type(about).__name__, f"Its names are {', '.join(public_fields(cls))}.")
        given = {check_choice("about", name, public_fields(cls)): value for name, value in (about or {}).items()}
        countries = given.pop("countries", {})
        if not isinstance(countries, Mapping):
            raise fail("about: countries", "a mapping from host to country", type(countries).__name__)
        if len(countries) > MOST_HOSTS:
            raise fail("about: countries", f"at most {MOST_HOSTS} hosts", len(countries))
        pairs = ((check_name("about: host", host), _check_text(host, place)) for host, place in countries.items())
        made = cls(**{name: _check_text(name, value) for name, value in given.items()}, countries=tuple(sorted(pairs)))
        return None if made == cls() else made

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON form of what was declared; `parse` inverts it exactly."""
        data = {**{name: getattr(self, name) for name in public_fields(type(self))}, "countries": dict(self.countries)}
        return {name: value for name, value in data.items() if value}


def _check_text(name: str, value: Any) -> str:
    if isinstance(value, str) and value.strip() and len(value) <= MOST_OF_ABOUT and value.isprintable():
        return value
    found = f"a text of {len(value)} characters" if isinstance(value, str) else type(value).__name__
    raise fail(f"about: {name}", f"one line of printable text, not blank, of at most {MOST_OF_ABOUT} characters", found)
