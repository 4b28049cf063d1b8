"""Settings of the in-process engine: YAML, environment and code through one schema."""

from __future__ import annotations

from lmcache.v1.config.display import masked, shown
from lmcache.v1.config.refused import REFUSED
from lmcache.v1.config.rules import policy_name
from lmcache.v1.config.schema import FIELDS, LMCacheEngineConfig
from lmcache.v1.config.tiers import L1_NAME, TierSpec, places, tier_specs

__all__ = [
    "FIELDS",
    "L1_NAME",
    "REFUSED",
    "LMCacheEngineConfig",
    "TierSpec",
    "masked",
    "places",
    "policy_name",
    "shown",
    "tier_specs",
]
