"""Draws how each method works, what a unit is and how a ledger lives: boxes in the order of the steps, as SVG.

And NAME-tall.svg, the same for telephones, from top to bottom.

python docs/tools/flows.py          writes the pictures; `make pictures` does it too
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
Kind = Literal["private", "model", "noise", "public", "ledger"]
# Fill and stroke, as in how-it-works.svg: orange is private, blue public or a model, green the ledger.
COLORS: dict[Kind, tuple[str, str]] = {
    "private": ("#ffffff", "#b3541e"),
    "model": ("#fdf3ec", "#b3541e"),
    "noise": ("#f6d9c6", "#b3541e"),
    "public": ("#eef4f8", "#2f6690"),
    "ledger": ("#e8f0ea", "#3a7d44"),
}
WIDE, TALL = 940, 360
EDGE, GAP = 12, 26
FONTS = 'font-family="system-ui, Segoe UI, DejaVu Sans, sans-serif" font-size="12"'
ARROW = (
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#555555"/></marker></defs>'
)
# The widest letters that a reader's font has on average, at 12 pixels.
LETTER = 7.4


@dataclass(frozen=True)
class Step:
    """One box: what stands in it, and who may see that."""

    kind: Kind
    title: str
    text: str


@dataclass(frozen=True)
class Flow:
    """A picture: steps from left to right, joined by arrows or not, and a line below."""

    title: str
    steps: tuple[Step, ...]
    below: str
    joined: bool = True


FLOWS: dict[str, Flow] = {
    "method-demonstrations": Flow(
        "Demonstrations: written once, then public",
        (
            Step("private", "records", "some stand in each of about 40 prompts"),
            Step("model", "model", "proposes the next token after each prompt; sees the records"),
            Step("noise", "sum + noise", "one token wins; again for every token"),
            Step("public", "made-up examples", "say what many records say"),
            Step("public", "any prompt", "any model, any number of questions"),
        ),
        "Every token has its ticket. Paid once; answers are free.",
    ),
    "method-votes": Flow(
        "Votes: each question is answered by the records",
        (
            Step("public", "a question", "is public"),
            Step("private", "records", "a fresh secret sample, four to a prompt"),
            Step("model", "model", "names one label for each prompt; sees the records"),
            Step("noise", "counts + noise", "noise on every declared label"),
            Step("public", "one label", "or noisy counts"),
        ),
        "Every answer has its ticket; the same question again is free.",
    ),
    "method-pate": Flow(
        "PromptPATE: private teachers label public inputs",
        (
            Step("public", "public inputs", "without labels"),
            Step("private", "teachers", "prompts with different records each; the model sees them"),
            Step("noise", "votes + noise", "one label for each input, or none"),
            Step("public", "student's prompt", "public inputs with noisy labels"),
            Step("public", "any model", "any number of questions"),
        ),
        "Every label has its ticket. Paid once; answers are free.",
    ),
    "method-documents": Flow(
        "Synthetic documents: a store that is searched for free",
        (
            Step("private", "documents", "each person belongs to one topic"),
            Step("noise", "topics + noise", "words that many people write"),
            Step("model", "model", "writes a text for each topic, token by token, from samples"),
            Step("noise", "sum + noise", "one token wins"),
            Step("public", "a store", "for any retriever, model and cache"),
        ),
        "Topics and tokens have tickets. Paid once; searching is free.",
    ),
    "method-retrieval": Flow(
        "Votes of retrieved documents: the nearest ones answer, and pay",
        (
            Step("public", "a question", "is public"),
            Step("private", "documents", "those near to the question, if they can still pay"),
            Step("model", "model", "names one label for each; sees the documents"),
            Step("noise", "counts + noise", "noise on every declared label"),
            Step("public", "one label", "or an abstention"),
        ),
        "One share for all questions; each person's documents pay for their own answers.",
    ),
    "method-evolution": Flow(
        "Private evolution: the model never sees a record",
        (
            Step("public", "model", "writes candidates from an instruction"),
            Step("private", "records", "each votes for the nearest candidate, on this machine"),
            Step("noise", "counts + noise", "decide which candidates survive"),
            Step("public", "model", "varies the survivors; next round"),
            Step("public", "made-up examples", "after the last round"),
        ),
        "Every round has its ticket. Paid once; answers are free.",
    ),
    "method-soft-prompt": Flow(
        "Soft prompts: numbers in front of a text, trained privately",
        (
            Step("private", "records", "a fresh random batch at each step"),
            Step("model", "local model", "one gradient for each record, cut to a greatest length"),
            Step("noise", "sum + noise", "one training step; again and again"),
            Step("public", "a soft prompt", "some virtual tokens"),
            Step("public", "the same model", "any number of questions"),
        ),
        "Every training step has its ticket. Paid once; answers are free.",
    ),
    "method-counts": Flow(
        "Counts: labels, values and words that many people share",
        (
            Step("private", "records", "of each person at most a fixed number of values"),
            Step("private", "counts", "how many people hold each value; no model is asked"),
            Step("noise", "+ noise", "exact noise; rare values are left out"),
            Step("public", "a table", "values with noisy counts"),
        ),
        "One ticket for one table.",
    ),
    "ledger-life": Flow(
        "The life of a ledger",
        (
            Step("ledger", "create", "once, by hand: epsilon and delta stay"),
            Step("ledger", "declare", "each component gets a share: what, and how often"),
            Step("ledger", "reserve", "a ticket is spent on disk, before a record is read"),
            Step("public", "release", "the noisy answer, with a receipt"),
            Step("ledger", "refuse", "once no ticket is left; nothing is read"),
        ),
        "At any time: report, verify, sign. The limit never grows.",
    ),
    "unit": Flow(
        "What one unit is decides who is protected",
        (
            Step("private", "Ann's three messages", "card lost; card lost again; new address"),
            Step("noise", "unit: one record", "each message is protected by itself; three together, less"),
            Step("public", "unit: one person", "unit_key: all three are protected together"),
        ),
        "Outputs look almost the same with and without one unit.",
        joined=False,
    ),
}


def lines_of(text: str, width: float) -> list[str]:
    """Returns a text in lines that fit a width, whatever the reader's font."""
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and len(longer) * LETTER <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def drawn(flow: Flow, *, tall: bool) -> str:
    """Returns the picture."""
    width = TALL if tall else WIDE
    beside = 1 if tall else len(flow.steps)
    box = (width - 2 * EDGE - GAP * (beside - 1)) / beside
    texts = [lines_of(step.text, box - 16) for step in flow.steps]
    high = 36 + 16 * max(map(len, texts))
    highs = [36 + 16 * len(text) for text in texts] if tall else [high] * len(texts)
    body: list[str] = []
    left, top = float(EDGE), float(EDGE)
    for number, (step, text, tallness) in enumerate(zip(flow.steps, texts, highs, strict=True)):
        body += _box(step, text, (left, top, box, tallness))
        if flow.joined and number + 1 < len(flow.steps):
            from_to = (
                (left + box / 2, top + tallness + 2, left + box / 2, top + tallness + GAP - 3)
                if tall
                else (left + box + 2, top + tallness / 2, left + box + GAP - 3, top + tallness / 2)
            )
            ends = ' x1="{:.0f}" y1="{:.0f}" x2="{:.0f}" y2="{:.0f}"'.format(*from_to)
            body.append(f'<line{ends} stroke="#555555" stroke-width="1.5" marker-end="url(#a)"/>')
        left, top = (left, top + tallness + GAP) if tall else (left + box + GAP, top)
    bottom = top - GAP + 20 if tall else top + high + 20
    below = lines_of(flow.below, width - 2 * EDGE)
    for number, line in enumerate(below):
        body.append(f'<text x="{EDGE}" y="{bottom + 17 * number:.0f}" fill="#3a6b42">{escape(line)}</text>')
    height = bottom + 17 * len(below) - 5
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" role="img" {FONTS}>'
    back = f'<rect width="{width}" height="{height:.0f}" rx="6" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(flow.title)}</title>", back, ARROW, *body, "</svg>\n"])


def _box(step: Step, text: list[str], sides: tuple[float, float, float, float]) -> Iterator[str]:
    (left, top, wide, high), (fill, stroke) = sides, COLORS[step.kind]
    place = f'x="{left:.0f}" y="{top:.0f}" width="{wide:.0f}" height="{high:.0f}" rx="6"'
    yield f'<rect {place} fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'
    at = f'x="{left + wide / 2:.0f}" text-anchor="middle"'
    yield f'<text {at} y="{top + 20:.0f}" fill="#222222" font-weight="600">{escape(step.title)}</text>'
    for number, line in enumerate(text):
        yield f'<text {at} y="{top + 38 + 16 * number:.0f}" fill="#444444" font-size="12">{escape(line)}</text>'


def pictures() -> dict[str, str]:
    """Returns every picture by the name of its file."""
    return {
        f"{name}{'-tall' * tall}.svg": drawn(flow, tall=tall) for name, flow in FLOWS.items() for tall in (False, True)
    }


def main() -> None:
    """Writes the pictures."""
    for name, picture in pictures().items():
        (PICTURES / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
