"""Every small change of a source text that a test should notice.

The operators are those of mutmut (numbers, strings, names, assignments, arguments, comparisons, arithmetic, keywords,
boolean and conditional expressions, lambdas), which itself leaves out decorated functions and everything outside of
functions; here they are walked too. Added are: a condition negated, a statement removed, another type raised.
What is left out is said in `RULES`, and single changes in `harmless.toml`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation.mutators import mutation_operators

RULES = (
    "docstrings, annotations, type aliases, decorators and imports are not changed",
    "the words of errors are not: strings in `raise`, `fail`, `_require`, and in what is named msg, advice or the like",
    "and the name by which `check_...` speaks of a value is not; that an error is raised, and its type, are changed",
    "what `__repr__` and `description` say is not changed",
    "a string is changed in one way, not in three (as mutmut does: also to lower and to upper case)",
)
"""What is not counted, in words."""

PROSE = frozenset({"msg", "advice", "found", "fault", "expected"})
SPEAKERS = frozenset({"fail", "_require", "warn"})
SILENT = frozenset({"__repr__", "__str__", "description"})


@dataclass(frozen=True)
class Mutant:
    """One change."""

    name: str
    file: str
    line: int
    lines: tuple[int, ...]
    names: tuple[str, ...]
    before: str
    _original: cst.CSTNode
    _changed: cst.CSTNode | cst.RemovalSentinel
    _module: cst.Module

    @cached_property
    def after(self) -> str:
        tree = self._module.deep_replace(self._original, self._changed)  # type: ignore[arg-type]
        assert isinstance(tree, cst.Module)
        return tree.code

    @property
    def signature(self) -> str:
        """The changed part, before and after."""
        sides = [self._original, *([self._changed] if isinstance(self._changed, cst.CSTNode) else [])]
        return " -> ".join(self._module.code_for_node(side) for side in sides)

    def mentions(self, word: str) -> bool:
        """Whether a word stands in the statement, or in what takes the place of a part of it."""
        return word in self.signature or any(word in self.before.splitlines()[line - 1] for line in self.lines)

    @property
    def diff(self) -> str:
        """The changed lines."""
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))

    @property
    def change(self) -> str:
        """The diff on one line, with single blanks: what `harmless.toml` is compared with."""
        return re.sub(r"\s+", " ", self.diff)


def is_text(node: cst.CSTNode | None) -> bool:
    if isinstance(node, cst.BinaryOperation):
        return is_text(node.left) or is_text(node.right)
    return isinstance(node, cst.SimpleString | cst.FormattedString | cst.ConcatenatedString)


def called(node: cst.CSTNode) -> str:
    """Returns the name that a call calls, "" for anything else."""
    if not isinstance(node, cst.Call):
        return ""
    function = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    return function.value if isinstance(function, cst.Name) else ""


def is_label(call: cst.Call, arg: cst.CSTNode) -> bool:
    """Whether an argument is the name by which a check speaks of a value."""
    return called(call).startswith("check_") and arg is call.args[0] and is_text(call.args[0].value)


def more_operators(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yields what mutmut does not change."""
    if isinstance(node, cst.If | cst.While | cst.IfExp) and not isinstance(node.test, cst.Comparison):
        bare = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield node.with_changes(test=cst.UnaryOperation(cst.Not(), bare))
    if isinstance(node, cst.Raise):
        yield cst.Pass()
        if node.exc is not None:
            yield node.with_changes(exc=cst.parse_expression('AssertionError("another type")'))
    if isinstance(node, cst.Expr) and isinstance(node.value, cst.Call):
        yield cst.Pass()


