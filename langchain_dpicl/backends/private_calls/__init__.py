"""Calls of LangChain models that leave no trace of a private prompt. Knows no method and no ledger."""
