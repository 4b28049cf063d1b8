"""What the server answers to a request that it cannot serve."""

from __future__ import annotations

from lmcache.errors import LMCacheError

__all__ = ["Refused"]


class Refused(LMCacheError):
    """A request that cannot be served; ``code`` is the error reply's code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
