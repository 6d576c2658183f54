"""Synthetic documents for retrieval, written topic by topic."""
