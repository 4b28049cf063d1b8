"""Plans of the ops that only native modules have, and beside them what the reference makes of the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmcache.testing import reference
from lmcache.testing.arrays import Guarded, flat, same
from lmcache.testing.blocks import GATHER, PER_OBJECT, case_of, dtype_of
from lmcache.v1.kv_layout import KVFormat

__all__ = ["ALIGNMENT", "DIRECT", "GROUPS", "DirectPlan", "GroupPlan"]

GROUPS = "execute_object_group_transfer"
DIRECT = "execute_direct_copy_transfer"
ALIGNMENT = 4096

_BLOCKS = 16
_IDS = ((3, 11, 0, 7, 15, 1, 9, 4, 12, 2, 8, 14, 5), (6, 0, 13, 2, 9, 15, 1, 4, 10, 7, 3, 12, 8))
"""Of each group: four objects, and a fifth that is not full."""
_AT_ONCE = 2
"""Staging buffers of a group."""
_GUARD = 0xA5


class _Host:
    """Objects in one buffer of the host, apart from each other, and the same in numpy."""

    def __init__(self, objects: Sequence[Any]) -> None:
        import torch

        self.sizes: list[int] = [chunk.nbytes for chunk in objects]
        steps = [-(-size // ALIGNMENT) * ALIGNMENT + ALIGNMENT for size in self.sizes]
        self.offsets: list[int] = [ALIGNMENT + sum(steps[:i]) for i in range(len(steps))]
        self._wanted = np.full(ALIGNMENT + sum(steps), _GUARD, dtype=np.uint8)
        for index, chunk in enumerate(objects):
            self.write(index, chunk)
        self.buffer = torch.from_numpy(self._wanted.copy())

    def address(self, index: int) -> int:
        base: int = self.buffer.data_ptr()
        return base + self.offsets[index]

    def write(self, index: int, chunk: Any) -> None:
        """What the reference puts into an object."""
        at = self.offsets[index]
        self._wanted[at : at + self.sizes[index]] = chunk.reshape(-1).view(np.uint8)

    def is_right(self) -> bool:
        """Whether the whole buffer is what the reference has, between objects, too."""
        return bool(np.array_equal(self.buffer.numpy(), self._wanted))


class _Group:
    """Layers with pages of their own, on the device and in numpy."""

    def __init__(self, ops: Any, device: Any, row: KVFormat, number: int) -> None:
        import torch

        element = getattr(torch, dtype_of(row, "bfloat16"))
        case = replace(case_of(row), blocks=_BLOCKS, layers=2 + number)
        self.row, self.ids = row, _IDS[number]
        self.pages = reference.build(row, case, element.itemsize, seed=number)
        self.size = case.block_size
        self.there = Guarded(self.pages.nested, device, element)
        self.addresses = [tensor.data_ptr() for tensor in flat(self.there.tensors)]
        self._element, self._device, self._ops = element, device, ops

    def objects(self, count: int, seed: int) -> list[Any]:
        return reference.make_objects(self.pages, PER_OBJECT, count, self._element.itemsize, seed)

    def on_device(self, arrays: list[Any]) -> Guarded:
        return Guarded(arrays, self._device, self._element)

    def table(self, values: Sequence[int]) -> Any:
        import torch

        return torch.tensor(values, dtype=torch.int64).to(self._device)

    def describe(self, hidden: int) -> Any:
        case, row = self.pages.case, self.row
        heads = 1 if row.is_mla else case.heads
        desc = self._ops.PageBufferShapeDesc()
        values = {"kv_size": row.kv_size, "nl": case.layers, "nb": case.blocks, "bs": case.block_size}
        values |= {"nh": heads, "hs": hidden // heads, "element_size": self._element.itemsize}
        for name, value in values.items():
            setattr(desc, name, value)
        return desc

    def move(self, way: int, objects: list[Any], ids: Sequence[int], skip: int) -> None:
        """As the reference does it."""
        (reference.gather if way == GATHER else reference.scatter)(self.pages, objects, ids, skip)

    def is_right(self) -> bool:
        return same(self.there.tensors, self.pages.nested) and self.there.intact()


class GroupPlan:
    """Five objects of each of two groups, in steps that use the same staging buffers one after the other."""

    def __init__(self, ops: Any, device: Any, row: KVFormat, way: int) -> None:
        self._ops, self._device, self.way = ops, device, way
        self.groups = [_Group(ops, device, row, number) for number in range(2)]
        self._staging = [group.objects(_AT_ONCE, seed=10 + i) for i, group in enumerate(self.groups)]
        self._staged = [g.on_device(arrays) for g, arrays in zip(self.groups, self._staging, strict=True)]
        self._objects = [group.objects(5, seed=20 + i) for i, group in enumerate(self.groups)]
        self.host = _Host([chunk for mine in self._objects for chunk in mine])
        self._tables = [(g.table(g.addresses), g.table(g.ids)) for g in self.groups]

    def run(self, *more: Any) -> None:
        """Let the device do it; ``more`` are optional arguments of the op."""
        specs = []
        for group, staged, (pages, ids) in zip(self.groups, self._staged, self._tables, strict=True):
            buffers = [tensor.data_ptr() for tensor in staged.tensors]
            desc = group.describe(staged.tensors[0].shape[-1])
            slots = PER_OBJECT * group.size
            specs.append(
                self._ops.KernelGroupSpec(
                    pages.data_ptr(), buffers, desc, slots, group.row.id, ids.data_ptr(), len(group.ids)
                )
            )
        steps = [self._step(*step) for step in self._order()]
        self._ops.execute_object_group_transfer(self.way, self._device, ALIGNMENT, specs, steps, *more)

    def expect(self) -> None:
        """Let the reference do it, in the order of the steps."""
        for number, first, count, skip in self._order():
            group, staging = self.groups[number], self._staging[number]
            ids = group.ids[first * PER_OBJECT : (first + count) * PER_OBJECT]
            mine = self._objects[number]
            if self.way == GATHER:
                group.move(self.way, staging[:count], ids, skip)
                for i in range(count):
                    self.host.write(5 * number + first + i, staging[i])
            else:
                for i in range(count):
                    staging[i][...] = mine[first + i]
                group.move(self.way, staging[:count], ids, skip)

    @staticmethod
    def _order() -> list[tuple[int, int, int, int]]:
        """Group, first object, objects, blocks to skip."""
        return [(0, 0, 2, 0), (1, 0, 2, 4), (0, 2, 2, 0), (1, 2, 2, 0), (0, 4, 1, 0), (1, 4, 1, 0)]

    def _step(self, number: int, first: int, count: int, skip: int) -> Any:
        copies = []
        for i in range(count):
            index = 5 * number + first + i
            host, there = self.host.address(index), self._staged[number].tensors[i].data_ptr()
            ends = (host, there) if self.way == GATHER else (there, host)
            copies.append(self._ops.StagingCopy(*ends, self.host.sizes[index], self.host.offsets[index]))
        at = first * PER_OBJECT
        blocks = min(count * PER_OBJECT, len(self.groups[number].ids) - at)
        return self._ops.BatchStep(copies, [self._ops.LaunchVar(number, at, blocks, count, skip)])

    def fault(self) -> str:
        """What is not as the reference has it; empty if all is."""
        faults = [
            f"pages of group {i} are wrong" for i, group in enumerate(self.groups) if not group.is_right()
        ]
        if not self.host.is_right():
            faults.append("the host's objects are wrong")
        for i, (staged, wanted) in enumerate(zip(self._staged, self._staging, strict=True)):
            if not (same(staged.tensors, wanted) and staged.intact()):
                faults.append(f"staging of group {i} is wrong")
        return "; ".join(faults)


class DirectPlan:
    """Three of four objects, out of order. Each holds a part of both groups, one behind the other."""

    _CHUNKS = (2, 0, 3)
    _SKIPS = ((0, 0), (1, 2), (0, 1))

    def __init__(self, ops: Any, device: Any, row: KVFormat, way: int) -> None:
        self._ops, self._device, self.way = ops, device, way
        self.groups = [_Group(ops, device, row, number) for number in range(2)]
        self._parts = [group.objects(len(self._CHUNKS), seed=30 + i) for i, group in enumerate(self.groups)]
        self.host = _Host([self._joined(i) for i in range(len(self._CHUNKS))])

    def _joined(self, index: int) -> Any:
        return np.concatenate([mine[index].reshape(-1).view(np.uint8) for mine in self._parts])

    def run(self) -> None:
        """Let the device do it."""
        specs, at = [], 0
        for group, mine in zip(self.groups, self._parts, strict=True):
            desc = group.describe(mine[0].shape[-1])
            slots, ids = PER_OBJECT * group.size, list(group.ids[: 4 * PER_OBJECT])
            specs.append(self._ops.DirectCopyGroupSpec(group.addresses, desc, group.row.id, slots, at, ids))
            at += mine[0].nbytes
        objects = [
            self._ops.DirectCopyObject(
                self.host.address(i), self.host.offsets[i], self.host.sizes[i], chunk, list(skips)
            )
            for i, (chunk, skips) in enumerate(zip(self._CHUNKS, self._SKIPS, strict=True))
        ]
        self._ops.execute_direct_copy_transfer(self.way, self._device, ALIGNMENT, specs, objects)

    def expect(self) -> None:
        """Let the reference do it."""
        for i, (chunk, skips) in enumerate(zip(self._CHUNKS, self._SKIPS, strict=True)):
            for group, mine, skip in zip(self.groups, self._parts, skips, strict=True):
                ids = group.ids[chunk * PER_OBJECT : (chunk + 1) * PER_OBJECT]
                group.move(self.way, [mine[i]], ids, skip)
            self.host.write(i, self._joined(i))

    def fault(self) -> str:
        """What is not as the reference has it; empty if all is."""
        faults = [
            f"pages of group {i} are wrong" for i, group in enumerate(self.groups) if not group.is_right()
        ]
        return "; ".join(faults + ([] if self.host.is_right() else ["the host's objects are wrong"]))
