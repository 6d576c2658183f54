"""The engines: prompts in, rows out. Know nothing of privacy, budgets or records.

`base` says what an engine can do, as Protocols; `fake` holds deterministic engines for tests and docs. LangChain models
are called in silence (`silent` makes the calls): `langchain` for those that report log-probabilities (`logprobs` reads
them), `decisions` for those that have a probability for every label, `texts` for those that only write (`answers` says
which label an answer names). `resolve.as_backend` and `resolve.as_choice_backend` turn what a user hands in into one.
"""
