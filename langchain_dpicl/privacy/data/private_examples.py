"""Holds private examples, which only releases that are charged to a ledger can read."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol, TypeAlias, runtime_checkable

from langchain_dpicl._lazy import provided
from langchain_dpicl._opaque import Opaque, SaysHowToBuild, run_guarded, tells_how_to_build
from langchain_dpicl.exceptions import (
    ConfigurationError,
    ExactSizeWarning,
    LargeDeltaWarning,
    PrivacyBudgetMismatchError,
    PrivateAccessError,
    RecordError,
)
from langchain_dpicl.privacy._validate import check_delta, check_int, fail, plain_or_type
from langchain_dpicl.privacy.data.units import (
    Declaration,
    LabelsByUnit,
    Unit,
    Units,
    has_moved,
    label_text,
    labels_by_unit,
    make_declaration,
    read_units,
    record_bound_labels,
    records_of,
    unit_name,
)


class Pool(Opaque):
    """The units of one label, or all of them, as the curator reads them. Counts and content are private."""

    __slots__ = ("_count", "_name", "_read", "_version")

    def __init__(
        self,
        count: Callable[[], int],
        read: Callable[[int], Unit],
        name: Callable[[int], str] | None = None,
        version: Callable[[], int] | None = None,
    ) -> None:
        self._count = count
        self._read = read
        self._name = name
        self._version = version

    @property
    def version(self) -> int:
        """A number that each removal raises, after the records are gone; only in a pool of all units."""
        if self._version is None:
            raise PrivateAccessError("Pool: expected a pool of all units, found another.")
        return self._version()

    @property
    def num_units(self) -> int:
        """The private number of units, removed ones included: they keep their position and hold no record."""
        return self._count()

    def records(self, position: int) -> Unit:
        """Returns copies of the records of the unit at `position`; empty if it was removed."""
        if not 0 <= position < self._count():
            raise PrivateAccessError("Pool: expected a position of this pool, found another.")
        return self._read(position)

    def name(self, position: int) -> str:
        """Returns the private name of the unit at `position`; only in a pool of all units."""
        if self._name is None or not 0 <= position < self._count():
            raise PrivateAccessError("Pool: expected a position of a pool of all units, found another.")
        return self._name(position)


OpenPool: TypeAlias = Callable[[str | None], Pool]
"""Opens the pool of a label, or of all units."""
Split: TypeAlias = Callable[[Unit], tuple[Unit, str]]
"""Returns a unit's records of its label, and the label, from that unit alone; () and "" if it has no label."""
Redeclare: TypeAlias = Callable[[tuple[str, ...], Split], OpenPool | None]
"""Splits the units by other labels with the given rule; returns None if that failed."""
Sealed: TypeAlias = tuple[OpenPool, Callable[[str], None], Redeclare]
"""Functions that open a pool, remove a unit, and split the units by other labels."""


def make_opaque_pool(units: Units) -> Sealed:
    """Returns three closures, which are the only references to the content."""

    def open_pool(label: str | None) -> Pool:
        if label is None:
            return Pool(
                lambda: len(units.contents),
                lambda position: tuple(records_of(units, position)),
                name_of_units(units),
                lambda: units.version,
            )
        index = units.by_label[label]
        return Pool(lambda: len(index), lambda position: tuple(records_of(units, index[position])))

    def remove(name: str) -> None:
        # The position stays, so that the units of other positions and all sampling rates do not change.
        position = units.positions.pop(name, None)
        if position is not None:
            units.contents[position] = ()
            units.version += 1  # last: a reader of this number, then of the contents, may keep what is made of them

    def redeclare(labels: tuple[str, ...], split: Split) -> OpenPool | None:
        return run_guarded(lambda: provided("redeclared").split_units(units, labels, split))

    return open_pool, remove, redeclare


def name_of_units(units: Units) -> Callable[[int], str]:
    """Returns a function from a position to the unit's name; "" for a unit that was removed before the first call.

    The list of names is built on the first call: only retrieval needs it, and the time to build it depends on the
    private number of units.
    """
    lock = threading.Lock()
    made: list[list[str]] = []

    def name_of(position: int) -> str:
        with lock:
            if not made:
                made.append(_names(units))
        return made[0][position]

    return name_of


def _names(units: Units) -> list[str]:
    names = [""] * len(units.contents)
    for name, position in list(units.positions.items()):
        names[position] = name
    return names


