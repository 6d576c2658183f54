"""Engines in a process of their own: prompts go through a pipe, rows come back. Knows no privacy and no ledger."""
