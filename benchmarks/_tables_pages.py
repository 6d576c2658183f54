"""The tables as Markdown, CSV and a picture, from finished cells. Measures nothing and asks no model."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _tables_cells import INSTRUCTION, NOISELESS, NON_PRIVATE, ZERO, Done, Task
from _tables_cost import RECORD_TOKENS, CostRow, cost_lines, cost_of
from _tables_files import SLOTS, DataFile
from _tables_methods import Grid, Method
from _tables_papers import beside
from _tables_sums import Column, closed, closed_shown, columns

from langchain_dpicl.exceptions import ConfigurationError

LEGEND = """\
Percent, mean ± standard deviation (n - 1) over seeds of the public choices; "(k)" where only k seeds are finished, a
dash where a cell is not. Every run has samples and noise of its own, so they are in the spread, too.

- zero-shot: the question alone (for few-shot generation behind the instruction, like its other prompts). instruction:
  the question behind an instruction; for few-shot generation, demonstrations that were written from the instruction
  alone. Both are free: epsilon 0.
- eps: of everything that the method releases, at delta 1 / (10 x records), add_remove, one record.
- no noise: the same generation without noise. non-private: what it is measured against; NOT PRIVATE.
- closed: (DP - zero-shot) / (non-private - zero-shot), in percent. "no gap": non-private is not better than zero-shot
  by two standard errors, so there is no gap to close and the ratio would be one of accidents. †: non-private is not
  better than always saying the commonest answer, by the same measure: such a share says little."""
SLOT_LEGEND = """\
Extraction (slots): an answer counts where it is exactly what was to be found, in small letters and without
punctuation around it. Free-form answers are spans of up to three words of the question, the nearest to the released
vector; zero-shot there is the span nearest to the model's own answer."""

ABLATION_LEGEND = """\
One knob at a time, all else as in the main table; a star marks the main table's own value, which has its seeds.
longest_match makes the embedded model smaller: the longest match behind which it copies, in tokens (all: 8)."""


class Tables:
    """Finished cells beside what was asked for.

    Args:
      grid: what was asked for.
      done: finished cells by fingerprint.
    """

    def __init__(self, grid: Grid, done: Mapping[str, Done]) -> None:
        self.grid = grid
        self.tasks = grid.tasks()
        self.found = [done[task.fingerprint] for task in self.tasks if task.fingerprint in done]
        self.missing = [task for task in self.tasks if task.fingerprint not in done]

    def rows(self) -> list[tuple[Method, DataFile]]:
        """Returns the pairs of method and data set, data set by data set."""
        return [(method, file) for file in self.grid.files for method in self.grid.methods if method.kind == file.kind]

    def columns(
        self, method: Method, file: DataFile, *, variant: str = "", number: str = "accuracy"
    ) -> dict[str, Column]:
        """Returns the finished columns of a row."""
        key = (method.name, file.stem, variant)
        own = (one for one in self.found if (one.cell.method, one.cell.data, one.cell.variant) == key)
        return columns(own, number=number)

    def questions(self, method: Method, file: DataFile) -> dict[str, int]:
        """Returns how many questions a seed of a row asks, and how many there are."""
        return {"questions": self.grid.knobs(method, file)["questions"], "most": file.test}

    def seeds(self, method: Method) -> int:
        """Returns the seeds that a method was to have."""
        return min(self.grid.seeds, self.grid.fewer.get(method.name, self.grid.seeds))

    def shown(self, found: Mapping[str, Column], at: str, *, seeds: int) -> str:
        """Returns a column of a row, or a dash."""
        if at not in found:
            return "-"
        count = len(found[at].by_seed)
        return found[at].shown + (f" ({count})" if count < seeds else "")


def write_pages(grid: Grid, done: Mapping[str, Done], out: Path, *, price_in: float, price_out: float) -> list[Path]:
    """Writes tables.md, tables.csv, cost.csv and the picture; returns the files."""
    tables = Tables(grid, done)
    out.mkdir(parents=True, exist_ok=True)
    costs = [(method, file, cost_of(method, file, grid.knobs(method, file))) for method, file in tables.rows()]
    text = "\n\n".join(_sections(tables, costs, price_in=price_in, price_out=price_out)) + "\n"
    prices = {"price_in": price_in, "price_out": price_out}
    written = {"tables.md": text, "tables.csv": _csv(_numbers(tables)), "cost.csv": _csv(_cost_numbers(costs, prices))}
    for name, content in written.items():
        (out / name).write_text(content, encoding="utf-8")
    return [*(out / name for name in written), *_picture(tables, out / "utility.png")]


