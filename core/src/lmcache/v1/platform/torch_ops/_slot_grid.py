"""Where in a plane of paged KV a slot's elements are, as integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING

from lmcache.v1.kv_layout import CanonicalView

if TYPE_CHECKING:
    import torch

__all__ = ["SlotGrid"]


@dataclass(frozen=True)
class SlotGrid:
    """Where a slot's elements are, in elements from the first of its plane.

    Slot ``s`` starts at ``s // block_size * block_stride + s % block_size * slot_stride``. From there its
    elements are ``run`` adjacent ones at every point of ``inner``, axes of (size, stride), outermost first.
    """

    num_slots: int
    block_size: int
    block_stride: int
    slot_stride: int
    inner: tuple[tuple[int, int], ...]
    run: int

    @classmethod
    def of(cls, view: CanonicalView) -> SlotGrid:
        """The grid of each plane of a canonical view."""
        _, blocks, slots, heads, width = view.shape
        # The stride of an axis of size one says nothing, and 0 leaves a greatest common divisor alone.
        _, block, slot, head, one = (
            stride if size > 1 else 0 for size, stride in zip(view.shape, view.strides, strict=True)
        )
        inner: list[tuple[int, int]] = []
        run = 1
        for size, stride in ((width, one), (heads, head)):
            if size == 1 or (stride == run and not inner):
                run *= size
            else:
                inner.insert(0, (size, stride))
        return cls(blocks * slots, slots, block, slot, tuple(inner), run)

    @cached_property
    def width(self) -> int:
        """Elements of one slot."""
        elements = self.run
        for size, _ in self.inner:
            elements *= size
        return elements

    @cached_property
    def extent(self) -> int:
        """Elements from the first of the plane to its last."""
        blocks = self.num_slots // self.block_size
        reach = (blocks - 1) * self.block_stride + (self.block_size - 1) * self.slot_stride
        return reach + sum((size - 1) * stride for size, stride in self.inner) + self.run

    @cached_property
    def unit(self) -> int:
        """The longest row such that each slot is whole rows of the plane cut into rows of that length."""
        return gcd(self.run, self.block_stride, self.slot_stride, *(stride for _, stride in self.inner))

    @cached_property
    def is_dense(self) -> bool:
        """Slots follow each other without a gap, each a row of its own."""
        step = self.slot_stride or self.block_stride or self.run
        across = self.block_size * step if self.num_slots > self.block_size else self.block_stride
        return not self.inner and step == self.run and self.block_stride == across

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of ``unit`` elements that make up these slots: slot after slot, each in the object's order.

        Args:
            slots: int64 ``[n]``, all within the plane.

        Returns:
            int64 ``[n * width / unit]`` on the same device.
        """
        import torch

        block = slots // self.block_size
        rows = block * (self.block_stride // self.unit)
        rows += (slots - block * self.block_size) * (self.slot_stride // self.unit)
        for size, stride in (*self.inner, (self.run // self.unit, self.unit)):
            if size > 1:
                steps = torch.arange(
                    0, size * (stride // self.unit), stride // self.unit, device=slots.device
                )
                rows = (rows.unsqueeze(-1) + steps).flatten()
        return rows
