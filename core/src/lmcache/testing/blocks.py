"""One call of ``multi_layer_block_kv_transfer``, and beside it what the reference makes of the same bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from lmcache.testing import reference
from lmcache.testing.arrays import Guarded, flat, same
from lmcache.v1.kv_layout import KVFormat

__all__ = ["GATHER", "OP", "PER_OBJECT", "SCATTER", "BlockTransfer", "case_of", "dtype_of"]

OP = "multi_layer_block_kv_transfer"
GATHER, SCATTER = 1, 0
PER_OBJECT = 3
"""Blocks per object."""


def case_of(row: KVFormat) -> reference.Case:
    """Small and odd sizes; pages of marked rows have a width of their own."""
    return (
        reference.Case(width=row.mark[1], heads=1)
        if row.mark
        else reference.Case(blocks=9, block_size=4, heads=3)
    )


def dtype_of(row: KVFormat, wanted: str) -> str:
    """The element type to use where a test wants ``wanted``."""
    return row.mark[0] if row.mark else wanted


class BlockTransfer:
    """Random pages and objects on the device, and the same in numpy.

    ``before`` and ``after`` are (pages, objects) as the reference has them; ``kind`` is the kind of operands.
    """

    def __init__(
        self,
        ops: Any,
        device: Any,
        row: KVFormat,
        kind: str,
        ids: Sequence[int],
        skip: int,
        way: int,
        dtype: str,
    ) -> None:
        import torch

        self.ops, self.device, self.kind, self.way = ops, device, kind, way
        self.ids, self.skip, self.row = list(ids), skip, row
        element = getattr(torch, dtype_of(row, dtype))
        pages = reference.build(row, case_of(row), element.itemsize)
        count = max(1, -(-len(self.ids) // PER_OBJECT))
        objects = reference.make_objects(pages, PER_OBJECT, count, element.itemsize)
        self.before: tuple[reference.Paged, list[Any]] = (pages, objects)
        self.after = copy.deepcopy(self.before)
        self.pages, self.objects = Guarded(pages.nested, device, element), Guarded(objects, device, element)
        self.chunk_size = PER_OBJECT * pages.case.block_size

    def expect(self) -> None:
        """Let the reference do it."""
        (reference.gather if self.way == GATHER else reference.scatter)(*self.after, self.ids, self.skip)

    def run(self, **changes: Any) -> None:
        """Let the device do it. ``changes`` replace arguments: ``chunk_size``, ``way``, ``format``, ``skip``."""
        self.prepared(**changes)()

    def prepared(self, **changes: Any) -> Callable[[], None]:
        """What lets the device do it, with all that it needs on the device already."""
        import torch

        pages, objects = self.pages.tensors, self.objects.tensors
        if self.kind == "pointers":
            addresses = [tensor.data_ptr() for tensor in flat(pages)]
            pages = torch.tensor(addresses, dtype=torch.int64).to(self.device)
            objects = [chunk.data_ptr() for chunk in objects]
        arguments = (
            pages,
            objects,
            torch.tensor(self.ids, dtype=torch.int64).to(self.device),
            self.device,
            changes.get("way", self.way),
            self.describe(),
            changes.get("chunk_size", self.chunk_size),
            changes.get("format", self.row.id),
            changes.get("skip", self.skip),
        )
        return lambda: self.ops.multi_layer_block_kv_transfer(*arguments)

    def describe(self) -> Any:
        """The ``PageBufferShapeDesc`` of the pages."""
        row, case, some = self.row, self.before[0].case, self.objects.tensors[0]
        heads = 1 if row.is_mla else case.heads
        desc = self.ops.PageBufferShapeDesc()
        values = {"kv_size": row.kv_size, "nl": case.layers, "nb": case.blocks, "bs": case.block_size}
        values |= {"nh": heads, "hs": some.shape[-1] // heads, "element_size": some.element_size()}
        for name, value in values.items():
            setattr(desc, name, value)
        return desc

    def fault(self) -> str:
        """What is not as the reference has it; empty if all is."""
        faults = []
        if not same(self.pages.tensors, self.after[0].nested):
            faults.append("the engine's pages are not what the reference has")
        if not same(self.objects.tensors, self.after[1]):
            faults.append("the chunk objects are not what the reference has")
        if not (self.pages.intact() and self.objects.intact()):
            faults.append("memory beside the tensors was written")
        return "; ".join(faults)
