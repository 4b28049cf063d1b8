"""Conformance tests for storage adapters: what :class:`lmcache.v1.storage.l2.adapter.StorageAdapter` promises.

As tests of pytest, in a module of yours::

    from lmcache.testing.adapters import AdapterConformance

    class TestMyAdapter(AdapterConformance):
        persistent = True

        def make(self):
            return MyAdapter(...)

Or without pytest: ``for outcome in run(MyAdapter): print(outcome)``. See ``docs/storage/external.md``.
"""

from __future__ import annotations

from lmcache.testing.adapters.conformance import AdapterConformance
from lmcache.testing.adapters.running import Outcome, run

__all__ = ["AdapterConformance", "Outcome", "run"]
