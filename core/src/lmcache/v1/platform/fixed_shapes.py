"""Blocks between a device's pages and host memory in a fixed number of shapes.

For devices that compile a graph per shape: a request of any length is cut into batches of a few sizes, and a short
batch is filled up by naming its last block again. Between device and host lies a stage, whose rows native code
spreads over their places. A vendor's wheel brings that code, its sizes and what ends a graph on its device.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from lmcache.errors import ConfigError, bad_value
from lmcache.logging import init_logger

if TYPE_CHECKING:
    import torch

__all__ = ["DEFAULT_SIZES", "FixedShapeMover", "HostStage", "Plane", "batches", "indexable", "parse_sizes"]

logger = init_logger(__name__)

DEFAULT_SIZES = (8, 32, 128)
STAGE_BYTES = 64 << 20
_LOST: list[Any] = []
"""Stages that a device which failed may still write to."""
_MOST_SIZES, _MOST_DIGITS = 16, 5  # of blocks: a batch is a stage in host memory, and a list in Python


class HostStage(Protocol):
    """What native code does. Rows lie one after the other in the stage; a row is ``pieces`` pieces that lie
    ``stride`` bytes apart at its address, and one whose address is 0 is left alone."""

    def HostBuffer(self, nbytes: int, lock: bool = ...) -> Any:
        """Memory with the buffer protocol, ``address`` and ``nbytes``."""

    def gather(self, stage: int, addresses: Any, pieces: int, piece_bytes: int, stride: int) -> None:
        """Fill the stage from the addresses."""

    def scatter(self, stage: int, addresses: Any, pieces: int, piece_bytes: int, stride: int) -> None:
        """Write the addresses from the stage."""


@dataclass(frozen=True)
class Plane:
    """One block of ``pages[i]`` is one row in host memory, in the same order of elements.

    ``pages`` is on the device, with blocks along dimension 0 and any strides; ``hosts[i]`` is the address that
    belongs to the i-th block of the transfer.
    """

    pages: torch.Tensor
    hosts: Sequence[int]
    pieces: int
    piece_bytes: int
    stride: int

    @property
    def form(self) -> tuple[int, int, int]:
        return self.pieces, self.piece_bytes, self.stride


def parse_sizes(source: str, text: str) -> tuple[int, ...]:
    """Sizes of batches from a setting such as ``8,32,128``; nothing is the default.

    Raises:
        ConfigError: Not increasing positive integers of at most 5 digits, or more than 16.
    """
    if not text.strip():
        return DEFAULT_SIZES
    parts = [part.strip() for part in text.split(",")]
    sizes = tuple(int(p) for p in parts if p.isascii() and p.isdecimal() and len(p) <= _MOST_DIGITS)
    rises = all(one < other for one, other in zip((0, *sizes), sizes, strict=False))
    if len(sizes) != len(parts) or not rises or len(sizes) > _MOST_SIZES:
        expected = f"at most {_MOST_SIZES} rising numbers of blocks, such as 8,32,128"
        raise ConfigError(bad_value(source, text, expected))
    return sizes


def batches(count: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first, number, size) of each batch of ``count`` blocks: the largest sizes that are filled, then one that is not.

    At most ``sizes[0] - 1`` places stay unused.
    """
    first = 0
    while first < count:
        size = next((size for size in reversed(sizes) if size <= count - first), sizes[0])
        taken = min(size, count - first)
        yield first, taken, size
        first += taken


def padded(values: Sequence[int], size: int) -> list[int]:
    """The last value again until there are ``size``: writing the same block twice writes the same bytes."""
    return [*values, *[values[-1]] * (size - len(values))]


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """Of a type that indexed copies serve: 8-bit floats as plain bytes."""
    import torch

    if tensor.element_size() == 1 and tensor.is_floating_point():
        return tensor.view(torch.uint8)
    return tensor


def last_of_each(ids: Sequence[int]) -> list[int]:
    """Positions at which ids occur for the last time: where a block is written twice, the last one wins."""
    last = {block: at for at, block in enumerate(ids)}
    return sorted(last.values())


