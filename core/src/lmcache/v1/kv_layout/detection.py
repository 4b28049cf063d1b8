"""Which row of the table an engine's KV tensors are.

Each row says which engines hand it over; a tensor fits a row by nesting, rank, literal axes and, for a marked
row, element type. What the engine declares (``LayoutHints``) then decides among the rows that fit, and
contradiction is an error. Where nothing decides, nothing is guessed: ``AmbiguousLayoutError``. The one
default is NHD for tensors on an accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache.errors import LayoutError
from lmcache.utils import EngineType
from lmcache.v1.kv_layout.declared import declared_order
from lmcache.v1.kv_layout.engine_forms import as_axes, in_engine_form, is_tensor, leaves, rows_of, told
from lmcache.v1.kv_layout.hints import AmbiguousLayoutError, LayoutHints, check_hints
from lmcache.v1.kv_layout.ids import EngineKVFormat
from lmcache.v1.kv_layout.recover import in_memory_order
from lmcache.v1.kv_layout.structure import check_alike, layer_shape, layer_tensors
from lmcache.v1.kv_layout.table import KVFormat, kv_format

__all__ = ["normalize_and_discover_per_layer_formats", "normalize_kv_and_discover_format"]


def normalize_kv_and_discover_format(
    kv_caches: Any, engine_type: EngineType | str, layout_hints: LayoutHints | None = None
) -> tuple[Any, EngineKVFormat]:
    """Put the axes of an engine's KV tensors into the order of a row, without a copy, and say which row.

    Args:
        kv_caches: A tensor, or tensors nested in lists or tuples, as the engine holds them. All layers of one
            format.
        engine_type: Whose cache it is.
        layout_hints: What the engine declares.

    Returns:
        The same memory as views, nested in lists as the row says, and the row.

    Raises:
        AmbiguousLayoutError: More than one row fits and no hint decides.
        LayoutError: No row fits, hints contradict the tensors or each other, a hint is missing or unknown, a
            tensor has gaps, or nothing is known of this engine's caches.
    """
    engine, hints = _engine(engine_type), check_hints(layout_hints)
    return _detect(_recovered(kv_caches), engine, hints)


def normalize_and_discover_per_layer_formats(
    kv_caches: Any,
    layer_index_groups: Sequence[Sequence[int]],
    engine_type: EngineType | str,
    layout_hints: LayoutHints | None = None,
) -> tuple[list[Any], list[EngineKVFormat]]:
    """As :func:`normalize_kv_and_discover_format`, for layers that may differ in format.

    Layers are told apart by group, shape and dtype, and each kind is detected by itself. A layer in no group
    is left as it is and carries the format of the first layer that is in one, which says nothing about it.

    Args:
        kv_caches: As above.
        layer_index_groups: Layers of each of the engine's groups, such as ``engine_group_layer_indices``
            gives. Empty: all layers are one group.
        engine_type: Whose cache it is.
        layout_hints: What the engine declares, for all layers.

    Returns:
        The normalised structure as a list (a cross-layer tensor becomes a list of one), and the format of
        each layer.

    Raises:
        AmbiguousLayoutError: As above, or layers were found to be of either order of heads and slots.
        LayoutError: As above, or a layer that is not there or in two groups.
    """
    engine, hints = _engine(engine_type), check_hints(layout_hints)
    if not _is_list_of_layers(kv_caches, engine, hints):
        node, fmt = _detect(_recovered(kv_caches), engine, hints)
        num_layers = len(layer_tensors(node, kv_format(fmt)))
        _check_groups(layer_index_groups, num_layers)
        return (node if isinstance(node, list) else [node]), [fmt] * num_layers
    layers = list(kv_caches)
    groups = layer_index_groups or [range(len(layers))]
    _check_groups(groups, len(layers))
    formats: dict[int, EngineKVFormat] = {}
    for group in groups:
        kinds: dict[Any, list[int]] = {}
        for index in group:
            layers[index] = _recovered(layers[index])
            kinds.setdefault(_kind(layers[index]), []).append(index)
        for members in kinds.values():
            found, fmt = _detect([layers[index] for index in members], engine, hints)
            for index, layer in zip(members, found, strict=True):
                layers[index], formats[index] = layer, fmt
    if not formats:
        raise LayoutError("KV layer groups name no layer: expected at least one")
    _check_one_order(layers, formats, engine)
    borrowed = formats[min(formats)]
    return layers, [formats.get(index, borrowed) for index in range(len(layers))]


def _detect(node: Any, engine: EngineType, hints: dict[str, Any]) -> tuple[Any, EngineKVFormat]:
    """Find the row of a structure whose tensors are in memory order."""
    fitting = _declared(node, engine, hints) if "engine_kv_format" in hints else _known(node, engine, hints)
    row = _decided(fitting, hints, f"{engine.value} KV caches, {told(node)}")
    return fitting[row], EngineKVFormat(row.id)


# --- which rows fit ----------------------------------------------------------------------------------------


def _declared(node: Any, engine: EngineType, hints: dict[str, Any]) -> dict[KVFormat, Any]:
    """The declared row, with the structure in its form."""
    row = kv_format(hints["engine_kv_format"])
    found = _fitted(node, row)
    if found is None:
        found = _fitted(in_engine_form(node, engine, hints).node, row)
    if found is None:
        raise LayoutError(f"declared {row.label}: expected {row.dims}, got {told(node)}")
    return {row: found}


def _known(node: Any, engine: EngineType, hints: dict[str, Any]) -> dict[KVFormat, Any]:
    """The rows that this engine is known for and that fit, each with the structure in its form."""
    form = in_engine_form(node, engine, hints)
    rows = rows_of(engine)
    marked = [row for row in rows if row.mark]
    fitting = {}
    for row in filter(form.admits, rows):
        found = _fitted(form.node, row, [other for other in marked if other is not row])
        if found is not None:
            fitting[row] = found
    if not fitting:
        known = ", ".join(f"{row.dims} (id {row.id})" for row in rows)
        raise LayoutError(
            f"{engine.value} KV caches, {told(node)}: expected all layers to be one of {known}; "
            "the layout hint 'engine_kv_format' names another row"
        )
    return fitting


def _fitted(node: Any, row: KVFormat, marked: Sequence[KVFormat] = ()) -> Any | None:
    """``node`` with each tensor in the row's axes, or None if it is not such a structure.

    A tensor that bears the mark of another row is that row's.
    """

    def fit(part: Any, levels: Sequence[str]) -> Any | None:
        if not levels:
            taken = is_tensor(part) and any(as_axes(part, other) is not None for other in marked)
            return None if taken or not is_tensor(part) else as_axes(part, row)
        if not isinstance(part, list) or not part:
            return None
        children = [fit(child, levels[1:]) for child in part]
        return None if any(child is None for child in children) else children

    found = fit(node, row.dims.levels)
    if found is None:
        return None
    try:
        for tensors in layer_tensors(found, row):
            check_alike(row, tensors)
    except LayoutError:
        return None
    return found


# --- which of them it is -----------------------------------------------------------------------------------


def _decided(fitting: dict[KVFormat, Any], hints: dict[str, Any], what: str) -> KVFormat:
    """The row that declarations leave; on an accelerator NHD is taken for granted where none are made."""
    rows = list(fitting)
    if "kv_layout" in hints:
        rows = _of_order(rows, declared_order(hints["kv_layout"]).row.is_hnd)
        if not rows:
            listed = ", ".join(row.name for row in fitting)
            raise LayoutError(
                f"{what}: expected kv_layout={hints['kv_layout']!r} as declared, found {listed}"
            )
    counted = [row for row in rows if _agrees_on_counts(row, fitting[row], hints)]
    rows = counted or rows
    if counted and "kv_layout" not in hints and _on_accelerator(fitting[rows[0]]):
        rows = _of_order(rows, hnd=False) or rows
    if len(rows) > 1:
        settles = all(len(_of_order(rows, hnd)) == 1 for hnd in (True, False))
        raise AmbiguousLayoutError(what, rows, "kv_layout" if settles else "engine_kv_format")
    return rows[0]


def _of_order(rows: list[KVFormat], hnd: bool) -> list[KVFormat]:
    """The rows with heads outside slots, or within. The order chooses between rows that differ in nothing
    else; where it would rule one out in favour of a row of another kind, both remain."""
    agreeing = [row for row in rows if _agrees_on_order(row, hnd)]
    kinds = {(row.dims.levels, frozenset(row.dims.axes)) for row in agreeing}
    others = [row for row in rows if row not in agreeing]
    all_twins = all((row.dims.levels, frozenset(row.dims.axes)) in kinds for row in others)
    return agreeing if all_twins or not agreeing else rows


def _agrees_on_order(row: KVFormat, hnd: bool) -> bool:
    """Whether heads lie outside slots, or within, as declared. A row without heads, or one that shows where
    they are by a literal axis between heads and slots, agrees with either."""
    heads = row.dims.axis("NH")
    if heads is None:
        return True
    first, last = sorted((heads, row.token_axis))
    return row.is_hnd == hnd or any(symbol.isdigit() for symbol in row.dims.axes[first:last])


def _agrees_on_counts(row: KVFormat, node: Any, hints: dict[str, Any]) -> bool:
    """Whether every layer has the declared counts. They choose between rows that fit and refuse none, because
    layers of one model may differ. A kernel's blocks may be smaller than the engine's."""
    heads, slots, dim = (hints.get(key) for key in ("num_kv_heads", "tokens_per_block", "head_dim"))
    if not row.is_block_addressable or (heads, slots, dim) == (None, None, None):
        return True
    shapes = [layer_shape(row, tensors) for tensors in layer_tensors(node, row)]
    return all(
        (heads is None or row.is_mla or shape.num_heads == heads)
        and (slots is None or slots % shape.block_size == 0)
        and (dim is None or row.is_packed or shape.head_size == dim)
        for shape in shapes
    )


def _check_one_order(layers: list[Any], formats: dict[int, EngineKVFormat], engine: EngineType) -> None:
    """Refuse NHD beside HND, which counts may suggest for layers of other counts: an engine has one order."""
    rows = {kv_format(fmt): None for fmt in formats.values()}
    hnd, nhd = ([row for row in rows if not _agrees_on_order(row, order)] for order in (False, True))
    if hnd and nhd:
        what = f"{engine.value} KV caches, {told([layers[index] for index in formats])}"
        raise AmbiguousLayoutError(what, [*hnd, *nhd], "kv_layout")


def _on_accelerator(node: Any) -> bool:
    """Read off the tensors: another device than the one a process has chosen may hold them."""
    kinds = {getattr(getattr(tensor, "device", None), "type", "cpu") for tensor in leaves(node)}
    return "cpu" not in kinds


# --- structures --------------------------------------------------------------------------------------------


def _engine(engine_type: EngineType | str) -> EngineType:
    """The engine, if rows name it.

    Raises:
        LayoutError: Nothing is known of its caches.
    """
    known = [engine for engine in EngineType if rows_of(engine)]
    if engine_type not in known:
        raise LayoutError(
            f"engine_type={engine_type!r}: nothing is known of its KV caches; "
            f"known: {', '.join(engine.value for engine in known)}"
        )
    return EngineType(engine_type)


def _recovered(node: Any) -> Any:
    """Lists for tuples, and tensors in memory order."""
    if isinstance(node, (list, tuple)):
        return [_recovered(child) for child in node]
    if not is_tensor(node):
        raise LayoutError(f"KV caches: expected tensors in lists or tuples, got {type(node).__name__}")
    return in_memory_order(node)


def _is_list_of_layers(kv_caches: Any, engine: EngineType, hints: dict[str, Any]) -> bool:
    """Whether each entry is a layer: not a cross-layer tensor, and not K and V lists."""
    if "engine_kv_format" in hints and not kv_format(hints["engine_kv_format"]).is_layer_list:
        return False
    if not isinstance(kv_caches, (list, tuple)):
        return False
    rows = rows_of(engine)
    if any(row.is_kv_list for row in rows):
        return hints.get("kv_list_layout") != "k_v" and all(map(is_tensor, kv_caches))
    return any(row.is_layer_list for row in rows)


def _kind(layer: Any) -> Any:
    """What layers must share to be detected together."""
    return tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in leaves(layer)), is_tensor(layer)


def _check_groups(groups: Sequence[Sequence[int]], num_layers: int) -> None:
    """Refuse layers that are not there or that two groups claim."""
    seen: set[int] = set()
    for index in (index for group in groups for index in group):
        if not 0 <= index < num_layers:
            raise LayoutError(f"KV layer group names layer {index}: expected 0 to {num_layers - 1}")
        if index in seen:
            raise LayoutError(f"layer {index} is named twice: expected each layer in at most one KV group")
        seen.add(index)
