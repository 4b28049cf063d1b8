"""Memory orders that an engine declares for its cache, such as ``LBHNC``.

The letters are layers, blocks, heads, slots and content, outermost first. An engine that declares an order
hands over, per layer, a view that is indexed ``[B, H, N, C]`` whatever the order is; only its strides tell.
The order says which row of the table such a view is once its axes stand in memory order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout.strided import PageGeometry, describe
from lmcache.v1.kv_layout.table import KVFormat, kv_format

__all__ = ["DECLARED_ORDERS", "DeclaredOrder", "declared_order", "describe_declared"]

_LETTERS = "LBHNC"


@dataclass(frozen=True)
class DeclaredOrder:
    """A declared memory order; everything follows from its letters."""

    letters: str

    @property
    def row(self) -> KVFormat:
        """The row of a layer's view: heads outside slots, or slots outside heads."""
        return kv_format(12 if self._hnd else 13)

    @property
    def row_permutation(self) -> tuple[int, int, int, int]:
        """Turns a ``[B, H, N, C]`` view into the row's axis order: ``tensor.permute(...)``."""
        return (0, 1, 2, 3) if self._hnd else (0, 2, 1, 3)

    @property
    def page_is_one_run(self) -> bool:
        """One layer of one block is contiguous: nothing but layers and blocks lies outside it."""
        return set(self.letters[:2]) == {"L", "B"}

    @property
    def is_block_major(self) -> bool:
        """All layers of a block lie together."""
        return self.letters[0] == "B"

    def strides(self, sizes: Sequence[int]) -> tuple[int, int, int, int, int]:
        """Element strides of a tight cache, indexed ``[L, B, H, N, C]``, with these five sizes."""
        if len(sizes) != 5:
            raise LayoutError(f"order {self.letters}: expected five sizes L, B, H, N, C, got {tuple(sizes)}")
        size = dict(zip(_LETTERS, sizes, strict=True))
        stride, running = {}, 1
        for letter in reversed(self.letters):
            stride[letter] = running
            running *= size[letter]
        return stride["L"], stride["B"], stride["H"], stride["N"], stride["C"]

    @property
    def _hnd(self) -> bool:
        return self.letters.index("H") < self.letters.index("N")


DECLARED_ORDERS = {
    letters: DeclaredOrder(letters) for letters in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
}
_ALIASES = {"HND": "LBHNC", "NHD": "LBNHC"}


def declared_order(name: str) -> DeclaredOrder:
    """The order an engine declared, by its letters or by the older names NHD and HND.

    Raises:
        LayoutError: Not a known order.
    """
    letters = _ALIASES.get(name, name) if isinstance(name, str) else ""
    if letters not in DECLARED_ORDERS:
        known = ", ".join([*DECLARED_ORDERS, *_ALIASES])
        raise LayoutError(f"declared KV order {name!r} is unknown; known: {known}")
    return DECLARED_ORDERS[letters]


def describe_declared(
    order: str | DeclaredOrder,
    tensor: Any,
    *,
    mla: bool = False,
    opaque: bool = False,
) -> PageGeometry:
    """Find the pages of one layer's cache as an engine hands it over.

    Args:
        order: The order the engine declares.
        tensor: ``[NB, NH, BS, CS]`` with the strides of that order, or, for MLA, ``[NB, BS, HS]`` or
            ``[NB, 1, BS, HS]``. Anything with ``shape``, ``stride()`` and ``element_size()``.
        mla: The layer caches one latent per slot.
        opaque: What is inside a page is the engine's own business.

    Raises:
        LayoutError: The order or the rank is unknown, or a page is not one contiguous run.
    """
    known = order if isinstance(order, DeclaredOrder) else declared_order(order)
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if mla:
        row = kv_format(3)
        if len(shape) == 4 and shape[1] == 1:
            shape, strides = (shape[0], *shape[2:]), (strides[0], *strides[2:])
    else:
        row = known.row
        if len(shape) == 4:
            shape = tuple(shape[at] for at in known.row_permutation)
            strides = tuple(strides[at] for at in known.row_permutation)
    return describe(row, shape, strides, tensor.element_size(), opaque=opaque)
