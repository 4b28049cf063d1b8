"""The names of the memory layer, by the path that the outside world imports. Needs no torch to import."""

from __future__ import annotations

from lmcache.v1.memory.names import *  # noqa: F403
from lmcache.v1.memory.names import __all__ as __all__
