"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples in every run, and no limit of time: a machine that is busy makes them slow, not wrong.
# To look for others: pytest --hypothesis-profile=explore
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("same")
