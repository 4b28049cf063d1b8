"""What the environment decides. Read when it is needed, so that a bad value breaks nothing that does not ask."""

from __future__ import annotations

import os

from lmcache.errors import ConfigError, bad_value

__all__ = ["block_sizes", "native_wanted", "step_marks"]

_NATIVE, _MARKS, _SIZES = "LMCACHE_HPU_NATIVE", "LMCACHE_HPU_STEP_MARKS", "LMCACHE_HPU_BLOCK_SIZES"


def _choice(name: str, *valid: str) -> str:
    value = os.environ.get(name, "").strip().lower() or valid[0]
    if value not in valid:
        raise ConfigError(bad_value(name, value, f"one of {', '.join(valid)}"))
    return value


def native_wanted() -> bool:
    """Whether the native module is to be used: off leaves all to torch, in shapes that follow the request."""
    return _choice(_NATIVE, "on", "off") == "on"


def step_marks() -> str:
    """``auto``: where Gaudi's software runs in lazy mode."""
    return _choice(_MARKS, "auto", "on", "off")


def block_sizes() -> tuple[int, ...]:
    """How many blocks a batch may have."""
    from lmcache.v1.platform.fixed_shapes import parse_sizes

    return parse_sizes(_SIZES, os.environ.get(_SIZES, ""))
