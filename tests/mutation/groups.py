"""Which modules of the vault belong together. Knows no test."""

from __future__ import annotations

VAULT = "langchain_dpicl/privacy"

GROUPS = {
    "ledger": (
        "ledger/budget", "ledger_state", "desk", "shares", "tickets", "stores", "promises",
        "amounts", "refusals", "receipt_checks",
        "extensions/adaptive_pools", "extensions/joint_plans", "extensions/ledger_anchor", "extensions/ledger_outages",
        "extensions/share_prices",
    ),
    "accounting": (
        "accounting", "_prices", "_engine", "_grid", "_terms", "_profiles", "_search", "_allocation", "events",
    ),
    "aggregation": ("aggregation", "_row_sums", "logit_sums", "gradient_sums", "bounded", "joint"),
    "sampling": ("sampling", "units", "randomness"),
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
