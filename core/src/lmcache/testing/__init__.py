"""The conformance kit: tests that every device wheel must pass, run against yours.

Two lines of a vendor's CI run it::

    pip install 'lmcache[testing]' lmcache-foo
    lmcache device verify foo --report report.json

What is tested follows from what the backend declares (:mod:`lmcache.testing.capabilities`); what it does not
declare is listed as unsupported, and is a failure only if the level asked for needs it. A fault that a vendor
knows of is an *expected failure*: named with its reason, it does not fail the run, and it does once it passes.
"""

from __future__ import annotations

from lmcache.testing.capabilities import LEVELS, Capabilities, probe_capabilities
from lmcache.testing.marks import needs, not_shown

__all__ = ["LEVELS", "Capabilities", "needs", "not_shown", "probe_capabilities"]
