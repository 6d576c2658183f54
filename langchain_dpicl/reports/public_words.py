"""The public ranking of words by which units choose theirs, and by which a verifier tests what was released."""

from __future__ import annotations

from functools import cache

from langchain_dpicl.backends.embedded.tables import load_tables
from langchain_dpicl.backends.rows.answer_rows import STOP_WORDS
from langchain_dpicl.privacy.extensions.word_release import PublicWords


@cache
def public_words() -> PublicWords:
    """Returns the words of the embedded model by how common they are in its public text, and English stop words."""
    tables = load_tables()
    common: dict[str, float] = {}
    for token, frequency in zip(tables.token_bytes, tables.unigram.tolist(), strict=True):
        piece = token.decode("utf-8", "ignore")
        if piece.startswith(" ") and piece[1:].isalpha():  # tokens that begin with a blank are whole words
            word = piece[1:].casefold()
            common[word] = max(frequency, common.get(word, 0.0))
    return PublicWords(tuple(sorted(common, key=lambda word: (-common[word], word))), STOP_WORDS)
