"""Slots on the host, where a slot is the same run of bytes in its page as in an object.

Each run of consecutive slots is one memcpy in the calling thread; slots here and there are chosen by index, in pieces
that torch copies in the calling thread, too. torch's copies of many rows share their work among
threads that wait for each other, which on a machine with other work costs ten times what the bytes do; and what can be
known of the pages is worked out once, not with every call.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from lmcache.v1.gpu_connector.slots import Slots
from lmcache.v1.kv_layout import KVFormat
from lmcache.v1.platform.ops_types import TransferDirection
from lmcache.v1.platform.torch_ops._planes import planes_of
from lmcache.v1.utils.memcpy import copy_each

if TYPE_CHECKING:
    import torch

__all__ = ["HostRuns"]

_LEAST_BYTES = 1024
"""Mean bytes of a copy below which torch's are quicker, busy machine or not."""
_SHORT_BYTES = 8192
"""Mean bytes of a copy below which a choice of rows is quicker, where it can be made."""
_WIDE = 16
"""Bytes of a complex128, the widest element that torch moves; it leaves the bits as they are."""
_SERIAL = 32 << 10
"""Elements up to which torch copies in the calling thread."""


class HostRuns:
    """The planes of some layers: K and V of each, or the one plane.

    Args:
        row: The layout.
        nested: The layers' tensors on the host, as the row says.
    """

    def __init__(self, row: KVFormat, nested: Any) -> None:
        planes = planes_of("HostRuns", row, nested)
        grid = planes[0].grid
        self._itemsize = planes[0].memory.element_size()
        self.width = grid.width
        self.num_slots = grid.num_slots
        self._block_size, self._block, self._slot = grid.block_size, grid.block_stride, grid.slot_stride
        self._is_one_run = not grid.inner and all(plane.grid == grid for plane in planes)
        step = grid.slot_stride if grid.block_size > 1 else grid.block_stride or grid.run
        self._slots_touch = step == grid.run
        self._blocks_touch = grid.num_slots == grid.block_size or grid.block_stride == grid.block_size * step
        self._memories = [(plane.layer, plane.kv, plane.memory) for plane in planes]
        #: Per layer: (plane of an object, address).
        self._planes: dict[int, list[tuple[int, int]]] = {}
        for plane in planes:
            self._planes.setdefault(plane.layer, []).append((plane.kv, plane.memory.data_ptr()))

    def move(self, obj: torch.Tensor, slots: Slots, way: TransferDirection, layer: int | None = None) -> bool:
        """Move the slots of all layers, or of one.

        Args:
            obj: ``[KV, L, T, D]`` on the host, of any strides; L is 1 if ``layer`` is given.
            slots: On the host, at most T.
            way: H2D writes pages.
            layer: Which one.

        Returns:
            Whether this was the way to do it; if not, nothing has moved and nothing was checked.

        Raises:
            ValueError: A slot beyond the pages.
        """
        if not self._serves(obj, slots):
            return False
        layers = self._planes if layer is None else {0: self._planes[layer]}
        if obj.shape[1] != len(layers) or any(
            kv >= obj.shape[0] for kv, _ in self._planes[next(iter(self._planes))]
        ):
            return False
        itemsize = self._itemsize
        per_token = obj.stride(2) * itemsize
        touch = self._slots_touch and per_token == self.width * itemsize
        runs = slots.runs(self.num_slots, self._block_size if not self._blocks_touch else 0, touch)
        if touch and self._by_index(obj, slots, runs, way, layer):
            return True
        if not runs or len(runs) * _LEAST_BYTES > sum(count for *_, count in runs) * self.width * itemsize:
            return not runs
        size, block, slot_bytes = self._block_size, self._block * itemsize, self._slot * itemsize
        there = [slot // size * block + slot % size * slot_bytes for _, slot, _ in runs]
        here = [token * per_token for token, _, _ in runs]
        sizes = [count * self.width * itemsize for *_, count in runs]
        begin, plane_step, layer_step = obj.data_ptr(), obj.stride(0) * itemsize, obj.stride(1) * itemsize
        for at, planes in layers.items():
            for kv, address in planes:
                base = begin + kv * plane_step + at * layer_step
                pages, rows = [address + offset for offset in there], [base + offset for offset in here]
                into, out_of = (rows, pages) if way is TransferDirection.D2H else (pages, rows)
                copy_each(into, out_of, sizes)
        return True

    def _by_index(
        self,
        obj: torch.Tensor,
        slots: Slots,
        runs: list[tuple[int, int, int]],
        way: TransferDirection,
        layer: int | None,
    ) -> bool:
        """Move slots that lie here and there, none of them padding, as rows of a table; whether that was done."""
        import torch

        itemsize, count = self._itemsize, len(slots.tensor)
        short = count * self.width * itemsize < len(runs) * _SHORT_BYTES
        steps = (obj.storage_offset(), self.width, *obj.stride()[:3])
        if not short or slots.may_skip or not self._tables or any(step * itemsize % _WIDE for step in steps):
            return False
        rows = obj.view(torch.complex128)
        at_once = max(1, _SERIAL // rows.shape[3])
        index = slots.tensor.to(torch.int64).split(at_once)
        with torch.inference_mode():  # tensors made in it can only be written in it
            for at, kv, table in self._tables:
                if layer is None or at == layer:
                    parts = rows[kv, at if layer is None else 0, :count].split(at_once)
                    for which, part in zip(index, parts, strict=True):
                        if way is TransferDirection.D2H:
                            torch.index_select(table, 0, which, out=part)
                        else:
                            table.index_copy_(0, which, part)
        return True

    @cached_property
    def _tables(self) -> list[tuple[int, int, torch.Tensor]]:
        """Layer, plane of an object, and the plane's slots as rows of wide elements; none where that cannot be."""
        import torch

        size, extent = self._itemsize, self.num_slots * self.width
        dense = self._slots_touch and self._blocks_touch
        wide = all(m.storage_offset() * size % _WIDE == 0 and len(m) == extent for *_, m in self._memories)
        if not dense or not wide or self.width * size % _WIDE:
            return []
        return [
            (at, kv, memory.view(torch.complex128).view(self.num_slots, -1))
            for at, kv, memory in self._memories
        ]

    def _serves(self, obj: torch.Tensor, slots: Slots) -> bool:
        return (
            self._is_one_run
            and obj.shape[3] == self.width
            and obj.stride(3) == 1
            and obj.element_size() == self._itemsize
            and obj.shape[2] >= len(slots.tensor)
            and obj.device.type == slots.tensor.device.type == "cpu"
        )
