"""Public text that the base model of the soft-prompt benchmark is made from.

Plain texts to fill gaps in, and shelves of labelled ones: reviews by sentiment, quiz questions by category, bank
queries by intent, texts by where they come from, questions by what they ask for. The last labels, and "business" among
the topics, are a rule's, made from the words of a text; nobody gave them.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import lzma
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TEXTBOOKS = "openstax_ccby"
PLAIN = ("books", "wiki_films", TEXTBOOKS, "wikitext_vt")
REVIEWS, QUESTIONS = "ood_imdb", "ood_qqp_questions"
LABELLED = ("opentrivia", "banking77")
_SOURCES = {"books": "book", "wiki_films": "film", TEXTBOOKS: "textbook", "wikitext_vt": "article"}
_BUSINESS = re.compile(r"\b(business(es)?|compan(y|ies)|customers?|investors?|profits?|marketing)\b")
"""What makes a piece of a textbook one about business: the file holds textbooks of eight subjects."""
_PLACES = "country|city|state|town|river|island|continent|capital|planet"
_ASKED = (
    (r"what (does|do) .* (stand for|mean)\b|what is the (abbreviation|acronym|full form)", "short"),
    (r"(who|whose|whom)\b|what (actor|actress|singer|president|author|man|woman|person)", "person"),
    (rf"where\b|(what|which) ({_PLACES})|(.* )?in (what|which) ({_PLACES})", "place"),
    (r"when\b|how (many|much|old|long|far|fast|tall|big|often)|(in )?(what|which) (year|number|date|day)", "number"),
    (r"(why|how)\b|what (is|are) (a|an|the meaning|the difference|the best way)\b|explain|describe", "description"),
    (r"(what|which)\b", "thing"),
)
"""What a question asks for, by its first words: the first pattern that fits."""
_TOPICS = {
    "sports": "sports",
    "science-technology": "science",
    "world": "world",
    "geography": "world",
    "history": "world",
}
_SHORTEST, _LONGEST = 12, 260
_MOST_LINES = 12_000
Shelf = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Public texts.

    Attributes:
      lines: texts to fill gaps in.
      shelves: by name, texts by label.
    """

    lines: list[str] = dataclasses.field(repr=False)
    shelves: dict[str, Shelf] = dataclasses.field(repr=False)

    @property
    def shown(self) -> str:
        """How much there is."""
        labelled = sum(len(texts) for shelf in self.shelves.values() for texts in shelf.values())
        chars = sum(map(len, self.lines)) / 1e6
        return f"{len(self.lines):,} plain texts ({chars:.1f} M characters), {labelled:,} labelled ones"


def plain(text: str) -> str:
    """Returns a text in small letters, with the spaces that people write.

    >>> plain("It is n't  bad , really .")
    "it isn't bad, really."
    """
    small = re.sub(r"\s+", " ", text.lower()).strip()
    return re.sub(r" (n't|'\w|[.,!?;:])", r"\1", small)


def read(corpus: Path, data: Path, *, most_chars: int) -> Corpus:
    """Reads the public files; which chunks are taken is drawn with a public seed.

    Args:
      corpus: folder of plain text, documents apart by an empty line (`*.txt.xz`).
      data: folder of `ood_imdb.jsonl.gz` and `ood_qqp_questions.jsonl.gz`.
      most_chars: of each plain file.

    Raises:
      SystemExit: a file is missing.
    """
    coins = random.Random(0)
    names = [corpus / f"{name}.txt.xz" for name in (*PLAIN, *LABELLED)]
    names += [data / f"{name}.jsonl.gz" for name in (REVIEWS, QUESTIONS)]
    if missing := [path.name for path in names if not path.is_file()]:
        raise SystemExit(f"expected public text to make a model from, found no {', '.join(missing)}: pass --model")
    source: Shelf = {_SOURCES[name]: _chunks(corpus / f"{name}.txt.xz", most_chars) for name in PLAIN}
    reviews = _reviews(data / f"{REVIEWS}.jsonl.gz")
    trivia, bank = (_headed(corpus / f"{name}.txt.xz") for name in LABELLED)
    questions = [plain(row["text"]) for row in _rows(data / f"{QUESTIONS}.jsonl.gz")]
    questions += [text for texts in trivia.values() for text in texts]
    source |= {"review": [text for texts in reviews.values() for text in texts], "question": questions}
    lines = [text for texts in source.values() for text in coins.sample(texts, min(len(texts), _MOST_LINES))]
    coins.shuffle(lines)
    business = _chunks(corpus / f"{TEXTBOOKS}.txt.xz", most_chars, about=_BUSINESS)
    topics: Shelf = defaultdict(list, {"business": business})
    for category, topic in _TOPICS.items():
        topics[topic] += trivia.get(category, [])
    shelves = {"review": reviews, "question": _asked(questions), "topic": dict(topics), "source": source}
    return Corpus(lines, shelves | {"trivia": trivia, "bank": bank})


def _chunks(path: Path, most_chars: int, *, about: re.Pattern[str] | None = None) -> list[str]:
    """Returns the first paragraphs of a file, cut into pieces of some sentences; those alone that match `about`."""
    found: list[str] = []
    size = 0
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            for piece in _pieces(line):
                if about is not None and not about.search(piece):
                    continue
                found.append(piece)
                size += len(piece)
            if size >= most_chars:
                break
    return found


def _pieces(text: str) -> Iterator[str]:
    """Yields sentences, joined up to a piece's length."""
    piece = ""
    for sentence in re.split(r"(?<=[.!?])\s+", plain(re.sub(r"<br ?/?>", " ", text))):
        if piece and len(piece) + len(sentence) > _LONGEST:
            yield piece
            piece = ""
        piece = f"{piece} {sentence}".strip()[:_LONGEST]
    if len(piece) >= _SHORTEST:
        yield piece


def _reviews(path: Path) -> Shelf:
    """Returns pieces of reviews by the sentiment of the whole."""
    found: Shelf = {"negative": [], "positive": []}
    for row in _rows(path):
        found["positive" if row["label"] else "negative"] += list(_pieces(row["text"]))
    return found


def _headed(path: Path) -> Shelf:
    """Returns texts by what stands in front of their colon."""
    found: Shelf = defaultdict(list)
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            head, colon, text = line.partition(": ")
            if colon and len(head) < 60 and len(text) >= _SHORTEST:
                found[head].append(plain(text)[:_LONGEST])
    return dict(found)


def _asked(questions: list[str]) -> Shelf:
    """Returns questions by what their first words ask for."""
    found: Shelf = defaultdict(list)
    for text in questions:
        for pattern, asked in _ASKED:
            if re.match(pattern, text):
                found[asked].append(text)
                break
    return dict(found)


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row.get("split", "train") == "train":
                yield row
