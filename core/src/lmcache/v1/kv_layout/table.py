"""The table of KV layouts: one row each. Everything but id, name and dimension string is derived.

Ids below 100 are the numbers that engines' and vendors' native code already use. Ids from 100 on are the
core's own; plugins register theirs from 1000 on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout.dims import Dims

__all__ = ["KVFormat", "kv_format", "kv_formats", "register_kv_format"]


@dataclass(frozen=True)
class KVFormat:
    """One layout. ``token_addressable`` is False where a page can only be taken whole."""

    id: int
    name: str
    dims_text: str
    token_addressable: bool = True
    note: str = ""
    engines: tuple[str, ...] = ()
    """Values of ``EngineType`` whose caches detection may take for this row without being told."""
    mark: tuple[str, int] | None = None
    """Element type and size of the last axis that tell a tensor of this row from others of its form."""

    @cached_property
    def dims(self) -> Dims:
        return Dims.parse(self.dims_text)

    # --- what the dimension string says --------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """List levels around a tensor."""
        return len(self.dims.levels)

    @property
    def rank(self) -> int:
        """Axes of a tensor."""
        return len(self.dims.axes)

    @cached_property
    def is_packed(self) -> bool:
        """K and V of one head and slot lie side by side: ``CS``, or 2 just before the last axis."""
        return self.dims.axes[-1] == "CS" or self.dims.axes[-2:] == ("2", "HS")

    @cached_property
    def kv_axis(self) -> int | None:
        """The axis of the tensor that tells K from V, if K and V are planes of one tensor."""
        return None if self.is_packed else self.dims.axis("2")

    @cached_property
    def kv_size(self) -> int:
        """Planes that K and V make of a chunk: 2, or 1 where packed, single or MLA."""
        return 2 if self.kv_axis is not None or "2" in self.dims.levels else 1

    @cached_property
    def is_mla(self) -> bool:
        """One latent per slot, shared by all heads."""
        return "NH" not in self.dims.axes

    @cached_property
    def is_hnd(self) -> bool:
        """Heads stand outside slots."""
        return not self.is_mla and self.dims.axes.index("NH") < self.token_axis

    @cached_property
    def token_axis(self) -> int:
        return next(i for i, s in enumerate(self.dims.axes) if s in ("BS", "PBS", "T"))

    @property
    def block_axis(self) -> int | None:
        return self.dims.axis("NB")

    @property
    def is_block_addressable(self) -> bool:
        """Blocks are an axis, so whole-block transfers apply."""
        return self.block_axis is not None

    @property
    def is_two_major(self) -> bool:
        """K and V are the outermost axis, so a block's page falls into two pieces."""
        return self.kv_axis == 0

    @property
    def is_cross_layer(self) -> bool:
        """One tensor holds all layers."""
        return "NL" in self.dims.axes

    @property
    def is_layer_list(self) -> bool:
        return self.dims.levels[:1] == ("NL",)

    @property
    def is_kv_list(self) -> bool:
        """A list of K tensors and a list of V tensors."""
        return self.dims.levels == ("2", "NL")

    @property
    def is_kv_second_tuple(self) -> bool:
        """Each layer is a tuple of tensors."""
        return self.is_layer_list and self.depth == 2

    @property
    def is_pbs_fused(self) -> bool:
        return "PBS" in self.dims.axes

    @property
    def is_single_kv(self) -> bool:
        """Each tensor is K alone or V alone, and nothing says which."""
        return self.kv_size == 1 and not self.is_mla and not self.is_packed

    @property
    def takes_block_stride(self) -> bool:
        """Blocks may lie further apart than a page is long, because a page is one piece per tensor: blocks
        are the outermost axis and nothing tells K from V. Kernels know one stride, that between blocks."""
        return (
            self.block_axis == 0 and not self.is_cross_layer and "2" not in self.dims.levels + self.dims.axes
        )

    # --- sizes ---------------------------------------------------------------------------------------------

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """Size of each axis symbol of a tensor of this row.

        Raises:
            LayoutError: The rank differs, or a literal axis has another size.
        """
        axes = self.dims.axes
        fits = len(shape) == len(axes) and all(
            size == int(symbol) for symbol, size in zip(axes, shape, strict=True) if symbol.isdigit()
        )
        if not fits:
            raise LayoutError(f"{self.label}: tensor shape {tuple(shape)} is not of the form {self.dims}")
        return {s: int(size) for s, size in zip(axes, shape, strict=True) if not s.isdigit()}

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of a tensor with these axis sizes; the inverse of :meth:`sizes`.

        Raises:
            LayoutError: A size is missing.
        """
        missing = [s for s in self.dims.axes if not s.isdigit() and s not in sizes]
        if missing:
            raise LayoutError(f"{self.label}: no size given for {', '.join(missing)}")
        return tuple(int(s) if s.isdigit() else sizes[s] for s in self.dims.axes)

    def strides(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Element strides of a tight tensor with these axis sizes."""
        shape = self.shape(sizes)
        return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))

    def page_bytes(self, block_size: int, num_heads: int, head_size: int, itemsize: int) -> int:
        """Bytes of one layer of one block, all planes. Of a chunk of ``block_size`` tokens where a row has
        no blocks. ``num_heads`` is 1 for MLA; ``head_size`` is the packed width where K and V are packed."""
        return self.kv_size * block_size * num_heads * head_size * itemsize

    @property
    def label(self) -> str:
        """For messages."""
        return f"KV format {self.name} (id {self.id})"


