"""What has to be right for an epsilon to be true; numpy, scipy and the accountants alone.

Knows no LangChain, no torch and no network.
"""

from importlib import import_module

from langchain_dpicl._lazy import provide

# The core asks for these by name and imports neither.
provide("extensions", lambda: import_module("langchain_dpicl.privacy.extensions.registry"))
provide("second_opinions", lambda: import_module("langchain_dpicl.privacy.second_opinions"))
provide("streams", lambda: import_module("langchain_dpicl.privacy.extensions.stream_ledger"))
provide("label_places", lambda: import_module("langchain_dpicl.privacy.extensions.label_places"))
provide("redeclared", lambda: import_module("langchain_dpicl.privacy.extensions.redeclared"))
provide("about", lambda: import_module("langchain_dpicl.privacy.extensions.ledger_anchor"))
