"""The one way from private records to something public: ticket, secret sample, rows, bounded sum, noise.

Must not import a method, a prompt wording or LangChain.
"""
