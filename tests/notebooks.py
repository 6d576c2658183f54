"""Runs the notebooks of `examples/notebooks`: code cells in this process, for tests, or on a real kernel.

`python -m tests.notebooks` (make notebooks) executes each on a kernel of its own, as a reader would, and writes what
came out to `out/notebooks`: the notebook with its outputs, and a page in Markdown with its pictures, which `make docs`
puts on the site. `--set` gives parameters in JSON in place of the notebook's. Needs nbclient, nbconvert and ipykernel.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PATIENCE = 300
# nbconvert's page, with printed text in fences: indented, a line of it could be read as an item of a list. Warnings name
# places of this machine, and are left to the notebook.
PAGE = """{%- extends 'markdown/index.md.j2' -%}
{%- block stream %}{% if output.name == 'stdout' %}
```text
{{ output.text | strip_ansi | trim }}
```
{% endif %}{% endblock stream %}
{%- block data_text scoped %}
```text
{{ output.data['text/plain'] | strip_ansi }}
```
{% endblock data_text %}
{%- block data_png %}
![{{ cell.metadata.get('alt', 'What the lines above draw') }}]({{ output.metadata.filenames['image/png'] }})
{% endblock data_png %}"""


@dataclass(frozen=True)
class Ran:
    """What a notebook left: its names, what it printed, and the value of each cell's last line."""

    names: dict[str, Any]
    printed: str
    shown: list[Any]


def cells_of(path: Path, kind: str = "code") -> list[dict[str, Any]]:
    """Returns the cells of one kind, each with its `text`."""
    cells = json.loads(path.read_text())["cells"]
    return [{**cell, "text": "".join(cell["source"])} for cell in cells if cell["cell_type"] == kind]


def run_here(path: Path, **parameters: Any) -> Ran:
    """Runs the code cells one after the other, from the notebook's folder; `parameters` take the place of its own."""
    names: dict[str, Any] = {"__name__": "__main__"}
    shown: list[Any] = []
    printed = io.StringIO()
    with _from(path.parent), contextlib.redirect_stdout(printed):
        for number, cell in enumerate(cells_of(path)):
            shown.append(_run_cell(cell["text"], f"{path.name}, code cell {number}", names))
            if "parameters" in cell["metadata"].get("tags", []):
                unknown = set(parameters) - set(names)
                assert not unknown, f"{path.name} has no {sorted(unknown)}"
                names.update(parameters)
    return Ran(names, printed.getvalue(), shown)


@contextlib.contextmanager
def _from(folder: Path) -> Iterator[None]:
    """Stands where a kernel would, and leaves no module of the examples behind."""
    path, known = list(sys.path), set(sys.modules)
    with contextlib.chdir(folder):
        try:
            yield
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - known:
                if str(getattr(sys.modules[name], "__file__", None)).startswith(str(FOLDER.parent)):
                    del sys.modules[name]


def _run_cell(text: str, name: str, names: dict[str, Any]) -> Any:
    """Runs a cell; returns the value of its last line, where that is an expression, as a kernel would show it."""
    import ast

    tree = ast.parse(text, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)  # noqa: S102  our own file
    return None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), names)  # noqa: S307


def run_on_kernel(path: Path, out: Path, **parameters: Any) -> str:
    """Executes a notebook on a kernel of this Python, and makes its page; returns what to say of it.

    `parameters` take the place of the notebook's, in a cell that the page leaves out.
    """
    import nbformat
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.util import run_sync

    book = nbformat.read(path, as_version=4)
    for place, cell in enumerate(book.cells):
        if parameters and "parameters" in cell.metadata.get("tags", []):
            text = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
            book.cells.insert(place + 1, nbformat.v4.new_code_cell(text, metadata={"tags": ["hide-input"]}))
            break
    nbformat.validate(book)
    started = time.perf_counter()
    place = {"metadata": {"path": str(path.parent)}}
    patience = {"timeout": PATIENCE, "startup_timeout": PATIENCE}
    with tempfile.TemporaryDirectory() as folder:
        kernel = AsyncKernelManager(transport="ipc", ip=f"{folder}/kernel")  # opens no port
        try:
            NotebookClient(book, km=kernel, resources=place, coalesce_streams=True, **patience).execute()
        finally:
            run_sync(kernel.shutdown_kernel)(now=True)  # of a kernel that was handed in nbclient takes no care
    seconds = time.perf_counter() - started
    out.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, out / path.name)
    pictures = write_page(book, path.stem, out)
    return f"{path.name:<28}{len(book.cells)} cells, {pictures} pictures, {seconds:.0f} s"


def write_page(book: Any, name: str, out: Path) -> int:
    """Writes an executed notebook as NAME.md, with its pictures beside it; returns how many there are.

    Lines of cells with the tag "hide-input" are left out: some readers need what comes out alone.
    """
    from nbconvert import MarkdownExporter
    from traitlets.config import Config

    hidden = Config(TagRemovePreprocessor={"enabled": True, "remove_input_tags": ["hide-input"]})
    page, resources = MarkdownExporter(config=hidden, raw_template=PAGE).from_notebook_node(book, {"unique_key": name})
    (out / f"{name}.md").write_text(page.strip() + "\n", encoding="utf-8")
    for file, content in resources["outputs"].items():
        (out / file).write_bytes(content)
    return len(resources["outputs"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Executes the notebooks on real kernels.")
    parser.add_argument("names", nargs="*", help="some of them, without .ipynb; default: all")
    parser.add_argument("--out", type=Path, default=Path("out/notebooks"))
    parser.add_argument("--set", type=json.loads, default={}, metavar="JSON", help="parameters, by name")
    options = parser.parse_args()
    for path in NOTEBOOKS:
        if not options.names or path.stem in options.names:
            print(run_on_kernel(path, options.out, **options.set), flush=True)


if __name__ == "__main__":
    main()
