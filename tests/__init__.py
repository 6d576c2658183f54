"""Tests. Whatever imports one of them works with numbers on one thread, and so does every process that it starts."""

from __future__ import annotations

import os

# BLAS keeps further threads spinning after each long product: workers on all processors then wait for each other's, and
# forked processes for threads that stayed behind.
for threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")  # read when numpy and torch are first imported
