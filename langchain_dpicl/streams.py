"""Records that go on arriving, read by ranges of blocks of their own time, on a budget for windows."""

from langchain_dpicl.privacy.extensions.private_streams import PrivateRange, PrivateStream, RollingRange

__all__ = ["PrivateRange", "PrivateStream", "RollingRange"]
