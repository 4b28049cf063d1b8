"""The faults, each a class that stands in for a good one."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch
from lmcache_sim_plugin import native
from lmcache_sim_plugin.context import SimCacheContext
from lmcache_sim_plugin.events import SimEventBackend
from lmcache_sim_plugin.ipc import SimIPCWrapper
from lmcache_sim_plugin.ops import SimDeviceOps
from lmcache_sim_plugin.pinning import SimPinMemoryBackend

from lmcache.v1.platform.base.op_contract import serves, takes

# ---------------------------------------------------------------------------------------------------------- ops


class _Faulty(SimDeviceOps):
    """A native module of which one function is wrong: ``bind_native`` puts it on the instance, so it goes there."""

    def ensure_native(self) -> None:
        super().ensure_native()
        self.spoil()

    def spoil(self) -> None:
        """Replace what is to be wrong."""

    def replace(self, name: str, function: Any) -> None:
        """Let ``function`` answer the op ``name``, declared as the good one is."""
        formats = self.supported_formats(name)

        @serves(lambda row: "" if row.id in formats else "it is not declared")
        @takes(*self.operand_kinds(name))
        def call(*arguments: Any) -> Any:
            return function(*arguments)

        setattr(self, name, call)


class _FaultyTransfer(_Faulty):
    def spoil(self) -> None:
        self.replace("multi_layer_block_kv_transfer", self.transfer)

    def transfer(
        self, paged: Any, objects: Any, block_ids: Any, device: Any, direction: int, desc: Any, chunk: int,
        row: int, skip: int = 0,
    ) -> None:  # fmt: skip
        ids = torch.as_tensor(block_ids).cpu()
        call = {
            "objects": list(objects),
            "ids": ids,
            "direction": direction,
            "desc": desc,
            "row": row,
            "skip": skip,
        }
        call |= {"chunk": chunk, "per_object": chunk // max(1, desc.bs)}
        if desc.bs > 0 and chunk > 0 and 0 <= skip <= len(ids):  # what is refused stays refused
            call |= self.wrong(**call)
        native.multi_layer_block_kv_transfer(
            paged, call["objects"], call["ids"].to(device), device, direction, call["desc"], chunk, call["row"],
            call["skip"],
        )  # fmt: skip

    def wrong(self, **call: Any) -> dict[str, Any]:
        """The arguments to change."""
        raise NotImplementedError


class CopiesNothing(_FaultyTransfer):
    def wrong(self, **call: Any) -> dict[str, Any]:
        return {"skip": len(call["ids"])}


class HeadsAndSlotsSwapped(_FaultyTransfer):
    """The strides of a layout with heads inside slots, for one with heads outside."""

    def wrong(self, **call: Any) -> dict[str, Any]:
        return {"row": {6: 1, 7: 2, 8: 0, 12: 13, 15: 1}.get(int(call["row"]), call["row"])}


class HalfAnElement(_FaultyTransfer):
    """Counts elements of two bytes as of one."""

    def wrong(self, **call: Any) -> dict[str, Any]:
        size = call["desc"].element_size
        return {"desc": replace(call["desc"], element_size=max(1, size // 2))}


class OneBlockTooMany(_FaultyTransfer):
    def wrong(self, **call: Any) -> dict[str, Any]:
        ids = call["ids"]
        if call["direction"] or not len(ids) % call["per_object"]:
            return {}
        return {"ids": torch.cat([ids, (ids[-1:] + 1) % call["desc"].nb])}


class IgnoresTheSkippedPrefix(_FaultyTransfer):
    def wrong(self, **call: Any) -> dict[str, Any]:
        return {"skip": 0}


class DropsTheTail(_FaultyTransfer):
    def wrong(self, **call: Any) -> dict[str, Any]:
        whole = len(call["ids"]) // call["per_object"] * call["per_object"]
        return {"ids": call["ids"][:whole], "skip": min(call["skip"], whole)}


class SortsTheBlocks(_FaultyTransfer):
    def wrong(self, **call: Any) -> dict[str, Any]:
        return {"ids": call["ids"].sort().values}


class OwnStream(_FaultyTransfer):
    """Does not wait for what is on the current stream."""

    def transfer(self, *args: Any) -> None:
        with torch.sim.Stream(args[3]):
            native.multi_layer_block_kv_transfer(*args)


class StagingDropsOddBytes(_Faulty):
    def spoil(self) -> None:
        def copy(dest: Any, src: Any, nbytes: int, *rest: int) -> None:
            native.lmcache_memcpy_async(dest, src, nbytes // 16 * 16, *rest)

        self.replace("lmcache_memcpy_async", copy)


class WritesTheHole(_Faulty):
    """A slot of -1 is the last one."""

    def spoil(self) -> None:
        def transfer(kv: Any, ptrs: Any, slots: Any, device: Any, total: int, *rest: Any) -> None:
            native.multi_layer_kv_transfer(kv, ptrs, slots % total, device, total, *rest)

        self.replace("multi_layer_kv_transfer", transfer)


class _FaultyCompletions(_Faulty):
    def __init__(self) -> None:
        super().__init__()
        self.lock, self.told = threading.Lock(), 0

    def spoil(self) -> None:
        self.replace("record_completion_on_stream", self.record)
        self.replace("drain_recorded_completions", self.drain)

    def record(self, stream_ptr: int, kind: str, payload: bytes) -> None:
        native.record_completion_on_stream(stream_ptr, kind, payload)

    def drain(self) -> list[tuple[str, bytes]]:
        return native.drain_recorded_completions()


class CompletesAtOnce(_FaultyCompletions):
    def record(self, stream_ptr: int, kind: str, payload: bytes) -> None:
        idle = torch.sim.Stream(torch.sim.Stream.from_handle(stream_ptr).device)
        native.record_completion_on_stream(idle.sim_stream, kind, payload)


class CompletesBackwards(_FaultyCompletions):
    def drain(self) -> list[tuple[str, bytes]]:
        return super().drain()[::-1]


class LosesCompletions(_FaultyCompletions):
    def drain(self) -> list[tuple[str, bytes]]:
        with self.lock:
            kept = []
            for completion in super().drain():
                self.told += 1
                if self.told % 50:
                    kept.append(completion)
            return kept


# ------------------------------------------------------------------------------------------------------- events


class FiresEarly(SimEventBackend):
    def record_event(self, event: Any, stream: Any) -> None:
        super().record_event(event, torch.sim.Stream(stream.device))


class QueryBlocks(SimEventBackend):
    def query_event(self, event: Any) -> bool:
        event.synchronize()
        return super().query_event(event)


class WaitDoesNothing(SimEventBackend):
    def wait_event(self, event: Any, stream: Any) -> None:
        return None


class PlanStagesTooEarly(_Faulty):
    """All that is staged is staged first, and buffers are used again before they were read."""

    def spoil(self) -> None:
        self.replace("execute_object_group_transfer", self.plan)

    def plan(self, direction: int, device: Any, alignment: int, groups: Any, steps: Any, *more: Any) -> None:
        split = [type(step)(step.staging, []) for step in steps] + [
            type(step)([], step.launches) for step in steps
        ]
        order = split if not direction else split[len(steps) :] + split[: len(steps)]
        native.execute_object_group_transfer(direction, device, alignment, groups, order, *more)


class PlanEndsTooEarly(PlanStagesTooEarly):
    def plan(self, direction: int, device: Any, alignment: int, groups: Any, steps: Any, *more: Any) -> None:
        native.execute_object_group_transfer(direction, device, alignment, groups, steps[:-1], *more)


class DirectCopyOfTheFirstChunk(_Faulty):
    def spoil(self) -> None:
        self.replace("execute_direct_copy_transfer", self.plan)

    def plan(self, direction: int, device: Any, alignment: int, groups: Any, objects: Any) -> None:
        first = [replace(chunk, chunk_idx=0) for chunk in objects]
        native.execute_direct_copy_transfer(direction, device, alignment, groups, first)


class OneHandleForAll(SimEventBackend):
    first: bytes = b""

    def export_event(self, event: Any, device: Any) -> bytes:
        handle = super().export_event(event, device)
        self.first = self.first or handle
        return self.first


# ---------------------------------------------------------------------------------------------------------- ipc


class WrongOffset(SimIPCWrapper):
    """Every view begins where its allocation does."""

    def to_tensor(self) -> Any:
        good = super().to_tensor()
        views = (good,) if self._wire.single else good
        views = tuple(view.as_strided(view.shape, view.stride(), 0) for view in views)
        return views[0] if self._wire.single else views


class WrongDevice(SimIPCWrapper):
    """Every view is on the first device."""

    def to_tensor(self) -> Any:
        good = super().to_tensor()
        views = (good,) if self._wire.single else good
        first = torch.device("sim", 0)
        views = tuple(v if v.device == first else v.to(first).as_strided(v.shape, v.stride()) for v in views)
        return views[0] if self._wire.single else views


class Copy(SimIPCWrapper):
    def to_tensor(self) -> Any:
        good = super().to_tensor()
        if not self._wire.single:
            return tuple(view.clone() for view in good)
        return torch.empty_strided(good.shape, good.stride(), dtype=good.dtype, device=good.device).copy_(
            good
        )


class LeaksAMapping(SimIPCWrapper):
    leaked: list[Any] = []  # noqa: RUF012

    def close(self) -> None:
        self.leaked.append(self._views)
        super().close()


# -------------------------------------------------------------------------------------------- context, pinning


class StagingOverlaps(SimCacheContext):
    def _slot(self, batch_idx: int) -> Any:
        super()._slot(batch_idx)
        return super()._slot(0)


class PinsNothing(SimPinMemoryBackend):
    """Says yes, and keeps the books, without telling the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()

    def pin_memory(self, ptr: int, size: int, flags: int = 0) -> bool:
        if ptr <= 0 or size <= 0:
            return False
        self.known.add(ptr)
        return True

    def unpin_memory(self, ptr: int) -> bool:
        found = ptr in self.known
        self.known.discard(ptr)
        return found
