"""LangChain's classes of providers, each talked to in an environment of its own; run by `make providers`."""
