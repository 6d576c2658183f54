"""Decides by one public rule which choice an answer names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

from langchain_dpicl.exceptions import ConfigurationError

_MOST_CHARACTERS = 4096
_MOST_WORDS_BEFORE_A_COLON = 5
_WRAPPING = " \t\"'`\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb\u2039\u203a*_"
_OPENING = _WRAPPING + "<([{"
_CLOSING = _WRAPPING + ">)]}.,;:!?\u3002\u3001"
_BULLETS = re.compile("[-+#>\u2022\u2013\u2014]+ ")
_JOINERS = "-.'\u2019/&@:,"
_FENCE = "```"


# An answer is private where its prompt is, so the rule may not raise: an answer that it cannot read names nothing, and
# its row abstains. The rule, in this order:
# 1. Case, width and white space do not count (NFKC and case folding). Look-alikes of another script are other letters.
# 2. The whole answer is a choice: that one.
# 3. Otherwise the first line with a letter or digit counts, without quotes, brackets and Markdown around it, without a
# mark at its end, and without up to five words and a colon in front ("The label is: **card**").
# 4. If the rest is a choice: that one.
# 5. If it begins with a choice as a whole word ("card, as it was declined") and the line names no other: that one.
# Where one choice begins another ("card", "card payment") the longer one is meant.
# 6. If it is the beginning of exactly one choice, by whole words ("cash" for "cash machine"): that one.
# 7. Otherwise it names none.
class Names:
    """The choices as an answer may name them.

    Formal guarantees:
      - `named` returns a place among the choices or None, for every object; it raises nothing.

    Args:
      choices: public texts; white space around them does not count.

    Raises:
      ConfigurationError: there is no choice, one is empty, or two differ in case, width or white space only.

    >>> names = Names(["card", "card payment", "cash"])
    >>> [names.named(text) for text in ("Card.", "**Queue:** card payment", "card or cash", "I cannot tell")]
    [0, 1, None, None]
    """

    def __init__(self, choices: Sequence[str]) -> None:
        is_list = not isinstance(choices, str) and all(isinstance(choice, str) for choice in choices)
        self._choices = tuple(_plain(choice) for choice in choices) if is_list else ()
        if not self._choices or not all(self._choices) or len(set(self._choices)) < len(self._choices):
            raise ConfigurationError(
                f"expected choices that differ in more than case, width and white space, found {choices!r}; give "
                "other verbalizers"
            )
        self._place = {choice: place for place, choice in enumerate(self._choices)}
        longest_first = sorted(self._choices, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def named(self, answer: object) -> int | None:
        """Returns the place of the choice that the answer names, or None."""
        if not isinstance(answer, str):
            return None
        lines = [line for line in answer[:_MOST_CHARACTERS].splitlines() if line.strip()]
        if (place := self._place.get(_plain(" ".join(lines)))) is not None:
            return place
        return self._in_line(_first_line(lines))

    def _in_line(self, line: str) -> int | None:
        forms = tuple(self._forms(line))
        for form in forms:
            if form in self._place:
                return self._place[form]
        named = {place for _, place in self._found(line)}
        for form in forms:
            first = next(self._found(form), None)
            if first is not None and first[0] == 0 and named <= {first[1]}:
                return first[1]
        return self._begun_by(forms[-1]) if not named else None

    def _forms(self, line: str) -> Iterator[str]:
        """Yields the line, the line without its wrapping, and the text behind a short beginning with a colon."""
        yield line
        peeled = _peeled(line)
        yield peeled
        before, colon, after = peeled.partition(":")
        is_short = len(before.split()) <= _MOST_WORDS_BEFORE_A_COLON
        if colon and is_short and _peeled(before) not in self._place and not any(self._found(before)):
            yield _peeled(after)

    def _found(self, line: str) -> Iterator[tuple[int, int]]:
        """Yields (start, place) of the choices in a line, as whole words, the longer one where one begins another."""
        at = 0
        while (match := self._pattern.search(line, at)) is not None:
            start, end = match.span()
            is_whole = _is_edge(line[max(0, start - 2) : start][::-1]) and _is_edge(line[end : end + 2])
            if is_whole:
                yield start, self._place[match[0]]
            at = end if is_whole else start + 1

    def _begun_by(self, text: str) -> int | None:
        begun = [
            place
            for place, choice in enumerate(self._choices)
            if choice.startswith(text) and _is_edge(choice[len(text) : len(text) + 2])
        ]
        return begun[0] if text and len(begun) == 1 else None


def _plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split())


def _first_line(lines: Sequence[str]) -> str:
    """Returns the first line with a letter or digit, joined with the next one where it ends in a colon."""
    plain = [_plain(line) for line in lines if not line.lstrip().startswith(_FENCE)]
    speaking = [line for line in plain if any(map(str.isalnum, line))]
    if len(speaking) > 1 and speaking[0].rstrip(_WRAPPING).endswith(":"):
        return f"{speaking[0]} {speaking[1]}"
    return speaking[0] if speaking else ""


def _peeled(line: str) -> str:
    """Returns a line without quotes, brackets and bullets around it; a sign before a number stays."""
    text = line.lstrip(_OPENING)
    while (bullet := _BULLETS.match(text)) is not None:
        text = text[bullet.end() :].lstrip(_OPENING)
    return text.rstrip(_CLOSING)


def _is_edge(following: str) -> bool:
    """Whether a word ends at these (up to two) next characters; "4.5", "card-holder" and "C++" go on."""
    if not following or _is_word(following[0]):
        return not following
    return not (following[0] in _JOINERS and len(following) > 1 and _is_word(following[1]))


def _is_word(character: str) -> bool:
    """Whether a character belongs to a word; invisible and unassigned ones too, as they may hide anything."""
    category = unicodedata.category(character)
    return character in "_+#%" or category[0] in "LNM" or category in {"Cf", "Cn", "Co", "Cs"}