_VLLM, _SGLANG = ("vllm",), ("sglang",)

_ROWS = (
    KVFormat(0, "NB_NL_TWO_BS_NH_HS", "[NB, NL, 2, BS, NH, HS]", engines=_VLLM),
    KVFormat(1, "NL_X_TWO_NB_BS_NH_HS", "NL x [2, NB, BS, NH, HS]", engines=_VLLM),
    KVFormat(2, "NL_X_NB_TWO_BS_NH_HS", "NL x [NB, 2, BS, NH, HS]", engines=_VLLM),
    KVFormat(3, "NL_X_NB_BS_HS", "NL x [NB, BS, HS]", engines=("vllm", "sglang", "atom")),
    KVFormat(4, "TWO_X_NL_X_NBBS_NH_HS", "2 x NL x [PBS, NH, HS]", engines=_SGLANG),
    KVFormat(5, "NL_X_NBBS_ONE_HS", "NL x [PBS, 1, HS]", engines=_SGLANG),
    KVFormat(6, "NL_X_TWO_NB_NH_BS_HS", "NL x [2, NB, NH, BS, HS]", engines=_VLLM),
    KVFormat(7, "NL_X_NB_TWO_NH_BS_HS", "NL x [NB, 2, NH, BS, HS]", engines=_VLLM),
    KVFormat(8, "NB_NL_TWO_NH_BS_HS", "[NB, NL, 2, NH, BS, HS]", engines=("trtllm",)),
    KVFormat(9, "TWO_X_NL_X_NB_BS_NH_HS", "2 x NL x [NB, BS, NH, HS]", engines=_SGLANG),
    KVFormat(10, "NL_X_NB_NH_BS_TWO_HS", "NL x [NB, NH, BS, 2, HS]", note="declared no more; see 12"),
    KVFormat(11, "NL_X_NB_BS_NH_TWO_HS", "NL x [NB, BS, NH, 2, HS]", note="declared no more; see 13"),
    KVFormat(12, "NL_X_NB_NH_BS_CS", "NL x [NB, NH, BS, CS]", engines=_VLLM),
    KVFormat(13, "NL_X_NB_BS_NH_CS", "NL x [NB, BS, NH, CS]", engines=_VLLM),
    KVFormat(
        14,
        "NL_X_NB_BSV_BSS",
        "NL x [NB, BS, HS]",
        token_addressable=False,
        note="sparse-attention index: in a page the values of all slots precede the scales of all slots",
        engines=_VLLM,
        mark=("uint8", 132),  # 128 bytes of values and 4 of scale per slot
    ),
    KVFormat(15, "NL_X_TWO_NB_NH_ONE_BS_HS", "NL x [2, NB, NH, 1, BS, HS]", engines=_VLLM),
    KVFormat(16, "NL_X_TWO_X_NB_BS_NH_HS", "NL x 2 x [NB, BS, NH, HS]", engines=_VLLM),
    KVFormat(
        17,
        "NL_X_NP_X_NB_BS_ONE_HS",
        "NL x NP x [NB, BS, 1, HS]",
        note="planes differ in width",
        engines=_VLLM,
    ),
    KVFormat(18, "NL_X_NB_BS_NH_HS", "NL x [NB, BS, NH, HS]", engines=_SGLANG),
    KVFormat(
        100,
        "NL_X_TWO_X_ONE_NH_T_HS",
        "NL x 2 x [1, NH, T, HS]",
        note="contiguous cache of one sequence, grown per token (transformers DynamicCache)",
    ),
)

