"""The conformance tests without pytest: one outcome per test."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lmcache.testing.adapters.conformance import AdapterConformance
from lmcache.v1.storage.l2.adapter import StorageAdapter

__all__ = ["Outcome", "run"]


class Outcome(NamedTuple):
    """What came of one test; ``fault`` is empty if it passed."""

    name: str
    seconds: float
    fault: str

    def __str__(self) -> str:
        verdict = f"FAILED  {self.name}: {self.fault}" if self.fault else f"passed  {self.name}"
        return f"{verdict} ({self.seconds:.2f} s)"


def run(
    make: Callable[[], StorageAdapter],
    *,
    persistent: bool = False,
    seconds: float = 20.0,
    largest: int = 5_000_000,
) -> Iterator[Outcome]:
    """Run every conformance test; its outcome as soon as it is known.

    Args:
        make: opens the adapter. Called anew after it was closed.
        persistent: whether what was stored is to be there after that.
        seconds: that a call may take.
        largest: bytes of the largest object.
    """
    tests = AdapterConformance()
    tests.make = make  # type: ignore[method-assign]
    tests.persistent, tests.seconds, tests.largest = persistent, seconds, largest
    for name in (name for name in vars(AdapterConformance) if name.startswith("test_")):
        start, fault = time.monotonic(), ""
        try:
            getattr(tests, name)()
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # an adapter that is at fault may raise whatever it likes
            where = traceback.extract_tb(exc.__traceback__)[-1]
            text = " ".join(str(exc).split())
            fault = f"{type(exc).__name__}: {text} ({where.filename.rpartition('/')[2]}:{where.lineno})"
        yield Outcome(name, time.monotonic() - start, fault)