class _Walk(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)

    def __init__(self, file: str, text: str, module: cst.Module) -> None:
        self.file, self.text, self.module = file, text, module
        self.found: list[Mutant] = []
        self._path: list[str] = []
        self._functions = 0
        self._counts: dict[str, int] = {}

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self._is_skipped(node):
            return False
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._path.append(node.name.value)
            self._functions += isinstance(node, cst.FunctionDef)
        changes = [
            changed for kind, operator in mutation_operators if isinstance(node, kind) for changed in operator(node)
        ]
        if isinstance(node, cst.BaseString):
            changes = changes[:1]
        changes = [changed for changed in changes if not self._is_prose(node, changed)]
        for changed in [*changes, *more_operators(node)]:
            self._add(node, changed)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef) and not self._is_skipped(original_node):
            self._path.pop()
            self._functions -= isinstance(original_node, cst.FunctionDef)

    def _is_skipped(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Decorator | cst.Import | cst.ImportFrom | cst.FormattedString):
            return not isinstance(node, cst.FormattedString) or self._is_said(node)
        if isinstance(node, cst.AnnAssign):
            return "TypeAlias" in self.module.code_for_node(node.annotation.annotation)
        if isinstance(node, cst.FunctionDef):
            return node.name.value in SILENT
        if isinstance(node, cst.Assign) and is_text(node.value):
            return any(isinstance(one.target, cst.Name) and one.target.value in PROSE for one in node.targets)
        if isinstance(node, cst.Expr) and is_text(node.value):
            return True
        return isinstance(node, cst.BaseString) and self._is_said(node)

    def _is_said(self, node: cst.CSTNode) -> bool:
        """Whether a string is part of an error."""
        while not isinstance(node, cst.BaseSmallStatement | cst.BaseCompoundStatement | cst.Module):
            parent = self.get_metadata(ParentNodeProvider, node)
            if called(node) in SPEAKERS or (isinstance(parent, cst.Call) and is_label(parent, node)):
                return True
            node = parent
        return isinstance(node, cst.Raise)

    def _is_prose(self, node: cst.CSTNode, changed: cst.CSTNode) -> bool:
        """Whether only what an error says would change."""
        if not isinstance(node, cst.Call) or not isinstance(changed, cst.Call):
            return False
        if called(node) in SPEAKERS - {"_require"}:
            return True
        mine = {id(arg) for arg in changed.args}
        touched = [arg for arg in node.args if id(arg) not in mine]
        if touched and all(is_label(node, arg) for arg in touched):
            return True
        said = [is_text(arg.value) or (isinstance(arg.value, cst.Name) and arg.value.value in PROSE) for arg in touched]
        return bool(said) and all(said) and (called(node) in SPEAKERS or self._is_raised(node))

    def _is_raised(self, node: cst.CSTNode) -> bool:
        return isinstance(self.get_metadata(ParentNodeProvider, node), cst.Raise)

    def _statement(self, node: cst.CSTNode) -> cst.CSTNode:
        while not isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement | cst.Module):
            node = self.get_metadata(ParentNodeProvider, node)
        return node

    def _add(self, node: cst.CSTNode, changed: cst.CSTNode) -> None:
        statement = self._statement(node)
        place, whole = self.get_metadata(PositionProvider, node), self.get_metadata(PositionProvider, statement)
        last = whole.end.line
        if isinstance(statement, cst.BaseCompoundStatement):
            body = statement.cases[0] if isinstance(statement, cst.Match) else statement.body
            last = max(min(last, self.get_metadata(PositionProvider, body).start.line - 1), whole.start.line)
        where = ".".join([Path(self.file).stem, *self._path])
        self._counts[where] = self._counts.get(where, 0) + 1
        names = (
            ()
            if self._functions
            else tuple(re.findall(r"[A-Za-z_]\w*", self.text.splitlines()[whole.start.line - 1])[:1])
        )
        if isinstance(statement, cst.FunctionDef):
            last = whole.end.line  # a default value shows where the function runs
        lines = tuple(range(whole.start.line, last + 1))
        self.found.append(
            Mutant(
                f"{where}#{self._counts[where]}", self.file, place.start.line, lines, names, self.text, node, changed,
                self.module,
            )
        )  # fmt: skip


def mutants_of(root: Path, file: str) -> Sequence[Mutant]:
    """Returns every change of a file, in order."""
    text = (root / file).read_text(encoding="utf-8")
    wrapper = MetadataWrapper(cst.parse_module(text))
    walk = _Walk(file, text, wrapper.module)
    wrapper.visit(walk)
    return walk.found
