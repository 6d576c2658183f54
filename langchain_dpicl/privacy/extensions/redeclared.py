"""Declares the same units again: with another size, or split by labels that were released since."""

from __future__ import annotations

import functools
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from langchain_dpicl._opaque import run_guarded
from langchain_dpicl.exceptions import RecordError
from langchain_dpicl.privacy._validate import MAX_NAME_LENGTH, check_flag, check_name, fail, in_unicode_14
from langchain_dpicl.privacy.private_examples import (
    SPLIT_RULE,
    Declaration,
    OpenPool,
    Pool,
    PrivateExamples,
    Split,
    Unit,
    Units,
    make_declaration,
    name_of_units,
    unit_label,
)

KEYWORDS = "keywords"
"""Says that a unit's label is the first released topic in its texts; see `TopicSplit`."""
PARTS = "parts"
"""Says that a unit's label is a half of the data, by a hash of its name or its record; see `split_in_parts`."""
_ORIGIN = frozenset({"from", "fold_case", "rule"})
NO_SPLIT = "records: the units could not be split. The cause is hidden; nothing was released or charged."
"""The message of a split that failed, for any reason."""


def redeclared(
    private: PrivateExamples,
    *,
    dataset_id: str,
    public_size: int | Mapping[str, int],
    label_key: str | None,
    labels: Iterable[str] | None,
    fold_case: bool,
) -> PrivateExamples:
    """Returns what `PrivateExamples.redeclared` promises."""
    old, root = private._declared, private._root or private  # noqa: SLF001  its own family
    if dataset_id == old.dataset_id:
        raise fail("dataset_id", "another name than that of the first declaration", dataset_id)
    check_flag("fold_case", fold_case)
    if label_key is not None and (old.label_key is not None or label_key not in old.fields):
        known = [] if old.label_key is not None else [name for name in old.fields if name != old.text_key]
        raise fail("label_key", f"one of {known}", label_key, "Declare it among `fields`, without labels.")
    declared = make_declaration(
        dataset_id=dataset_id,
        public_size=public_size,
        text_key=old.text_key,
        label_key=old.label_key if label_key is None else label_key,
        labels=(old.labels or None) if label_key is None and labels is None else labels,
        unit_key=old.unit_key,
        fields=old.extra_fields,
        allow_large_delta=old.allow_large_delta,
        max_chars=old.max_chars,
        records_per_unit=old.records_per_unit,
        redeclared={
            "from": root.dataset_id,
            "fold_case": (old.origin or (None, None))[1] if label_key is None else fold_case,
            "rule": SPLIT_RULE,
        },
    )
    if old.label_key is not None and declared.labels != old.labels:
        raise fail("labels", f"the declared ones, {list(old.labels)}, in their order", list(declared.labels))
    opened: OpenPool | None = private._open  # noqa: SLF001
    if label_key is not None:
        forms = forms_of(declared.labels, fold_case=fold_case)
        split = functools.partial(relabel_unit, declared=declared, forms=forms, fold_case=fold_case)
        opened = private._redeclare(declared.labels, split)  # noqa: SLF001
    if opened is None:
        raise RecordError(NO_SPLIT)
    again = PrivateExamples.__new__(PrivateExamples)
    again._adopt(declared, (opened, private._remove, private._redeclare), private._bond, root)  # noqa: SLF001  its own class
    return again


def check_origin(shown: Mapping[str, Any], dataset_id: str, label_key: str | None) -> tuple[str, bool | None]:
    """Returns the first declaration's name and whether labels are compared without case, as a report shows them."""
    if not isinstance(shown, Mapping) or set(shown) - {"by"} != _ORIGIN or shown["rule"] != SPLIT_RULE:
        raise fail("redeclared", f"{sorted(_ORIGIN)}, and rule {SPLIT_RULE}", shown)
    if "by" in shown and (shown["by"], shown["fold_case"]) not in {(KEYWORDS, True), (PARTS, None)}:
        raise fail("redeclared by", f"{KEYWORDS!r} with fold_case=True, or {PARTS!r} with None", shown)
    first, fold_case = check_name("redeclared from", shown["from"]), shown["fold_case"]
    if first == dataset_id:
        raise fail("dataset_id", "another name than that of the first declaration", dataset_id)
    if fold_case is not None and (not isinstance(fold_case, bool) or label_key is None):
        raise fail("fold_case", "True or False where units are split by a label, else None", fold_case)
    return first, fold_case


def normalized(text: str, *, fold_case: bool = True) -> str:
    r"""Returns the form in which values are compared and released; "" if it has no printable character.

    The public rule: `in_unicode_14`, NFKC, case folded, characters that cannot be printed and runs of white space
    replaced by one space, stripped, at most 200 characters.

    Args:
      text: a value of a record.
      fold_case: whether case is folded.

    >>> normalized("  Christopher\tNOLAN ")
    'christopher nolan'
    """
    form = unicodedata.normalize("NFKC", in_unicode_14(text))
    if fold_case:
        form = unicodedata.normalize("NFKC", form.casefold())
    words = "".join(letter if letter.isprintable() else " " for letter in form).split()
    return " ".join(words)[:MAX_NAME_LENGTH].rstrip()


def forms_of(values: Iterable[str], *, fold_case: bool = True) -> dict[str, str]:
    """Returns declared values by the form in which they are compared; refuses none, and two of the same form."""
    listed = tuple(check_name("values", value) for value in values)
    forms = [normalized(value, fold_case=fold_case) for value in listed]
    times = Counter(forms)
    wrong = [value for value, form in zip(listed, forms, strict=True) if not form or times[form] > 1]
    if wrong or not listed:
        case, or_keep_it = ("case, ", ", or set fold_case=False for case") if fold_case else ("", "")
        advice = (
            f"Values that differ only in {case}white space or compatible forms (NFKC) are equal, and characters newer "
            f"than Unicode 14 are spaces: declare one{or_keep_it}."
        )
        raise fail("values", "at least one value, all distinct by the public rule", wrong, advice)
    return dict(zip(forms, listed, strict=True))


def relabel_unit(unit: Unit, declared: Declaration, forms: Mapping[str, str], *, fold_case: bool) -> tuple[Unit, str]:
    """Returns a unit's records of its declared label, and the label; () and "" if it has no declared label."""
    key = declared.label_key or ""
    values = [forms.get(normalized(record[key], fold_case=fold_case)) for record in unit]
    labels = [label for label in values if label is not None]
    if not labels:
        return (), ""
    label = unit_label(labels, declared.labels)
    return tuple({**record, key: label} for record, own in zip(unit, values, strict=True) if own == label), label


def split_units(units: Units, labels: tuple[str, ...], split: Split) -> OpenPool:
    """Splits units by other labels; keeps positions only, so a unit that is removed later is removed here too."""

    def records(position: int) -> Unit:
        relabelled = run_guarded(lambda: split(units.contents[position]))
        return () if relabelled is None else relabelled[0]

    places: dict[str, list[int]] = {label: [] for label in labels}
    for position in range(len(units.contents)):
        label = split(units.contents[position])[1]
        if label:
            places[label].append(position)

    def open_pool(label: str | None) -> Pool:
        if label is None:
            return Pool(lambda: len(units.contents), records, name_of_units(units), lambda: units.version)
        index = places[label]
        return Pool(lambda: len(index), lambda position: records(index[position]))

    return open_pool
