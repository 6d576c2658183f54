"""Which modules of the vault belong together."""

from __future__ import annotations

VAULT = "langchain_dpicl/privacy"

GROUPS = {
    "ledger": (
        "_validate", "ledger/budget", "ledger/shares", "ledger/state", "ledger/store", "ledger/tickets",
        "ledger/writer", "extensions/joint_plans", "extensions/ledger_anchor",
        "extensions/durable_writer",
    ),
    "accounting": (
        "accounting/epsilon", "accounting/profiles", "accounting/calibration", "accounting/events",
        "extensions/label_places", "extensions/random_allocation",
    ),
    "aggregation": (
        "mechanisms/bounded", "extensions/normalized_sums", "extensions/logit_sums", "extensions/gradient_sums",
        "extensions/joint_exponential",
    ),
    "sampling": (
        "mechanisms/release_plan", "extensions/fixed_size_slots", "private_examples", "mechanisms/randomness",
    ),
}  # fmt: skip
"""Ledger: who may spend; accounting: what it costs; aggregation: what rows become; sampling: who is in which row."""

PRELOADED = (
    "numpy",
    "scipy.stats",
    "scipy.special",
    "scipy.optimize",
    "scipy.signal",
    "scipy.fft",
    "langchain_core.messages",
    "hypothesis",
    "pytest_asyncio",
)
"""Imported once, for all processes that are forked."""