BEGIN, END = "<!-- written by make tables, {} -->", "<!-- end -->"
"""What stands around a table of the page."""


def show_on_page(grid: Grid, done: Mapping[str, Done], out: Path, *, results: Path, page: Path) -> list[Path]:
    """Copies tables, and of the full setting the picture, to where the repository shows them; returns the files.

    Args:
      grid: what was asked for.
      done: finished cells by fingerprint.
      out: folder of the files that `write_pages` wrote.
      results: folder of whole tables.
      page: the page with a short one between two marks, for this setting.

    Raises:
      SystemExit: the page has no such marks.
    """
    setting = "quick" if grid.is_quick else "full"
    whole = results / ("tables-quick.md" if grid.is_quick else "tables.md")
    whole.write_text((out / "tables.md").read_text("utf-8"), encoding="utf-8")
    (results / "papers.md").write_text(PAPERS_HEAD + "\n\n" + "\n".join(_paper_lines()) + "\n", encoding="utf-8")
    text, begin = page.read_text("utf-8"), BEGIN.format(setting)
    before, found, rest = text.partition(begin)
    old, closed_by, after = rest.partition(END)
    if not found or not closed_by:
        raise SystemExit(f"{page.name}: expected {begin} and {END}, found none")
    del old
    lines = "\n".join(_short_lines(Tables(grid, done)))
    page.write_text(f"{before}{begin}\n\n{lines}\n\n{END}{after}", encoding="utf-8")
    picture = page.parent / "pictures" / "utility.png"
    if not grid.is_quick and (out / "utility.png").exists():
        picture.write_bytes((out / "utility.png").read_bytes())
        return [whole, page, picture]
    return [whole, page]


_ON_PAGE = 3
"""Data sets that the page shows; the whole tables have all."""


def _short_lines(tables: Tables) -> list[str]:
    """Returns the table of the page: the ends of the columns, of the first data sets and finished private cells."""
    ends = sorted(tables.grid.epsilons)[:: max(1, len(tables.grid.epsilons) - 1)]
    named = [(ZERO, ZERO), *((f"{epsilon:g}", f"epsilon {epsilon:g}") for epsilon in ends), (NON_PRIVATE, NON_PRIVATE)]
    rows = []
    for method, file in tables.rows():
        if file not in tables.grid.files[:_ON_PAGE]:
            continue
        found, seeds = tables.columns(method, file), tables.seeds(method)
        if any(f"{epsilon:g}" in found for epsilon in ends):
            cells = [tables.shown(found, at, seeds=seeds) for at, _ in named]
            rows.append((file.title, method.title, *(cell.replace(" ± ", "±") for cell in cells)))
    return table(("data", "method", *(shown for _, shown in named)), rows)


def _sections(
    tables: Tables, costs: Sequence[tuple[Method, DataFile, CostRow]], *, price_in: float, price_out: float
) -> Iterable[str]:
    yield "# Tables"
    yield f"{len(tables.found):,} of {len(tables.tasks):,} cells finished.\n\n{LEGEND}"
    yield "## Data\n\n" + "\n".join(_data_lines(tables))
    yield "## Accuracy\n\n" + "\n".join(_accuracy_lines(tables))
    if any(file.kind == SLOTS for file in tables.grid.files):
        yield SLOT_LEGEND
    yield "## Gap closed\n\n" + "\n".join(_closed_lines(tables))
    yield "## Beside the papers\n\n" + "\n".join(_paper_lines())
    if tables.grid.has_ablations:
        yield f"## Ablations\n\n{ABLATION_LEGEND}\n\n" + "\n".join(_ablation_lines(tables))
    yield _cost_section(costs, price_in=price_in, price_out=price_out)
    yield "## Settings\n\n" + "\n".join(_setting_lines(tables))
    yield "## Missing cells\n\n" + "\n".join(_missing_lines(tables.missing))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns a Markdown table."""
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def _paper_lines() -> list[str]:
    private = ("accuracy at epsilon", "without privacy", "votes without noise", "closed at epsilon")
    return table(("method", "data", "source", "zero-shot", "instruction", *private), beside())


PAPERS_HEAD = """\
# The papers' numbers, with their models

