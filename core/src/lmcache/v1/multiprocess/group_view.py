"""The path by which engines import what they declare of their KV groups; see ``lmcache.v1.kv_layer_groups``."""

from __future__ import annotations

from lmcache.v1.kv_layer_groups import EngineGroupInfo, engine_group_layer_indices

__all__ = ["EngineGroupInfo", "engine_group_layer_indices"]
