"""Slots between pages and objects that are both in host memory.

What can be known of the pages is worked out once, not with every call. Where a slot is one run of bytes, each run of
slots is one memcpy in the calling thread; what is in smaller pieces is chosen by index, row by row, and where such
pieces are evenly spaced over a long run of slots it is one strided copy. torch gets pieces that it copies in the
calling thread: its own threads wait for each other, which on a busy machine costs ten times what the bytes do.

Measured by one thread, as shares of one memcpy of all: rows of 256 bytes by index 0.6 out of the pages and 0.5 into
them, evenly spaced ones by strided copy 0.67, a loop in C over the same rows 0.6 to 0.8; docs/connectors.md has more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from lmcache.v1.gpu_connector.slots import Slots
from lmcache.v1.kv_layout import KVFormat
from lmcache.v1.platform.ops_types import TransferDirection
from lmcache.v1.platform.torch_ops._hostcopy import share
from lmcache.v1.platform.torch_ops._planes import Plane, planes_of
from lmcache.v1.platform.torch_ops._slot_grid import SlotGrid
from lmcache.v1.utils.memcpy import bytes_at, copy_freely, copy_slices, keeps_lock

if TYPE_CHECKING:
    import torch

__all__ = ["HostRuns"]

_SHORT_BYTES = 8192
"""Mean bytes of a memcpy below which a choice of rows is quicker, where it can be made."""
_LEAST_BYTES = 1024
"""Mean bytes of a memcpy below which the torch baseline is quicker, where rows cannot be chosen."""
_LONG_COPY = 1 << 20
"""Bytes of a memcpy for which the interpreter's lock is given back."""
_LONG_RUN = 128 << 10
"""Mean bytes of a run from which strided copies are quicker than a choice of rows."""
_WIDE = 16
"""Bytes of a complex128, the widest element that torch moves; it leaves the bits as they are."""
_LEAST_ROW = 64
"""Bytes of a row below which choosing rows is no use."""
_SERIAL = 32 << 10
"""Elements up to which torch copies in the calling thread."""

_Task: TypeAlias = Callable[[], None]
_Moves: TypeAlias = "list[tuple[torch.Tensor, list[torch.Tensor], Sequence[int | torch.Tensor]]]"
D2H = TransferDirection.D2H


class HostRuns:
    """The planes of some layers: K and V of each, or the one plane, or several side by side.

    Args:
        row: The layout.
        nested: The layers' tensors on the host, as the row says.
    """

    def __init__(self, row: KVFormat, nested: Any) -> None:
        planes = planes_of("HostRuns", row, nested)
        self._itemsize = planes[0].memory.element_size()
        alike: dict[tuple[SlotGrid, int], list[Plane]] = {}
        for plane in planes:
            alike.setdefault((plane.grid, plane.column), []).append(plane)
        self._groups = [_Alike(members) for members in alike.values()]
        self._num_layers = 1 + max(plane.layer for plane in planes)
        self._kv = 1 + max(plane.kv for plane in planes)
        self._width = max(plane.column + plane.grid.width for plane in planes)

    def move(self, obj: torch.Tensor, slots: Slots, way: TransferDirection, layer: int | None = None) -> bool:
        """Move the slots of all layers, or of one.

        Args:
            obj: ``[KV, L, T, D]`` on the host, of any strides; L is 1 if ``layer`` is given.
            slots: On the host, at most T.
            way: H2D writes pages.
            layer: Which one.

        Returns:
            Whether this was the way to do it; if not, nothing has moved.

        Raises:
            ValueError: A slot beyond the pages.
        """
        shape = (self._kv, self._num_layers if layer is None else 1, self._width)
        if (
            obj.device.type != "cpu"
            or slots.tensor.device.type != "cpu"
            or (obj.shape[0], obj.shape[1], obj.shape[3]) != shape
            or obj.stride(3) != 1
            or obj.element_size() != self._itemsize
            or obj.shape[2] < len(slots.values)
        ):
            return False
        moves: list[_Task] = []
        for group in self._groups:
            found = group.move(obj, slots, way, layer)
            if found is None:
                return False
            moves.append(found)
        for move in moves:
            move()
        return True


