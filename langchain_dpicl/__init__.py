"""Differentially private in-context learning for LangChain."""
