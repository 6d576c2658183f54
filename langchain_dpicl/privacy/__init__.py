"""The vault: numpy, scipy and the accountants. Knows no LangChain, no torch and no network."""
