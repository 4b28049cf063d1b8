"""A backend that is wrong in the way that ``LMCACHE_SIM_FAULT`` names, and right in all else."""

from __future__ import annotations

import importlib
import os
from typing import Any

from lmcache_sim_plugin.spec import SimDeviceSpec

FAULT = os.environ.get("LMCACHE_SIM_FAULT", "")

if FAULT == "imports_torch_early":
    import torch  # noqa: F401

#: What has the fault: a member of the spec, and the class of ``faults_MEMBER`` that stands in for the good one's.
FAULTS = {
    "copies_nothing": ("ops", "CopiesNothing"),
    "heads_and_slots_swapped": ("ops", "HeadsAndSlotsSwapped"),
    "half_an_element": ("ops", "HalfAnElement"),
    "one_block_too_many": ("ops", "OneBlockTooMany"),
    "ignores_the_skipped_prefix": ("ops", "IgnoresTheSkippedPrefix"),
    "drops_the_tail": ("ops", "DropsTheTail"),
    "sorts_the_blocks": ("ops", "SortsTheBlocks"),
    "own_stream": ("ops", "OwnStream"),
    "staging_drops_odd_bytes": ("ops", "StagingDropsOddBytes"),
    "completes_at_once": ("ops", "CompletesAtOnce"),
    "completes_backwards": ("ops", "CompletesBackwards"),
    "loses_completions": ("ops", "LosesCompletions"),
    "writes_the_hole": ("ops", "WritesTheHole"),
    "plan_stages_too_early": ("ops", "PlanStagesTooEarly"),
    "plan_ends_too_early": ("ops", "PlanEndsTooEarly"),
    "direct_copy_of_the_first_chunk": ("ops", "DirectCopyOfTheFirstChunk"),
    "event_fires_early": ("events", "FiresEarly"),
    "query_blocks": ("events", "QueryBlocks"),
    "wait_does_nothing": ("events", "WaitDoesNothing"),
    "one_handle_for_all": ("events", "OneHandleForAll"),
    "maps_the_wrong_offset": ("ipc", "WrongOffset"),
    "maps_the_wrong_device": ("ipc", "WrongDevice"),
    "maps_a_copy": ("ipc", "Copy"),
    "leaks_a_mapping": ("ipc", "LeaksAMapping"),
    "staging_overlaps": ("context", "StagingOverlaps"),
    "pins_nothing": ("pinning", "PinsNothing"),
    "imports_torch_early": ("", ""),
    "claims_what_it_lacks": ("", ""),
}


def _faulty(member: str, good: Any) -> Any:
    where, name = FAULTS.get(FAULT, ("", ""))
    if where != member:
        return good
    return getattr(importlib.import_module("lmcache_sim_bad.faults"), name)


class BadSimDeviceSpec(SimDeviceSpec):
    """See the module."""

    @property
    def backend_name(self) -> str:
        return "sim-bad"

    def is_available(self) -> bool:
        return FAULT in FAULTS and super().is_available()

    @property
    def ops_cls(self) -> Any:
        return _faulty("ops", super().ops_cls)

    @property
    def event_ipc_backend(self) -> Any:
        if FAULT == "claims_what_it_lacks":
            return None
        good = super().event_ipc_backend
        cls = _faulty("events", type(good))
        if type(good) is not cls:
            self._events = cls()
        return self._events

    @property
    def ipc_wrapper_cls(self) -> Any:
        return _faulty("ipc", super().ipc_wrapper_cls)

    @property
    def pin_memory_backend(self) -> Any:
        return _faulty("pinning", super().pin_memory_backend)

    def create_cache_context(self, *args: Any, **kwargs: Any) -> Any:
        from lmcache_sim_plugin.context import SimCacheContext

        return _faulty("context", SimCacheContext)(*args, **kwargs)

    def is_lmcache_driven_available(self) -> bool:
        return True
