"""What has to be right for an epsilon to be true; numpy, scipy and the accountants alone.

Knows no LangChain, no torch and no network.
"""