class FixedShapeMover:
    """Moves blocks through a stage in host memory; the bytes are in place on return.

    Args:
        native: Stages rows.
        sizes: Of batches, rising; with each, a graph is compiled once.
        end_step: Called after work was queued that is to run now: ends a graph where one is being gathered.
        synchronize: Waits for a device.
        stage_bytes: Size of the stage, which grows where the smallest batch of one plane needs more.
    """

    def __init__(
        self,
        native: HostStage,
        sizes: Sequence[int],
        end_step: Callable[[], object],
        synchronize: Callable[[Any], object],
        stage_bytes: int = STAGE_BYTES,
    ) -> None:
        self._native = native
        self.sizes = tuple(sizes)
        self.end_step, self._synchronize = end_step, synchronize
        self._stage_bytes = stage_bytes
        self._buffer: Any = None
        self._stage: Any = None
        self._lock = threading.Lock()

    def move_pages(
        self, pages: Sequence[Any], ids: Sequence[int], hosts: Sequence[Sequence[int]], to_host: bool
    ) -> None:
        """See ``DeviceSpec.page_mover``."""
        planes = [
            Plane(layer, places, 1, layer.shape[1] * layer.element_size(), 0)
            for layer, places in zip(pages, hosts, strict=True)
        ]
        self.move(planes, ids, to_host)

    def move(self, planes: Sequence[Plane], ids: Sequence[int], to_host: bool) -> None:
        """Copy the blocks ``ids`` of all planes to their places, or from there."""
        import torch

        if not ids or not planes:
            return
        kept = range(len(ids)) if to_host else last_of_each(ids)
        planes = sorted(planes, key=lambda plane: plane.form)  # the stage holds several that are alike
        with self._lock, torch.inference_mode():
            self.end_step()  # what was queued before is a graph of its own, or ours would be compiled anew behind it
            try:
                for form, alike in groupby(planes, key=lambda plane: plane.form):
                    self._move_alike(list(alike), form, ids, kept, to_host)
            except BaseException:
                self._give_up(planes[0].pages.device)
                raise

    def _give_up(self, device: Any) -> None:
        """What was queued of a failed move may still use the stage: wait for it, or never use that memory again."""
        try:
            self._synchronize(device)
        except Exception as exc:
            logger.warning("%s: a move failed, and so did the wait for its end: %s", device, exc)
            _LOST.append(self._buffer)
            self._buffer = self._stage = None

    def _move_alike(
        self,
        planes: list[Plane],
        form: tuple[int, int, int],
        ids: Sequence[int],
        kept: Sequence[int],
        to_host: bool,
    ) -> None:
        import torch

        row = form[0] * form[1]
        sizes = [size for size in self.sizes if size * row <= self._stage_bytes] or [self.sizes[0]]
        self._reserve(sizes[0] * row)
        device = planes[0].pages.device
        for first, count, size in batches(len(kept), sizes):
            taken = kept[first : first + count]
            index = torch.tensor(padded([ids[at] for at in taken], size)).to(device)
            at_once = max(1, self._stage_bytes // (size * row))
            for start in range(0, len(planes), at_once):
                self._round(planes[start : start + at_once], form, index, taken, to_host)

    def _round(
        self, planes: list[Plane], form: tuple[int, int, int], index: Any, taken: Sequence[int], to_host: bool
    ) -> None:
        """As many planes as the stage holds: one wait, and one call of native code."""
        size, row = len(index), form[0] * form[1]
        places = array("Q")
        for plane in planes:
            hosts = [plane.hosts[at] for at in taken]
            places.extend([*hosts, *[0] * (size - len(hosts))] if to_host else padded(hosts, size))
        staged = [self._part(plane, at * size * row, size) for at, plane in enumerate(planes)]
        address = self._buffer.address
        # All of a kind together: what a device gathers into one graph is not cut by a copy in between.
        if to_host:
            chosen = [indexable(plane.pages).index_select(0, index) for plane in planes]
            self.end_step()
            for rows, part in zip(chosen, staged, strict=True):
                part.copy_(rows, non_blocking=True)
            self._synchronize(index.device)
            self._native.scatter(address, places, *form)
        else:
            self._native.gather(address, places, *form)
            loaded = [part.to(index.device, non_blocking=True) for part in staged]
            for plane, rows in zip(planes, loaded, strict=True):
                indexable(plane.pages).index_copy_(0, index, rows)
            self.end_step()
            self._synchronize(index.device)  # the stage is filled anew after this

    def _part(self, plane: Plane, start: int, size: int) -> torch.Tensor:
        """The plane's rows in the stage, as the device has them."""
        pages = indexable(plane.pages)
        nbytes = size * plane.pieces * plane.piece_bytes
        part: torch.Tensor = self._stage[start : start + nbytes].view(pages.dtype)
        return part.view(size, *pages.shape[1:])

    def _reserve(self, smallest: int) -> None:
        import torch

        wanted = max(self._stage_bytes, smallest)
        if self._buffer is None or self._buffer.nbytes < wanted:
            self._buffer = self._stage = (
                None  # first: if there is no memory for more, the next move begins anew
            )
            self._buffer = self._native.HostBuffer(wanted)
            self._stage = torch.frombuffer(self._buffer, dtype=torch.uint8)
