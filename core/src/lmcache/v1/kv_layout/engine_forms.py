"""The forms in which engines hand their cache over where these are not a row's: pools, flat lists, fused slots.

All of it is a matter of views and of nesting; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lmcache.errors import LayoutError
from lmcache.utils import EngineType
from lmcache.v1.kv_layout.hints import AmbiguousLayoutError
from lmcache.v1.kv_layout.table import KVFormat, kv_formats

__all__ = ["EngineForm", "as_axes", "in_engine_form", "is_tensor", "leaves", "rows_of", "told"]


class EngineForm(NamedTuple):
    """A structure nested as rows are, and which of the engine's rows it may be."""

    node: Any
    admits: Callable[[KVFormat], bool] = lambda row: True


def rows_of(engine: EngineType) -> list[KVFormat]:
    """The rows that name this engine."""
    return [row for row in kv_formats() if engine.value in row.engines]


def in_engine_form(node: Any, engine: EngineType, hints: dict[str, Any]) -> EngineForm:
    """Undo what is peculiar to an engine.

    Args:
        node: Tensors in memory order, nested in lists.
        engine: Whose cache it is.
        hints: What it declares, checked.

    Raises:
        LayoutError: A hint that this engine's form needs is missing or does not fit.
    """
    peculiar = {EngineType.SGLANG: _sglang, EngineType.TRTLLM: _trtllm}
    return peculiar[engine](node, hints) if engine in peculiar else EngineForm(node)


def as_axes(tensor: Any, row: KVFormat) -> Any | None:
    """``tensor`` in the row's axes, or None if it does not fit.

    A tensor that bears the row's mark may have one axis of size one too many between blocks and content.
    """
    shape = tuple(tensor.shape)
    if row.mark is not None:
        if (str(tensor.dtype).rpartition(".")[2], shape[-1]) != row.mark:
            return None
        if len(shape) == row.rank + 1 and 1 in shape[1:-1]:
            tensor = tensor.squeeze(shape.index(1, 1))
    try:
        row.sizes(tuple(tensor.shape))
    except LayoutError:
        return None
    return tensor


def is_tensor(node: Any) -> bool:
    return hasattr(node, "data_ptr") and hasattr(node, "stride")


def leaves(node: Any) -> Iterator[Any]:
    """Whatever is not a list, in order."""
    if isinstance(node, (list, tuple)):
        for child in node:
            yield from leaves(child)
    else:
        yield node


def told(node: Any) -> str:
    """A structure in words, for messages."""
    kinds = sorted(
        {f"{tuple(t.shape)} {t.dtype}" if is_tensor(t) else type(t).__name__ for t in leaves(node)}
    )
    more = f" and {len(kinds) - 3} other kinds" if len(kinds) > 3 else ""
    levels, inner = "", node
    while isinstance(inner, (list, tuple)) and inner:
        levels += f"{len(inner)} x "
        inner = inner[0]
    return levels + " / ".join(kinds[:3]) + more if kinds else "an empty list"


# --- SGLang ------------------------------------------------------------------------------------------------


def _sglang(node: Any, hints: dict[str, Any]) -> EngineForm:
    """``[K list, V list]``, or a flat list that is K then V, or components, or MLA's fused slots."""
    flat = isinstance(node, list) and bool(node) and all(map(is_tensor, node))
    declared = hints.get("kv_list_layout")
    if not flat:
        if declared == "unified":
            raise LayoutError(f"kv_list_layout='unified': expected a flat list of tensors, got {told(node)}")
        return EngineForm(node)
    slots = hints.get("tokens_per_block")
    if declared == "k_v":
        if len(node) % 2:
            raise LayoutError(
                f"kv_list_layout='k_v': expected as many V as K tensors, got {len(node)} in all"
            )
        if slots is not None:
            node = [_in_blocks(tensor, slots) if len(tensor.shape) == 3 else tensor for tensor in node]
        half = len(node) // 2
        return EngineForm([node[:half], node[half:]])
    if declared == "unified":
        return EngineForm(node, lambda row: not row.is_pbs_fused)
    if all(len(tensor.shape) == 3 and tensor.shape[1] == 1 for tensor in node):
        if slots is None:
            return EngineForm(node, lambda row: row.is_pbs_fused)
        return EngineForm(
            [_in_blocks(tensor, slots).squeeze(2) for tensor in node], lambda row: row.depth == 1
        )
    rows = [
        row for row in rows_of(EngineType.SGLANG) if all(as_axes(tensor, row) is not None for tensor in node)
    ]
    if len(rows) > 1:
        raise AmbiguousLayoutError(f"sglang KV caches, {told(node)},", rows, "kv_list_layout")
    return EngineForm(node)


def _in_blocks(tensor: Any, slots: int) -> Any:
    """``[PBS, ...]`` as ``[NB, BS, ...]``."""
    fused = int(tensor.shape[0])
    if fused % slots:
        raise LayoutError(f"tokens_per_block={slots}: {fused} slots are not a whole number of blocks")
    if fused > 1 and tensor.stride()[0] != _run(tensor):
        raise LayoutError(f"slots of shape {tuple(tensor.shape)} are padded: expected them side by side")
    return tensor.view(fused // slots, slots, *tensor.shape[1:])


def _run(tensor: Any) -> int:
    run = 1
    for size in tensor.shape[1:]:
        run *= int(size)
    return run


# --- TensorRT-LLM ------------------------------------------------------------------------------------------


def _trtllm(node: Any, hints: dict[str, Any]) -> EngineForm:
    """A pool ``[NB, NL, 2, NH * BS * HS]``, bare or in a list of one."""
    if isinstance(node, list) and len(node) == 1:
        node = node[0]
    if not is_tensor(node) or len(node.shape) != 4:
        return EngineForm(node)
    needed = ("num_kv_heads", "tokens_per_block", "head_dim")
    missing = [key for key in needed if key not in hints]
    if missing:
        raise LayoutError(f"trtllm pool {tuple(node.shape)}: expected the layout hints {', '.join(missing)}")
    page = [hints[key] for key in needed]
    if page[0] * page[1] * page[2] != node.shape[3]:
        raise LayoutError(
            f"trtllm pool {tuple(node.shape)}: expected its last axis to hold num_kv_heads * tokens_per_block "
            f"* head_dim = {' * '.join(map(str, page))} elements"
        )
    return EngineForm(node.view(*node.shape[:3], *page))
