"""Public models for released prompts: classifiers, and LangChain models over local and embedded engines.

Sees no private record.
"""
