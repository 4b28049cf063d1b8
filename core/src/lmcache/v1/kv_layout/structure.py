"""All tensors of an engine's cache, nested as a row says: which belong to a layer, where they are, their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout.recover import is_tight_inside
from lmcache.v1.kv_layout.table import KVFormat, kv_format

__all__ = [
    "LayerShape",
    "block_stride_elems",
    "check_alike",
    "get_group_data_ptrs",
    "layer_shape",
    "layer_tensors",
]


def layer_tensors(kv_caches: Any, row: KVFormat) -> list[tuple[Any, ...]]:
    """The tensors of each layer: one, or K and V, or planes. A cross-layer tensor belongs to each of its layers.

    Args:
        kv_caches: Nested as the row's list levels say; a bare tensor may stand in a list of one.

    Raises:
        LayoutError: It is nested otherwise, or K and V are lists of different length.
    """
    if row.depth == 0:
        tensor = _bare(kv_caches, row)
        return [(tensor,)] * row.sizes(tuple(tensor.shape))["NL"]
    first = _entries(kv_caches, row, row.dims.levels[0])
    if row.is_kv_list:
        keys, values = (_entries(part, row, "NL") for part in first)
        if len(keys) != len(values):
            raise LayoutError(f"{row.label}: {len(keys)} K tensors and {len(values)} V tensors")
        return list(zip(keys, values, strict=True))
    if row.is_kv_second_tuple:
        return [tuple(_entries(layer, row, row.dims.levels[1])) for layer in first]
    return [(tensor,) for tensor in first]


def get_group_data_ptrs(
    kv_caches: Any, engine_kv_format: int | str | KVFormat, layer_indices: Sequence[int]
) -> list[int]:
    """Addresses of the tensors of some layers, in the order that kernels expect.

    One per layer; where K and V are two lists, K of all layers and then V of all layers; where a layer is
    several tensors, those of a layer side by side; one in all for a cross-layer tensor.

    Args:
        kv_caches: All layers of the engine, nested as the row says. Layers that are not asked for may have
            another format.
        engine_kv_format: The row of these layers.
        layer_indices: Which layers, in the order wanted.

    Raises:
        LayoutError: A layer that is not there, another nesting, or not all layers, in order, of a cross-layer
            tensor.
    """
    row = kv_format(engine_kv_format)
    if row.depth == 0:
        tensor = _bare(kv_caches, row)
        num_layers = row.sizes(tuple(tensor.shape))["NL"]
        if list(layer_indices) != list(range(num_layers)):
            raise LayoutError(
                f"{row.label}: layers {list(layer_indices)}: one tensor holds all {num_layers}, "
                "so they can only be taken together"
            )
        return [int(tensor.data_ptr())]
    if row.is_kv_list:
        layers = _pick(layer_tensors(kv_caches, row), layer_indices, row)
        return [int(layer[part].data_ptr()) for part in range(2) for layer in layers]
    picked = _pick(_entries(kv_caches, row, "NL"), layer_indices, row)
    return [int(tensor.data_ptr()) for layer in layer_tensors(picked, row) for tensor in layer]


def block_stride_elems(row: KVFormat, tensor: Any) -> int:
    """Elements from one block to the next; 0 where the row has no say in it and blocks are tight.

    Raises:
        LayoutError: The shape does not fit, there are gaps inside the outermost axis, or the outermost axis
            is padded in a row whose blocks cannot be (``KVFormat.takes_block_stride``).
    """
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    row.sizes(shape)
    if not is_tight_inside(shape, strides):
        raise LayoutError(f"{row.label}: gaps inside a page (shape {shape}, strides {strides})")
    tight = prod(shape[1:])
    # The stride of an axis of size one says nothing.
    stride = tight if shape[0] == 1 else int(strides[0])
    if row.takes_block_stride:
        return stride
    if stride != tight:
        raise LayoutError(
            f"{row.label}: its outermost axis is padded ({stride} elements apart, {tight} long): expected "
            "tight tensors; only rows whose blocks are one piece per layer may be padded"
        )
    return 0


class LayerShape(NamedTuple):
    """Sizes of one layer. All layers of equal sizes, format and dtype can go through one call of an op."""

    num_blocks: int
    block_size: int
    """Token slots per block."""
    num_heads: int
    """1 for MLA."""
    head_size: int
    """Elements per head and slot: the packed width, or the planes' sum, in elements of the first plane."""
    element_size: int


def layer_shape(row: KVFormat, tensors: Sequence[Any]) -> LayerShape:
    """Sizes of a layer from its tensors, as ``layer_tensors`` gives them.

    Raises:
        LayoutError: A tensor does not fit, tensors do not fit each other, or the row has no blocks.
    """
    check_alike(row, tensors)
    sizes, itemsize = row.sizes(tuple(tensors[0].shape)), int(tensors[0].element_size())
    if "NB" not in sizes:
        raise LayoutError(f"{row.label} has no blocks: expected a row with a block axis")
    width = int(tensors[0].shape[-1]) * (2 if row.dims.axes[-2:] == ("2", "HS") else 1)
    if "NP" in row.dims.levels:
        width, rest = divmod(sum(int(t.shape[-1]) * int(t.element_size()) for t in tensors), itemsize)
        if rest:
            raise LayoutError(f"{row.label}: planes do not add up to whole elements of {itemsize} bytes")
    return LayerShape(
        num_blocks=sizes["NB"],
        block_size=sizes["BS"],
        num_heads=sizes.get("NH", 1),
        head_size=width,
        element_size=itemsize,
    )


def check_alike(row: KVFormat, tensors: Sequence[Any]) -> None:
    """Check that the tensors of a layer go together.

    Raises:
        LayoutError: K and V differ in shape or dtype, planes in blocks or slots per block, or any in device.
    """
    if len({str(getattr(tensor, "device", None)) for tensor in tensors}) > 1:
        raise LayoutError(f"{row.label}: the tensors of a layer lie on several devices: expected one")
    sizes = [row.sizes(tuple(tensor.shape)) for tensor in tensors]
    if "NP" in row.dims.levels:
        if len({(size["NB"], size["BS"]) for size in sizes}) > 1:
            raise LayoutError(f"{row.label}: planes of a layer differ in blocks or slots per block: {sizes}")
    elif len({(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors}) > 1:
        raise LayoutError(f"{row.label}: K and V of a layer differ in shape or dtype: {sizes}")


def _bare(kv_caches: Any, row: KVFormat) -> Any:
    if isinstance(kv_caches, (list, tuple)) and len(kv_caches) == 1:
        kv_caches = kv_caches[0]
    if not hasattr(kv_caches, "data_ptr"):
        raise LayoutError(f"{row.label}: expected one tensor of {row.dims}, got {type(kv_caches).__name__}")
    return kv_caches


def _entries(node: Any, row: KVFormat, level: str) -> list[Any]:
    if not isinstance(node, (list, tuple)):
        raise LayoutError(f"{row.label}: expected {row.dims}, got {type(node).__name__} for level {level}")
    if level == "2" and len(node) != 2:
        raise LayoutError(f"{row.label}: expected K and V, got {len(node)} entries")
    return list(node)


def _pick(layers: Sequence[Any], indices: Sequence[int], row: KVFormat) -> list[Any]:
    bad = [index for index in indices if not 0 <= index < len(layers)]
    if bad:
        raise LayoutError(f"{row.label}: layer {bad[0]}: expected 0 to {len(layers) - 1}")
    return [layers[index] for index in indices]