class UnitBinding:
    """The state that all declarations of the same units share."""

    __slots__ = ("by_declaration", "exposed", "keep_bound", "ledger_id", "lock", "warned_of")

    def __init__(self, keep_bound: Callable[[str, object | None], None]) -> None:
        self.keep_bound: Callable[[str, object | None], None] | None = keep_bound  # None after the first call
        self.lock = threading.Lock()
        # The examples that are split by topics; `topic_partition` returns one object for equal declarations.
        self.by_declaration: dict[Declaration, PrivateExamples] = {}
        self.ledger_id: str | None = None
        self.exposed = False  # opened without a charge
        self.warned_of: set[tuple[str, float]] = set()  # large deltas, by declaration


@runtime_checkable
class DocumentLoader(Protocol):
    """A loader of LangChain."""

    def lazy_load(self) -> Iterator[Any]:
        """Yields documents."""


@tells_how_to_build()
class PrivateExamples(Opaque, metaclass=SaysHowToBuild):
    """Private examples, readable only through releases that are charged to a ledger.

    Formal guarantees:
      - A unit (one record, or all records of one `unit_key`) has one position in one label, chosen by a rule that
        looks at that unit alone; adding or removing a unit changes no other unit.
      - After construction nothing depends on the records: no length, iteration, equality by content, pickle or
        copy exists, and no error, repr or format shows content or counts.
      - They are attached to at most one ledger, permanently; attached examples refuse every read without a charge, and
        examples that were read without a charge can never be attached.

    Args:
      records: texts, mappings with the declared fields, or LangChain documents (`page_content` is the text, `metadata`
        holds the other fields), in any iterable, a document loader, a pandas or polars frame or a Hugging Face data
        set. They are read once, in order. Zero records are fine. Chunks of one document need a `unit_key`, such as
        "source", which most loaders set, or each chunk is protected by itself.
      public_size: declared number of units, or one number per label. Public and required; it sets sampling rates. A
        wrong number costs utility, not privacy. A number of more than two significant digits gives an
        `ExactSizeWarning`, once: it reads like a count of the records.
      text_key: field that holds the text.
      label_key: field that holds the label, if labels split the examples.
      labels: every label that may occur, in the order that breaks ties. Public.
      unit_key: field that names the unit (for instance a user). None: every record is a unit of its own.
      fields: further text fields that prompts may use.
      dataset_id: declared name of the data set. Public; two data sets on one ledger need two names.
      max_chars: characters kept of each text; longer texts are cut. Public.
      records_per_unit: the number of first records kept of each unit. Public.
      labels_as_text: reads integer and boolean labels as text, declared ones too: 7 as "7", True as "true".
      exact_size_is_public: the number of units is public, as under `replace_one`; silences the warning.
      allow_large_delta: a ledger's delta may be as large as 1 / public_size, as in the papers, not only a tenth of it;
        gives a `LargeDeltaWarning` and stands in reports.

    Raises:
      ConfigurationError: a public argument is out of range.
      RecordError: a record lacks a field, holds no text or an undeclared label, or a unit has another label than in
        examples of this `dataset_id` that this process bound to an existing ledger. Index and value are hidden.

    Example:
      >>> private = PrivateExamples(
      ...     [{"text": "my card was charged twice", "queue": "billing"}],
      ...     label_key="queue",
      ...     labels=("billing", "login"),
      ...     public_size=12_000,
      ... )
      >>> private
      PrivateExamples(dataset_id='private-examples', content=<private>)
      >>> private.fields
      ('text', 'queue')
    """

    __slots__ = ("_bond", "_declared", "_identity", "_open", "_redeclare", "_remove", "_root")

    def __init__(
        self,
        records: Iterable[Any] | DocumentLoader,
        *,
        public_size: int | Mapping[str, int] | Mapping[int, int] | None = None,
        text_key: str = "text",
        label_key: str | None = None,
        labels: Iterable[str | int] | None = None,
        unit_key: str | None = None,
        fields: Iterable[str] = (),
        dataset_id: str = "private-examples",
        max_chars: int = 20_000,
        records_per_unit: int = 1,
        labels_as_text: bool = False,
        exact_size_is_public: bool = False,
        allow_large_delta: bool = False,
    ) -> None:
        wrong_container = container_fault(records)
        source = iter(()) if wrong_container else each_record(records)
        del records
        if wrong_container:
            raise ConfigurationError(wrong_container)
        for name, flag in {"labels_as_text": labels_as_text, "exact_size_is_public": exact_size_is_public}.items():
            if not isinstance(flag, bool):
                raise fail(name, "True or False", plain_or_type(flag))
        if public_size is None:
            raise fail("public_size", "the declared number of units, or one number per label", None, _NO_SIZE)
        if labels_as_text:
            labels, public_size = _as_text(labels), _as_text(public_size)
        declared = self._declared = make_declaration(
            dataset_id=dataset_id,
            public_size=public_size,
            text_key=text_key,
            label_key=label_key,
            labels=labels,
            unit_key=unit_key,
            fields=fields,
            max_chars=max_chars,
            records_per_unit=records_per_unit,
            allow_large_delta=allow_large_delta,
        )
        if not exact_size_is_public:
            _warn_of_count(declared)
        units, fault = read_units(source, declared, labels_as_text=labels_as_text)
        del source
        if units is None:
            raise RecordError(f"{fault} Index and value are hidden; `dpicl check FILE` shows them to the owner.")
        label_of = labels_by_unit(units, declared)
        if has_moved(label_of, declared):
            del units, label_of
            raise RecordError(_MOVED)
        self._adopt(declared, make_opaque_pool(units), UnitBinding(_keeping(label_of, declared)))

    def redeclared(
        self,
        *,
        dataset_id: str,
        public_size: int | Mapping[str, int],
        label_key: str | None = None,
        labels: Iterable[str] | None = None,
        fold_case: bool = True,
    ) -> PrivateExamples:
        """Declares the same units again: with another size, or split by labels that were released since.

        Formal guarantees:
          - All declarations share the units and the ledger: binding, opening or removing through one applies to all,
            and their releases add up on one ledger. Binding one also binds the first declaration under its name, so
            other processes cannot bind the same units to another ledger of the same store.
          - The rule that gives a unit its label is part of the declaration: one name never has two splits.
          - A unit's label is chosen by looking at that unit alone: the most frequent of the declared labels among the
            values of `label_key` in its records, compared by the public rule of `normalized`, ties going to the label
            declared first. Its other records are left out; a unit without a declared label is in no label's branch.

        Args:
          dataset_id: public name of this declaration; has to be new.
          public_size: as in the constructor. The budget's delta has to suit the first declaration's as well.
          label_key: a declared field that holds the new label; None: labels stay as they are.
          labels: every label that splits the units from now on, in the order that breaks ties. Public: declared, or
            released by a discovery. Without `label_key`: the present labels, in their order.
          fold_case: whether labels are compared without case.

        Raises:
          ConfigurationError: a public argument is out of range, or the examples have a label already.
          RecordError: the units could not be split; the message hides the cause.
        """
        how: dict[str, Any] = {"public_size": public_size, "label_key": label_key, "labels": labels}
        again: PrivateExamples = provided("redeclared").redeclared(
            self, dataset_id=dataset_id, fold_case=fold_case, **how
        )
        return again

    def _adopt(
        self, declared: Declaration, sealed: Sealed, bond: UnitBinding, root: PrivateExamples | None = None
    ) -> None:
        self._declared = declared
        self._open, self._remove, self._redeclare = sealed
        self._bond, self._identity, self._root = bond, object(), root

    @property
    def dataset_id(self) -> str:
        """The declared name of the data set."""
        return self._declared.dataset_id

    @property
    def public_size(self) -> int | dict[str, int]:
        """The declared number of units, per label if it was declared so."""
        size = self._declared.public_size
        return size if isinstance(size, int) else dict(size)

    @property
    def text_key(self) -> str:
        """The field that holds the text."""
        return self._declared.text_key

    @property
    def label_key(self) -> str | None:
        """The field that holds the label, or None."""
        return self._declared.label_key

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The declared labels, or None if labels do not split the examples."""
        return self._declared.labels or None

    @property
    def unit_key(self) -> str | None:
        """The field that names the unit, or None."""
        return self._declared.unit_key

    @property
    def fields(self) -> tuple[str, ...]:
        """Every declared field, text and label included."""
        return self._declared.fields

    @property
    def max_chars(self) -> int:
        """Characters kept of each text."""
        return self._declared.max_chars

    @property
    def records_per_unit(self) -> int:
        """Records kept of each unit."""
        return self._declared.records_per_unit

    @property
    def blocks(self) -> tuple[int, int] | None:
        """Of a range of a stream: its first and last block; None: the examples are of no stream."""
        return None

    @property
    def declaration(self) -> dict[str, Any]:
        """All declared values as JSON, as ledgers and reports show them."""
        return self._declared.to_dict()

    def public_size_of(self, label: str | None) -> int:
        """Returns the declared number of units of a label, or of all units for None.

        One number declared over several labels counts as spread evenly, rounded down to at least 1; this affects
        utility only.

        Args:
          label: a declared label, or None for all units.

        Raises:
          ConfigurationError: the label is not declared.
        """
        self._check_label(label)
        size = self._declared.public_size
        if label is None:
            return self._declared.total_size
        if isinstance(size, int):
            return max(1, size // len(self._declared.labels))
        return dict(size)[label]

    def check_delta(self, delta: float) -> None:
        """Refuses a delta above 1 / (10 * public_size), for this and the first declaration of the units.

        With `allow_large_delta` it refuses one above 1 / public_size, and warns once of one above a tenth of that.

        Args:
          delta: the budget's delta.

        Raises:
          ConfigurationError: delta is out of range or above the limit.
        """
        checked = check_delta(delta)
        for each in self._lineage:
            declared = each._declared  # noqa: SLF001  its own class
            if checked > declared.most_delta:
                expected = f"at most {declared.delta_rule} = {declared.most_delta:.3g} for {each.dataset_id!r}"
                advice = "A larger delta may give away whole records. Lower delta, or correct public_size."
                raise fail("delta", expected, delta, advice)
            known = each.dataset_id, checked
            if checked > 1 / (10 * declared.total_size) and known not in self._bond.warned_of:
                self._bond.warned_of.add(known)
                warnings.warn(
                    f"delta: {checked:.3g} is above 1/(10 * public_size) of {each.dataset_id!r}, as allow_large_delta "
                    f"says. Publishing a whole record with a chance of {checked * declared.total_size:.0%} would "
                    "satisfy it too.",
                    LargeDeltaWarning,
                    stacklevel=2,
                )

    def remove(self, unit: str | int) -> None:
        """Deletes the content of one unit. Its position stays, so rates, sampling and ledger do not change.

        Does not tell whether the unit existed. Releases made before the removal stay as they are.

        Args:
          unit: value of `unit_key` (7 and "7" name the same unit); without `unit_key`, the 0-based position that
            the record had at construction.

        Raises:
          ConfigurationError: `unit` is not of the type that names a unit here.
        """
        if self.unit_key is None:
            name: str | None = str(check_int("unit", unit, low=0)) if isinstance(unit, int) else None
        else:
            name = unit_name(unit)
        if name is None:
            wanted = "a position (an integer)" if self.unit_key is None else f"a value of {self.unit_key!r}"
            raise fail("unit", wanted, type(unit).__name__)
        self._remove(name)

    def _attach(self, ledger_id: str) -> None:
        """Binds these examples to one ledger, permanently; the same ledger again changes nothing."""
        with self._bond.lock:
            if self._bond.exposed:
                msg = f"{self.dataset_id!r} was read without a charge, so no ledger can protect it. Build it again."
                raise PrivateAccessError(msg)
            if self._bond.ledger_id not in {None, ledger_id}:
                raise self._other_ledger(ledger_id)
            self._bond.ledger_id = ledger_id

    def _keep_bound(self, ledger: object | None) -> None:
        """Records the labels of bound units once; `ledger` is the store whose end frees the record, or None."""
        with self._bond.lock:
            record, self._bond.keep_bound = self._bond.keep_bound, None
        if record is not None and self._ledger_id is not None:
            record(self._ledger_id, ledger)

    @property
    def _lineage(self) -> tuple[PrivateExamples, ...]:
        """The first declaration of these units, then this one; a ledger binds both."""
        return (self,) if self._root is None else (self._root, self)

    @property
    def _ledger_id(self) -> str | None:
        return self._bond.ledger_id

    def _pool(self, label: str | None, *, ledger_id: str | None) -> Pool:
        """Opens the pool of one label, or of all units. Only the curator may call this."""
        self._check_label(label)
        with self._bond.lock:
            if ledger_id is None:
                self._expose()
            elif ledger_id != self._ledger_id:
                raise self._other_ledger(ledger_id)
        return self._open(label)

    def _other_ledger(self, ledger_id: str) -> PrivacyBudgetMismatchError:
        msg = f"{self.dataset_id!r}: expected ledger {self._ledger_id}, to which it is bound, found {ledger_id}."
        return PrivacyBudgetMismatchError(f"{msg} Give all components of these examples one budget.")

    def _expose(self) -> None:
        if self._ledger_id is not None:
            msg = f"{self.dataset_id!r} is bound to a ledger and refuses every read without a privacy charge."
            raise PrivateAccessError(msg)
        self._bond.exposed = True

    def _check_label(self, label: str | None) -> None:
        if label is not None and label not in self._declared.labels:
            raise fail("label", f"None or a declared label among {list(self._declared.labels)}", label)

    def __bool__(self) -> bool:
        """Always true: `__len__` alone would make a truth test raise."""
        return True

    def __len__(self) -> NoReturn:
        raise PrivateAccessError(_CLOSED)

    def __getitem__(self, key: object) -> NoReturn:
        del key
        raise PrivateAccessError(_CLOSED)

    def __iter__(self) -> NoReturn:
        raise PrivateAccessError(_CLOSED)

    def __contains__(self, record: object) -> NoReturn:
        del record
        raise PrivateAccessError(_CLOSED)

    def __repr__(self) -> str:
        declared = getattr(self, "_declared", None)  # absent while an error of the constructor is shown
        return f"PrivateExamples(dataset_id={declared and declared.dataset_id!r}, content=<private>)"


_CLOSED = (
    "PrivateExamples has no length, index or iteration, because each would show private records without a charge: give "
    "it to a component, such as DPVotingRunnable or UnitCounter, which releases answers or counts on a budget."
)
_NO_SIZE = (
    "Give PrivateExamples(records, public_size=...): a public figure or a round number, not the number of records, "
    "which is private."
)
_MOVED = (
    "records: expected every unit to have the label that it has in the bound examples of this dataset_id, found "
    "another label. The unit would be read under two labels at the price of one. Index and value are hidden; restore "
    "the label, leave the unit out, or give these records a dataset_id and a share of their own."
)


def _keeping(labels: LabelsByUnit, declared: Declaration) -> Callable[[str, object | None], None]:
    """Returns a closure over the labels, so that no attribute shows how many units there are."""
    return lambda ledger_id, ledger: record_bound_labels(labels, declared, ledger_id, ledger)


_DIGITS = 2
"""Significant digits of a declared size that looks declared."""
_WARNED: set[int] = set()
_CALLER = 4
"""Frames from the warning to the caller of the constructor, which `tells_how_to_build` wraps."""


def _warn_of_count(declared: Declaration) -> None:
    """Warns once of each declared number that reads like a count; looks at nothing but the number."""
    size = declared.public_size
    for number in (size,) if isinstance(size, int) else dict(size).values():
        digits = str(number)
        if len(digits.rstrip("0")) > _DIGITS and number not in _WARNED:
            message = (
                f"public_size: {number} reads like a count of the records, which is private. Declare a round number, "
                f"such as {digits[:_DIGITS].ljust(len(digits), '0')} (a wrong one costs utility, not privacy), or say "
                "exact_size_is_public=True."
            )
            warnings.warn(message, ExactSizeWarning, stacklevel=_CALLER)
            _WARNED.add(number)


def _as_text(declared: Any) -> Any:
    """Returns declared labels, or sizes by label, with integers and booleans as text."""
    if isinstance(declared, Mapping):
        texts = {label_text(label): size for label, size in declared.items()}
        if len(texts) < len(declared):
            raise fail("public_size", "one number per label", "two for one text", "1 and '1' are one label.")
        return texts
    is_listed = isinstance(declared, Iterable) and not isinstance(declared, (str, bytes))
    return tuple(map(label_text, declared)) if is_listed else declared


def container_fault(records: Any) -> str:
    """Returns what is wrong with the container of records, by its type alone."""
    if isinstance(records, DocumentLoader):
        return ""
    if isinstance(records, (str, bytes, Mapping)) or not isinstance(records, Iterable):
        advice = " Of a table of splits give one; put a single record into a list." * isinstance(records, Mapping)
        return f"records: expected an iterable of texts or mappings, found {type(records).__name__}.{advice}"
    return ""


def each_record(records: Any) -> Iterator[Any]:
    """Yields what a frame, a loader or any other iterable holds."""
    if isinstance(records, DocumentLoader):
        yield from records.lazy_load()
    elif hasattr(records, "iter_rows"):  # polars
        yield from records.iter_rows(named=True)
    elif hasattr(records, "iloc") and hasattr(records, "columns"):  # pandas; a Series has no columns
        yield from records.to_dict("records")
    else:
        yield from records
