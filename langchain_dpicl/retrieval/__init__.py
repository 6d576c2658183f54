"""Votes and answers over retrieved private documents, with an individual privacy filter."""
