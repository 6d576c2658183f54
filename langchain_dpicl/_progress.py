"""Progress bars of long runs, and errors that carry the run they ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tqdm.auto import tqdm


def new_bar(total: int, unit: str, words: str, *, progress: bool | None) -> Any:
    """Returns a progress bar; `progress` None: shown on a terminal only."""
    return tqdm(total=total, unit=unit, desc=words, disable=None if progress is None else not progress, leave=False)


def tick(bar: Any) -> None:
    """Moves a bar by one step; a closed terminal must not stop a paid run."""
    with suppress(OSError, ValueError):
        bar.update()


@contextmanager
def carrying(**owner: object) -> Iterator[None]:
    """Sets attributes, such as `labeler=`, on an error that ends the block, so that no release is lost with it."""
    try:
        yield
    except BaseException as error:
        # Exceptions with slots take no attributes; the error itself matters more.
        with suppress(AttributeError, TypeError):
            for name, value in owner.items():
                setattr(error, name, value)
        raise
