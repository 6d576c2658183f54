"""Lists the text that the embedded model may be built from: each file with its hash and the works in it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from langchain_dpicl.exceptions import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Source:
    """A work whose statistics are in the tables.

    Attributes:
      work: its title and author.
      repository: where its text was taken from, without "https://".
      commit: all 40 hexadecimal digits of the version that was taken.
      licence: of the text at that commit.
    """

    work: str
    repository: str
    commit: str
    licence: str

    def __post_init__(self) -> None:
        """Refuses a source that cannot be traced."""
        if not (self.work and self.repository and self.licence and re.fullmatch("[0-9a-f]{40}", self.commit)):
            raise ConfigurationError(
                f"expected a work with a repository, a commit of 40 hexadecimal digits and a licence, found {self!r}"
            )


@dataclass(frozen=True, kw_only=True)
class TracedFile:
    """A corpus file whose text was compared with the repositories of its works.

    Attributes:
      sha256: of the compressed file.
      sources: the works in it, at least one.
    """

    sha256: str
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        """Refuses a file of unnamed works."""
        if not self.sources:
            raise ConfigurationError("expected at least one source for a corpus file, found none")


# Repository and commit are named because licences change: in 2026 most textbooks of OpenStax went from CC BY to CC BY-
# NC-SA. `NOTICE` names the same works; a test compares the two.
def _openstax(title: str, name: str, commit: str) -> Source:
    return Source(
        work=f"{title}, by OpenStax, Rice University",
        repository=f"github.com/openstax/osbooks-{name}",
        commit=commit,
        licence="CC BY 4.0",
    )


SOURCES: Mapping[str, TracedFile] = {
    "banking77.txt.xz": TracedFile(
        sha256="a7f4f166add712a1004723f206a049c2be98bf4111ab28faf1e83f0c710e4362",
        sources=(
            Source(
                work="Banking77, by Casanueva et al., PolyAI",
                repository="github.com/PolyAI-LDN/task-specific-datasets",
                commit="57ec275d8078af65b7731c2a98be812d844a6d6b",
                licence="CC BY 4.0",
            ),
        ),
    ),
    "books.txt.xz": TracedFile(
        sha256="c32f01eda1f13dba871d8ace98d9d6a6243e79be8a19f838227861ef04132172",
        sources=(
            Source(
                work="Classic Books as Markdown, openings of 753 books",
                repository="github.com/mlschmitt/classic-books-markdown",
                commit="944882722e9a96fa6cf2739dc2ea757e101f412f",
                licence="public domain",
            ),
        ),
    ),
    "openstax_ccby.txt.xz": TracedFile(
        sha256="21d2053213776d53b1342e35d3a4e105d6a244ffa1319f51b0f16acd7f1547b2",
        sources=(
            _openstax("American Government 3e", "american-government", "d8ce50dc1247652027a7d8216918f78bbc8511ed"),
            _openstax("World History 1 and 2", "world-history", "3e17beda9130380d24be881e6d1942dfcc1be845"),
            _openstax("Psychology 2e", "psychology", "e061043bf2f9e86ace51c4e8dc9555160f60a99d"),
            _openstax(
                "Introduction to Sociology 3e", "introduction-sociology", "d35d5f3bdac40f93607d600134865d4f13ce1f9b"
            ),
            _openstax("U.S. History", "us-history", "046331cfcea0ac1b1a8fd461b3e6aae638845af3"),
            _openstax("Astronomy 2e", "astronomy", "63157f370b09c06a4cc12832384aaaf4de1ced3b"),
            _openstax(
                "Introduction to Intellectual Property",
                "introduction-intellectual-property",
                "be76c2d982080df077b6f7f7f784d0bbbc37ee8b",
            ),
            _openstax(
                "Introduction to Business 2e", "introduction-business", "f99a5bb2eeec22a6fb042f8d95435d5b9e5564da"
            ),
        ),
    ),
    "opentrivia.txt.xz": TracedFile(
        sha256="47d45b5f5420f0de5a5d3a009e25828e7dd5542ddde07df5c40bb5cdd21d0d87",
        sources=(
            Source(
                work="OpenTriviaQA, by its contributors",
                repository="github.com/uberspot/OpenTriviaQA",
                commit="dd31530bfbb19f9505b160b89c9df4b1127e3c70",
                licence="CC BY-SA 4.0",
            ),
        ),
    ),
    "wiki_films.txt.xz": TracedFile(
        sha256="7e670d9cf10290b25c1cad10d820fb6bda5db2b451214e090024941521c6f05e",
        sources=(
            Source(
                work="Film abstracts of Wikipedia, by its contributors",
                repository="github.com/prust/wikipedia-movie-data",
                commit="91ae721d3672e8ef4f15b213c763a634250ef61a",
                # Wikipedia's licence when the abstracts were taken (April 2023); the collection itself is under MIT.
                licence="CC BY-SA 3.0",
            ),
        ),
    ),
    "wikitext_vt.txt.xz": TracedFile(
        sha256="1ff1f3cbd6439b63f06f748a68b2bc3b109adc32c031df6d254ff848c142e760",
        sources=(
            Source(
                work="WikiText-103, validation and test parts, by Merity et al. and the contributors of Wikipedia",
                repository="huggingface.co/datasets/Salesforce/wikitext",
                commit="b08601e04326c79dfdd32d625aee71d232d685c3",
                licence="CC BY-SA 3.0",
            ),
        ),
    ),
}
"""By name, every file that the shipped tables are built from."""


def traced(paths: list[Path], sources: Mapping[str, TracedFile]) -> dict[str, dict[str, object]]:
    """Returns the manifest's entry of each corpus file; refuses files without an entry, or with another hash."""
    entries: dict[str, dict[str, object]] = {}
    for path in paths:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        known = sources.get(path.name)
        if known is None or known.sha256 != digest:
            raise ConfigurationError(
                f"{path.name}: expected {'no such file' if known is None else f'sha256 {known.sha256}'}, found sha256 "
                f"{digest}. Text is used only with repository, commit and licence: compare it with its repository at a "
                "commit whose licence you have read, and name both in _embedded_sources.py and NOTICE."
            )
        entries[path.name] = {"sha256": digest, "sources": [asdict(source) for source in known.sources]}
    return entries