_PLUGIN_IDS = (1000, (1 << 31) - 1)  # native code takes an int

_lock = threading.Lock()
_by_id = {row.id: row for row in _ROWS}
_by_name = {row.name: row for row in _ROWS}


def kv_format(key: int | str | KVFormat) -> KVFormat:
    """The row with this id (any integer-like, so native enumerations too) or name.

    Raises:
        LayoutError: No such row.
    """
    if isinstance(key, KVFormat):
        return key
    if isinstance(key, str):
        row = _by_name.get(key)
    else:  # a fraction would be cut off, and name a row that nobody meant
        row = _by_id.get(int(key)) if hasattr(key, "__int__") and not isinstance(key, float) else None
    if row is None:
        known = ", ".join(f"{r.id} {r.name}" for r in kv_formats())
        raise LayoutError(f"KV format {key!r} is unknown; known: {known}")
    return row


def kv_formats() -> tuple[KVFormat, ...]:
    """All rows, in order of id."""
    return tuple(_by_id[i] for i in sorted(_by_id))


def register_kv_format(row: KVFormat) -> None:
    """Add a row of a plugin. Adding an equal row again is a no-op.

    Raises:
        LayoutError: Its dimension string is malformed, another row has its id or name, or a field is not what
            it must be: one bad row would be met by every later detection.
    """
    if not isinstance(row, KVFormat):
        raise LayoutError(f"KV format {row!r}: expected a KVFormat")
    _ = row.dims
    with _lock:
        for taken in (_by_id.get(row.id), _by_name.get(row.name)):
            if taken is not None and taken != row:
                raise LayoutError(f"{row.label}: id or name is taken by {taken.label}")
        _check_fields(row)
        _by_id[row.id] = row
        _by_name[row.name] = row


def _check_fields(row: KVFormat) -> None:
    """Refuse what tables, enumerations and native code could not hold."""
    if type(row.id) is not int or not _PLUGIN_IDS[0] <= row.id <= _PLUGIN_IDS[1]:
        raise LayoutError(
            f"{row.label}: expected an id from {_PLUGIN_IDS[0]} to {_PLUGIN_IDS[1]}, as lower ones are the core's"
        )
    if not isinstance(row.name, str) or not row.name.isidentifier():
        raise LayoutError(f"{row.label}: name={row.name!r}: expected one such as NL_X_NB_BS_HS")
    if not isinstance(row.engines, tuple) or not all(isinstance(engine, str) for engine in row.engines):
        raise LayoutError(f"{row.label}: engines={row.engines!r}: expected a tuple of engines' names")
    if row.mark is not None and [type(part) for part in row.mark] != [str, int]:
        raise LayoutError(f"{row.label}: mark={row.mark!r}: expected (name of an element type, last axis)")
