"""What an engine declares about its cache, and the refusal to guess where it declares too little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout.declared import declared_order
from lmcache.v1.kv_layout.table import KVFormat, kv_format

__all__ = ["AmbiguousLayoutError", "LayoutHints", "check_hints"]


class LayoutHints(TypedDict, total=False):
    """What an engine declares. What it declares wins over what tensors look like; all keys are optional."""

    engine_kv_format: int | str
    """The row of all layers, by id or name. Settles everything; tensors that do not fit are refused."""
    kv_layout: str
    """``NHD``, ``HND`` or a declared order such as ``BLHNC``: whether heads or slots are outside."""
    kv_list_layout: str
    """A flat list of SGLang: ``k_v`` (all K, then all V) or ``unified`` (one tensor per component)."""
    num_kv_heads: int
    """KV heads of this rank."""
    tokens_per_block: int
    """Token slots per block; the engine's own block if a kernel's blocks are smaller."""
    head_dim: int
    """Elements of K per head and slot."""


class AmbiguousLayoutError(LayoutError):
    """Tensors fit more than one row and nothing declared says which.

    ``rows`` are the rows that fit; ``hint`` is the key of :class:`LayoutHints` that settles it.
    """

    def __init__(self, what: str, rows: Sequence[KVFormat], hint: str) -> None:
        self.rows = tuple(rows)
        self.hint = hint
        listed = ", ".join(f"{row.name} (id {row.id})" for row in rows)
        super().__init__(f"{what} may be {listed}: expected the layout hint {hint!r} to say which")


_KV_LIST_LAYOUTS = ("k_v", "unified")
_COUNTS = ("num_kv_heads", "tokens_per_block", "head_dim")


def check_hints(hints: LayoutHints | None) -> dict[str, Any]:
    """The hints that are set, checked.

    Raises:
        LayoutError: An unknown key or value, or an order in which a layer's page is not one piece.
    """
    if not isinstance(hints or {}, Mapping):
        raise LayoutError(f"layout hints {hints!r}: expected a dict such as {{'kv_layout': 'NHD'}}")
    given: dict[str, Any] = {key: value for key, value in (hints or {}).items() if value is not None}
    unknown = given.keys() - LayoutHints.__annotations__.keys()
    if unknown:
        known = ", ".join(LayoutHints.__annotations__)
        raise LayoutError(f"layout hint {min(unknown, key=str)!r} is unknown; known: {known}")
    if "engine_kv_format" in given:
        kv_format(given["engine_kv_format"])
    if "kv_layout" in given:
        order = declared_order(given["kv_layout"])
        if not order.page_is_one_run:
            raise LayoutError(
                f"kv_layout={given['kv_layout']!r}: one layer of one block is not one piece of memory there; "
                "expected an order that begins with L and B, such as LBHNC"
            )
    if given.get("kv_list_layout", "k_v") not in _KV_LIST_LAYOUTS:
        raise LayoutError(f"kv_list_layout={given['kv_list_layout']!r}: expected one of {_KV_LIST_LAYOUTS}")
    for key in _COUNTS:
        if key in given and (type(given[key]) is not int or given[key] < 1):
            raise LayoutError(f"layout hint {key}={given[key]!r}: expected a positive integer")
    return given