Percent, all that stands in the text of the four papers; "not in its text" where a paper has none. The epsilons of PATE
do not hold ([why](../../docs/prompt-pate.md#why-the-published-epsilons-do-not-hold)). Of Bhusal et al. no number could
be read. Tables 1 to 4 and 10 to 14 of Tang et al. came without their cells, and their prose without the epsilon of 50.7
on TREC, which is 1. Table 6 of Duan et al. contradicts its tables 1 and 4 in places: 86.35 at epsilon 3 and 93.23
without privacy for the soft prompt on SST-2."""


def _data_lines(tables: Tables) -> list[str]:
    head = ("data", "kind", "train", "test", "commonest answer")
    shown = [
        (file.title, file.kind, f"{file.train:,}", f"{file.test:,}", f"{100 * file.commonest:.1f}")
        for file in tables.grid.files
    ]
    return table(head, shown)


def _epsilons(grid: Grid) -> list[str]:
    return [f"{epsilon:g}" for epsilon in grid.epsilons]


def _accuracy_lines(tables: Tables) -> list[str]:
    middle = [(at, f"eps {at}") for at in _epsilons(tables.grid)]
    named = [(ZERO, ZERO), (INSTRUCTION, INSTRUCTION), *middle, (NOISELESS, NOISELESS), (NON_PRIVATE, NON_PRIVATE)]
    rows = []
    for method, file in tables.rows():
        found, own = tables.columns(method, file), method.ats(tables.grid.epsilons)
        seeds = tables.seeds(method)
        cells = [tables.shown(found, at, seeds=seeds) if at in own else "" for at, _ in named]
        rows.append((file.title, method.title, *cells))
    return table(("data", "method", *(shown for _, shown in named)), rows)


def _closed_lines(tables: Tables) -> list[str]:
    rows = []
    for method, file in tables.rows():
        found, questions = tables.columns(method, file), tables.questions(method, file)
        shares = [
            closed_shown(found, at, commonest=file.commonest, **questions) or "-" for at in _epsilons(tables.grid)
        ]
        rows.append((file.title, method.title, *shares, method.non_private))
    return table(("data", "method", *(f"eps {at}" for at in _epsilons(tables.grid)), "non-private is"), rows)


def _ablation_lines(tables: Tables) -> list[str]:
    """Returns the ablations knob by knob, with the main table's value and a star; of knobs without a cell, nothing."""
    grid = tables.grid
    changed_knobs = {(one.cell.method, one.cell.variant.partition("=")[0]) for one in tables.found}
    files = [file for file in grid.files if file.stem in grid.ablation_files]
    rows = []
    for method in grid.methods:
        own = [file for file in files if file.kind == method.kind]
        for knob, values in method.ablations.items() if own else ():
            if (method.name, knob) not in changed_knobs:
                continue
            usual = {file.stem: grid.knobs(method, file)[knob] for file in own}
            for value in _in_order({*values, *usual.values()}):
                changed = f"{knob}={json.dumps(value)}"
                variants = {stem: "" if value == mine else changed for stem, mine in usual.items()}
                is_usual = not any(variants.values())
                for at in method.ablation_at:
                    cells = [
                        _ablated(tables, method, file, variants[file.stem], at)
                        + ("" if variants[file.stem] or is_usual else " *")
                        if file in own
                        else ""
                        for file in files
                    ]
                    shown = f"{'all' if value is None else value}{' *' if is_usual else ''}"
                    rows.append((method.title, knob, shown, at if at == NON_PRIVATE else f"eps {at}", *cells))
    return table(("method", "knob", "value", "column", *(file.title for file in files)), rows)


def _in_order(values: Iterable[Any]) -> list[Any]:
    """Returns numbers from small to large, words as they sort, and nothing at the end."""
    return sorted(values, key=lambda value: (value is None, str(value) if isinstance(value, str) else value or 0))


def _ablated(tables: Tables, method: Method, file: DataFile, variant: str, at: str) -> str:
    """Returns one cell of an ablation; the main table's has more seeds, and both say so where some are missing."""
    seeds = tables.grid.ablation_seeds if variant else tables.seeds(method)
    return tables.shown(tables.columns(method, file, variant=variant), at, seeds=seeds)


def _cost_section(costs: Sequence[tuple[Method, DataFile, CostRow]], *, price_in: float, price_out: float) -> str:
    assumed = (
        f"From the plans' public counts, records and questions of {RECORD_TOKENS} tokens, nothing off for caches. "
        f"Money at {price_in:g} per million prompt tokens and {price_out:g} per million answer tokens: an assumption "
        "(--price-in, --price-out). Answers to questions behind a released prompt are extra, as with any prompt."
    )
    return f"## Costs\n\n{assumed}\n\n" + "\n".join(cost_lines(costs, price_in=price_in, price_out=price_out))


def _setting_lines(tables: Tables) -> list[str]:
    lines = []
    for method in tables.grid.methods:
        knobs = ", ".join(f"{name} {value}" for name, value in tables.grid.knobs(method).items() if value is not None)
        own_model = "; a model of its own" if method.model else ""
        lines.append(f"- {method.name}: {knobs}; {tables.seeds(method)} seeds{own_model}")
        for file in tables.grid.files:
            usual, found = tables.grid.knobs(method), tables.grid.knobs(method, file)
            own = {name: value for name, value in found.items() if value != usual[name]}
            if own and file.kind == method.kind:
                changed = ", ".join(f"{name} {'all' if value is None else value}" for name, value in own.items())
                lines.append(f"  - on {file.stem}: {changed}")
    return [*lines, f"- model: {tables.grid.model}"]


def _missing_lines(tasks: Sequence[Task]) -> list[str]:
    if not tasks:
        return ["None."]
    kinds: dict[tuple[str, str, str], int] = {}
    for task in tasks:
        key = (task.cell.method, task.cell.data, "ablations" if task.cell.variant else "main table")
        kinds[key] = kinds.get(key, 0) + 1
    return table(("method", "data", "of", "cells"), [(*kind, str(number)) for kind, number in kinds.items()])


def _numbers(tables: Tables) -> Iterable[Sequence[Any]]:
    """Yields the lines of the CSV: every number of every column, of variants too."""
    yield ("method", "data", "variant", "column", "number", "seeds", "mean", "sd", "closed")
    for method, file in tables.rows():
        variants = ("", *tables.grid.variants(method, file))
        names = sorted({name for one in tables.found if one.cell.method == method.name for name in one.result})
        for variant in variants:
            for number in names:
                found = tables.columns(method, file, variant=variant, number=number)
                for at, column in found.items():
                    is_private = number == "accuracy" and not variant and at in _epsilons(tables.grid)
                    share = closed(found, at, **tables.questions(method, file)) if is_private else None
                    sums = (len(column.by_seed), _plain(column.mean), _plain(column.spread), _plain(share))
                    yield (method.name, file.stem, variant, at, number, *sums)


def _cost_numbers(
    costs: Sequence[tuple[Method, DataFile, CostRow]], prices: Mapping[str, float]
) -> Iterable[Sequence[Any]]:
    names = ("private_calls", "public_calls", "tokens_in", "tokens_out", "gradients")
    yield ("method", "data", "for", *names, "money")
    for method, file, row in costs:
        money = row.money(**prices)
        yield (method.name, file.stem, row.what, *(getattr(row, name) for name in names), _plain(money))


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    kept = io.StringIO()
    csv.writer(kept, lineterminator="\n").writerows(lines)
    return kept.getvalue()


def _picture(tables: Tables, path: Path) -> list[Path]:
    """Draws accuracy over epsilon: dotted zero-shot, dashed non-private. Nothing without matplotlib or cells."""
    rows = []
    for method, file in tables.rows():
        levels = {ZERO: 0.0, NON_PRIVATE: math.inf, **{at: float(at) for at in _epsilons(tables.grid)}}
        for at, column in tables.columns(method, file).items():
            if at in levels:
                rows.append((method.title, file.title, levels[at], column.mean, column.spread or 0.0))
    if not rows:
        return []
    from langchain_dpicl.audit.plots import plot_utility

    try:
        plot_utility(rows, path, title="Accuracy by epsilon (dotted: zero-shot; dashed: non-private)")
    except ConfigurationError as error:
        print(f"no picture: {error}")
        return []
    return [path]
