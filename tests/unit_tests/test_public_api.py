"""One public face."""

from __future__ import annotations

import langchain_dpicl


def test_the_public_face_is_sorted_complete_and_importable() -> None:
    assert langchain_dpicl.__all__ == sorted(langchain_dpicl.__all__)
    for name in langchain_dpicl.__all__:
        assert getattr(langchain_dpicl, name).__doc__


def test_every_error_of_the_tree_is_public() -> None:
    from langchain_dpicl import exceptions

    errors = {
        name for name, value in vars(exceptions).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert errors <= set(langchain_dpicl.__all__)
