"""Hypothesis strategies for rows as a model may return them: NaN, infinities, negatives, huge, tiny, none at all."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

AWKWARD = (
    float("nan"),
    float("inf"),
    float("-inf"),
    -9999.0,
    -1.0,
    -0.0,
    0.0,
    5e-324,
    1e-310,
    2.0**-33,
    2.0**-32,
    1.0 / 3.0,
    0.5,
    1.0 - 2.0**-53,
    1.0,
    1.0 + 2.0**-52,
    2.0,
    100.0,
    1e308,
    1.7976931348623157e308,
)
WIDTHS = st.integers(1, 6)

coordinates = st.one_of(st.sampled_from(AWKWARD), st.floats(), st.floats(0, 1), st.floats(-50, 50))


def rows(width: int):
    """One row of any float64 content."""
    return hnp.arrays(np.float64, width, elements=coordinates)


def public_logits(width: int):
    """Logits of a public prompt as a sound engine returns them: finite but for impossible tokens, any constant."""
    shapes = hnp.arrays(np.float64, width, elements=st.one_of(st.floats(-60, 20), st.just(-np.inf)))
    return st.tuples(shapes, st.sampled_from([0.0, -3.25, 17.0, 1e4])).map(sum)


def matrices(width: int, *, min_rows: int = 0, max_rows: int = 5):
    """float64[n, width] of any content, n possibly 0."""
    return st.integers(min_rows, max_rows).flatmap(
        lambda n: hnp.arrays(np.float64, (n, width), elements=coordinates),
    )


@st.composite
def any_matrices(draw):
    """A matrix of any real dtype, content and memory layout."""
    width = draw(WIDTHS)
    matrix = draw(matrices(width))
    kind = draw(st.sampled_from(["float64", "float32", "float16", "longdouble", "int64", "int8", "uint8", "bool"]))
    if np.dtype(kind).kind != "f":
        matrix = np.nan_to_num(matrix, nan=0.0, posinf=100.0, neginf=-100.0).clip(-100, 100)
    with np.errstate(all="ignore"):
        matrix = matrix.astype(kind)
    layout = draw(st.sampled_from(["C", "F", "strided"]))
    if layout == "strided":
        return np.repeat(matrix, 2, axis=1)[:, ::2]
    return np.asarray(matrix, order=layout)


@st.composite
def replaced_row(draw, *, num_rows: int | None = None):
    """Two matrices that differ in one row, any row: a slot's content, or a replaced unit."""
    width = draw(WIDTHS)
    count = num_rows or draw(st.integers(1, 5))
    before = draw(matrices(width, min_rows=count, max_rows=count))
    after = before.copy()
    after[draw(st.integers(0, count - 1))] = draw(rows(width))
    return before, after


@st.composite
def appearing_row(draw):
    """Two matrices of which the second has one row more, at any place: an added unit."""
    width = draw(WIDTHS)
    before = draw(matrices(width))
    place = draw(st.integers(0, before.shape[0]))
    return before, np.insert(before, place, draw(rows(width)), axis=0)
