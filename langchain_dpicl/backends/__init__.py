"""The engines: prompts in, rows out. Know nothing of privacy, budgets or records.

`base` says what an engine can do, as Protocols; `fake` holds deterministic engines for tests and docs, `langchain` any
LangChain model called in silence (`silent` makes the calls, `logprobs` reads the answers), and `resolve.as_backend`
turns what a user hands in into one of them.
"""
