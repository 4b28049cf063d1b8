"""An op as a member of ``DeviceOps``: its signature and its words here, its work on the torch baseline.

``@op`` turns a method without a body into a descriptor. On an instance it gives the function of the baseline
that has its name, or raises AttributeError where the baseline must not stand in, so that ``hasattr`` stays the
probe. It has no ``__set__``: an attribute of the instance, which is what ``bind_native`` makes, comes first,
and so does a method of a subclass. Both may call ``super().NAME(...)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["BaselineOp", "op"]

F = TypeVar("F", bound=Callable[..., Any])


class BaselineOp:
    """One op of the contract, answered by the baseline."""

    __name__: str

    def __init__(self, declared: Callable[..., Any]) -> None:
        functools.update_wrapper(self, declared)  # name, words and signature, for help() and inspect

    def __get__(self, ops: Any, owner: type | None = None) -> Any:
        return self if ops is None else ops._baseline(self.__name__)

    def __call__(self, ops: Any, /, *args: Any, **kwargs: Any) -> Any:
        """``DeviceOps.NAME(ops, ...)``, as with any method."""
        return ops._baseline(self.__name__)(*args, **kwargs)


def op(declared: F) -> F:
    """Declare an op of the contract; ``declared`` has the signature and the docstring, and no body."""
    return cast("F", BaselineOp(declared))
