"""What tests of the kit say of themselves: whom they apply to, and that they could not see anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["NOT_SHOWN", "needs", "not_shown"]

NOT_SHOWN = "not shown: "
"""How the reason of a test begins that ran and saw nothing either way."""


def needs(*capabilities: str) -> Callable[[Any], Any]:
    """The test applies to backends that declare all of ``capabilities``; to others it is unsupported."""
    import pytest

    mark: Callable[[Any], Any] = pytest.mark.lmcache_needs(*capabilities)
    return mark


def not_shown(why: str) -> NoReturn:
    """End the test without a verdict: what it is about cannot be seen here. That is no lack of the backend."""
    import pytest

    raise pytest.skip.Exception(NOT_SHOWN + why)
