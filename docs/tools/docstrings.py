"""An extension of griffe: docstrings of this package as mkdocstrings reads them. Changes no word of them.

`Example:` and doctests without a heading become the section `Examples:`, which is rendered as code.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension

DOCTEST = re.compile(r"^>>> (?:.*\n?(?!\n))*.*$", re.MULTILINE)


class Docstrings(Extension):
    """Reads every docstring once, before it is parsed."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrites the headings of one object."""
        if obj.is_alias or obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        obj.docstring.value = DOCTEST.sub(lambda found: "Examples:\n" + textwrap.indent(found[0], "  "), text)