class _Alike:
    """Planes that differ only in where they are."""

    def __init__(self, planes: Sequence[Plane]) -> None:
        grid = planes[0].grid
        self._grid, self._column, self._planes = grid, planes[0].column, planes
        self._size = size = planes[0].memory.element_size()
        self._addresses = [plane.memory.data_ptr() for plane in planes]
        self._views = [bytes_at(plane.memory.data_ptr(), len(plane.memory) * size) for plane in planes]
        heads, apart = grid.inner[0] if len(grid.inner) == 1 else (1, grid.run)
        step = grid.slot_stride if grid.block_size > 1 else grid.block_stride or heads * apart
        self._is_one_run = not grid.inner
        self._slots_touch = step == grid.run
        self._blocks_touch = grid.num_slots == grid.block_size or grid.block_stride == grid.block_size * step
        self._is_even = (
            len(grid.inner) == 1 and step == heads * apart and self._blocks_touch and grid.unit == grid.run
        )
        self._apart = apart
        row, offsets = grid.unit * size, [plane.memory.storage_offset() * size for plane in planes]
        self._has_rows = row >= _LEAST_ROW and not any(
            part % _WIDE for part in (row, *offsets, self._column * size)
        )

    def move(
        self, obj: torch.Tensor, slots: Slots, way: TransferDirection, layer: int | None
    ) -> _Task | None:
        """What moves the slots; None if that is better left to torch's ops. Arguments as of :meth:`HostRuns.move`."""
        slots.check(self._grid.num_slots)
        width = self._grid.width * self._size
        runs: list[tuple[int, int, int]] = []
        mean = 0
        if self._is_one_run:
            touch = self._slots_touch and obj.stride(2) == self._grid.width
            runs = slots.runs(self._grid.block_size if not self._blocks_touch else 0, touch)
            if not runs:
                return _nothing
            mean = sum(count for *_, count in runs) * width // len(runs)
        if mean < _SHORT_BYTES and self._has_rows and slots.led is not None and _is_wide(obj):
            return self._by_row(obj, slots, slots.led, way, layer)
        return partial(self._copy, obj, runs, way, layer) if mean >= _LEAST_BYTES else None

    def _copy(
        self, obj: torch.Tensor, runs: list[tuple[int, int, int]], way: TransferDirection, layer: int | None
    ) -> None:
        """Runs by memcpy."""
        grid, size = self._grid, self._size
        plane_step, layer_step, per_token, _ = (stride * size for stride in obj.stride())
        block_size, block, step = grid.block_size, grid.block_stride * size, grid.slot_stride * size
        there = [slot // block_size * block + slot % block_size * step for _, slot, _ in runs]
        here = [token * per_token for token, _, _ in runs]
        sizes = [count * grid.width * size for *_, count in runs]
        planes = [
            (number, plane.kv * plane_step + (plane.layer * layer_step if layer is None else 0))
            for number, plane in enumerate(self._planes)
            if layer is None or plane.layer == layer
        ]
        begin, extent = obj.data_ptr() + self._column * size, here[-1] + sizes[-1]
        is_long, nbytes = max(sizes) >= _LONG_COPY, sum(sizes)
        tokens = [slice(at, at + length) for at, length in zip(here, sizes, strict=True)]
        slots = [slice(at, at + length) for at, length in zip(there, sizes, strict=True)]
        whole = bytes_at(begin, extent + max(at for _, at in planes))
        for number, at in planes:
            if is_long or not keeps_lock(nbytes):
                rows = [begin + at + offset for offset in here]
                pages = [self._addresses[number] + offset for offset in there]
                copy_freely(*((rows, pages) if way is D2H else (pages, rows)), sizes)
                continue
            mine, page = whole[at : at + extent], self._views[number]
            if way is D2H:
                copy_slices(mine, tokens, page, slots)
            else:
                copy_slices(page, slots, mine, tokens)

    def _by_row(
        self,
        obj: torch.Tensor,
        slots: Slots,
        led: tuple[int, torch.Tensor],
        way: TransferDirection,
        layer: int | None,
    ) -> _Task:
        """A task per layer that moves the slots as rows of tables, K and V one after the other: the second finds in
        the cache what came with the first."""
        import torch

        (first, valid), grid, wide = led, self._grid, _WIDE // self._size
        unit, per_slot = grid.unit // wide, grid.width // grid.unit
        rows = obj.view(torch.complex128).narrow(2, first, len(valid))
        rows = rows.narrow(3, self._column // wide, grid.width // wide).unflatten(3, (per_slot, unit))
        tight = per_slot == 1 or obj.stride(2) == grid.width
        per_token = per_slot if tight else 1
        if tight:
            rows = rows.view(*rows.shape[:2], -1, unit)
        at_once = max(1, _SERIAL // (per_slot * unit))
        runs = slots.runs(0, True) if self._is_even and tight else []
        which: list[Any]
        if runs and len(valid) * grid.width * self._size >= len(runs) * _LONG_RUN:
            tables, spans = self._lines, list(_pieces(runs, at_once))
            pieces = [
                rows.narrow(2, (token - first) * per_slot, count * per_slot) for token, _, count in spans
            ]
            which = [slot * per_slot for _, slot, _ in spans]
        else:
            tables = self._tables
            pieces = rows.split(at_once * per_token, 2)
            which = grid.rows(valid).split(at_once * per_slot)
        cut = [[plane.unbind(0) for plane in piece.unbind(0)] for piece in pieces]
        by_layer: dict[int, _Moves] = {}
        for plane, table in zip(self._planes, tables, strict=True):
            if layer is None or plane.layer == layer:
                at = plane.layer if layer is None else 0
                mine = [piece[plane.kv][at] for piece in cut]
                by_layer.setdefault(at, []).append((table, mine, which))
        tasks = [partial(_copy_rows, moves, way) for moves in by_layer.values()]
        return partial(share, tasks, len(self._planes) * len(valid) * grid.width * self._size)

    @cached_property
    def _tables(self) -> list[torch.Tensor]:
        """The planes as rows of wide elements, such that each slot is some rows."""
        import torch

        unit = self._grid.unit * self._size // _WIDE
        return [plane.memory.view(torch.complex128).view(-1, unit) for plane in self._planes]

    @cached_property
    def _lines(self) -> list[torch.Tensor]:
        """The planes as rows that are evenly spaced, in the order of slots."""
        every = self._apart // self._grid.unit
        return [table[::every] for table in self._tables]


def _nothing() -> None:
    """What moves no slots."""


def _is_wide(obj: torch.Tensor) -> bool:
    """Whether an object can be seen in wide elements."""
    size = obj.element_size()
    return not any(step * size % _WIDE for step in (obj.storage_offset(), obj.shape[3], *obj.stride()[:3]))


def _pieces(runs: Iterable[tuple[int, int, int]], at_once: int) -> Iterator[tuple[int, int, int]]:
    for token, slot, count in runs:
        for at in range(0, count, at_once):
            yield token + at, slot + at, min(at_once, count - at)


def _copy_rows(moves: _Moves, way: TransferDirection) -> None:
    """Between pieces of an object and rows of a table: those of an index, or all from a certain one on."""
    import torch

    for table, pieces, rows in moves:
        for mine, which in zip(pieces, rows, strict=True):
            if isinstance(which, int):
                there = table.narrow(0, which, mine.shape[0])
                into, out_of = (mine, there) if way is D2H else (there, mine)
                into.copy_(out_of)
            elif way is not D2H:
                table.index_copy_(0, which, mine.reshape(-1, table.shape[1]))
            elif mine.dim() == 2:
                torch.index_select(table, 0, which, out=mine)
            else:
                mine.copy_(table.index_select(0, which).view(mine.shape))
