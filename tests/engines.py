"""An engine for `dpicl generate --model tests.engines:ENGINE`."""

from langchain_dpicl.backends.fake import FakeBackend, word_copier
from tests.doubles import WORDS

ENGINE = FakeBackend(word_copier(WORDS), vocabulary=WORDS)
