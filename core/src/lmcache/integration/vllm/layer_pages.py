"""The pages of a group's layers, whose caches are a tensor each, or several: K and V, or the planes of a latent.

Each tensor is page memory of its own, in the order of layers and, within a layer, of its tensors. So a layer of two
tensors has two pages per block, and its name stands twice. What is in a page is the engine's own business; of several
tensors nothing else says in which order their axes lie, so they must lie as their row says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import PagedLayout, PageGeometry, describe, describe_declared, kv_format
from lmcache.v1.kv_layout.recover import is_tight_inside

__all__ = ["GroupLayout", "PageTensors", "page_tensors"]

_PAIR = kv_format("NL_X_TWO_X_NB_BS_NH_HS")
_LATENTS = kv_format("NL_X_NP_X_NB_BS_ONE_HS")
_LATENT = kv_format("NL_X_NB_BS_HS")


class GroupLayout(NamedTuple):
    """What an engine says of the layers of a group."""

    order: str
    """The memory order that it declares for layers of one tensor."""
    block_size: int
    num_blocks: int
    mla: bool


class PageTensors(NamedTuple):
    """The tensors of a group's layers, one after the other, each with its pages and its layer's name."""

    tensors: list[Any]
    pages: list[PageGeometry]
    names: tuple[str, ...]
    planes: int
    """Tensors per layer."""
    order: str

    def layout(self, packing: str) -> PagedLayout:
        """
        Raises:
            LayoutError: Layers differ.
        """
        return PagedLayout.of(self.pages, self.tensors[0].dtype, packing, self.planes)


def page_tensors(caches: Mapping[str, Any], names: Sequence[str], group: GroupLayout) -> PageTensors:
    """Where the pages of the layers ``names`` lie.

    Args:
        caches: By layer: a tensor, or a tuple or list of them, in which places at the end may be empty. K and V are
            ``[blocks, slots, heads, size]`` or ``[slots of all blocks, heads, size]``, planes of a latent are without
            heads or have one. Blocks at the end may be spare.

    Raises:
        LayoutError: One line that names the layer and what is wrong with it.
    """
    several = {name: _planes(name, caches.get(name)) for name in names}
    counts = {name: len(planes or ()) for name, planes in several.items()}
    odd = next((name for name in names if counts[name] != counts[names[0]]), None)
    if odd is not None:
        raise LayoutError(
            f"KV cache of layer {odd}: {_told(counts[odd])}, and of layer {names[0]} of its group"
            f" {_told(counts[names[0]])}: expected alike"
        )
    if not counts[names[0]]:
        tensors = [caches[name] for name in names]
        pages = [_page_of_one(tensor, group) for tensor in tensors]
        return PageTensors(tensors, pages, tuple(names), 1, group.order)
    found = [(name, tensor) for name in names for tensor in several[name] or ()]
    _check_alike(found)
    pages = [page for name in names for page in _pages_of_several(name, several[name] or [], group)]
    return PageTensors(
        [tensor for _, tensor in found], pages, tuple(name for name, _ in found), counts[names[0]], "planes"
    )


def _told(count: int) -> str:
    return f"{count} tensor{'s' * (count != 1)} in a tuple" if count else "a tensor"


def _is_tensor(part: Any) -> bool:
    return not isinstance(part, (list, tuple)) and hasattr(part, "data_ptr") and hasattr(part, "stride")


def _planes(name: str, cache: Any) -> list[Any] | None:
    """The tensors of a layer that has a tuple of them; None for a layer that is a tensor."""
    if _is_tensor(cache):
        return None
    if not isinstance(cache, (list, tuple)):
        raise LayoutError(
            f"KV cache of layer {name}: got {type(cache).__name__}: expected a tensor, or K and V as a tuple"
        )
    planes = list(cache)
    while planes and planes[-1] is None:  # a place for scales, which there are none of
        planes.pop()
    if not planes:
        raise LayoutError(f"KV cache of layer {name}: an empty tuple: expected K and V")
    for at, plane in enumerate(planes):
        if not _is_tensor(plane):
            raise LayoutError(
                f"KV cache of layer {name}: entry {at} is {type(plane).__name__}: expected a tensor"
            )
    return planes


def _page_of_one(tensor: Any, group: GroupLayout) -> PageGeometry:
    page = describe_declared(group.order, tensor, mla=group.mla, opaque=True)
    # A kernel may use smaller blocks than the block manager: then one managed block is several of them.
    return page.grouped(page.num_blocks // group.num_blocks)


def _pages_of_several(name: str, planes: list[Any], group: GroupLayout) -> list[PageGeometry]:
    if not group.mla and len(planes) != 2:
        raise LayoutError(
            f"KV cache of layer {name}: {_told(len(planes))}: expected K and V; keep the cache in a type without scales"
        )
    if not group.mla and tuple(planes[0].shape) != tuple(planes[1].shape):
        raise LayoutError(
            f"KV cache of layer {name}: K is {tuple(planes[0].shape)} and V {tuple(planes[1].shape)}: expected"
            " one shape"
        )
    try:
        pages = [_page_of_plane(plane, len(planes), group) for plane in planes]
    except LayoutError as exc:
        raise LayoutError(f"KV cache of layer {name}: {exc}") from None
    for (one, page), (other, its) in combinations(zip(planes, pages, strict=True), 2):
        if _share_memory(one, page, other, its):
            raise LayoutError(
                f"KV cache of layer {name}: two of its tensors share memory: expected pages of their own"
            )
    return pages


def _check_alike(found: Sequence[tuple[str, Any]]) -> None:
    for what in ("dtype", "device"):
        first = getattr(found[0][1], what)
        for name, tensor in found:
            if (other := getattr(tensor, what)) != first:
                raise LayoutError(
                    f"KV cache of layer {name}: {what} {other}, and {first} before it: expected one {what}"
                )


def _page_of_plane(plane: Any, count: int, group: GroupLayout) -> PageGeometry:
    row = _PAIR if not group.mla else _LATENTS if count > 1 else _LATENT
    shape, strides = _in_blocks(tuple(plane.shape), tuple(plane.stride()), group)
    if row is _LATENT and len(shape) == 4:
        shape, strides = (*shape[:2], shape[3]), (*strides[:2], strides[3])
    page = describe(row, shape, strides, plane.element_size(), opaque=True)
    if not is_tight_inside(shape, strides):
        raise LayoutError(f"strides {strides} of {shape}: expected axes that lie as they are listed")
    ratio, rest = divmod(group.block_size, page.block_size)
    if rest or page.num_blocks < ratio * group.num_blocks:
        raise LayoutError(
            f"{page.num_blocks} blocks of {page.block_size} slots: expected at least {group.num_blocks} of"
            f" {group.block_size}"
        )
    return page.grouped(ratio)


def _in_blocks(
    shape: tuple[int, ...], strides: tuple[int, ...], group: GroupLayout
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of ``[blocks, slots, heads, size]``."""
    latent = group.mla and (len(shape) == 2 or (len(shape) == 3 and shape[1] != 1))
    if latent:  # no axis of heads
        shape, strides = (*shape[:-1], 1, shape[-1]), (*strides[:-1], strides[-2], strides[-1])
    if len(shape) == 3:  # slots of all blocks in one axis
        blocks, rest = divmod(shape[0], group.block_size)
        if rest:
            raise LayoutError(f"{shape[0]} slots: expected whole blocks of {group.block_size}")
        shape = (blocks, group.block_size, *shape[1:])
        strides = (strides[0] * group.block_size, *strides)
    if len(shape) != 4 or (group.mla and shape[2] != 1):
        expected = "blocks, slots, size" if group.mla else "blocks, slots, heads, size"
        raise LayoutError(f"a tensor of shape {shape}: expected [{expected}]")
    return shape, strides


def _share_memory(one: Any, page: PageGeometry, other: Any, its: PageGeometry) -> bool:
    """Whether pages of two tensors overlap, as far as torch tells: views of one storage.

    Pages equally far apart overlap if any two of them do, others are taken to if their extents do.
    """
    if one is other:
        return True
    storage = _storage(one)
    if storage is None or storage != _storage(other):
        return False
    size = int(one.element_size())
    (start, first), (later, second) = sorted(
        [(int(one.storage_offset()) * size, page), (int(other.storage_offset()) * size, its)],
        key=lambda side: side[0],
    )
    end = start + (first.num_blocks - 1) * first.page_stride_bytes + first.page_bytes
    if later >= end:
        return False
    if first.page_stride_bytes != second.page_stride_bytes:
        return True
    into = (later - start) % first.page_stride_bytes
    return into < first.page_bytes or into + second.page_bytes > first.page_stride_bytes


def _storage(tensor: Any) -> Any:
    """What tells one storage from another; None for tensors of a device that gather operations and have none yet."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
