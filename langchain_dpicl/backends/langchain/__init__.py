"""Backends over LangChain chat and completion models: logprobs, decisions, texts. Knows no privacy."""
