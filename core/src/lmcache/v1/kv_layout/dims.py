"""Dimension strings: ``NL x [NB, 2, BS, NH, HS]``.

Before the bracket stand the list levels a tensor is nested in, outermost first; in the bracket its axes, in
the order in which the tensor is indexed.

=====  =====================================================================
NL     layers
NB     blocks
BS     token slots per block
PBS    token slots of all blocks in one axis (``NB * BS``)
T      tokens in order, no blocks
NH     KV heads
HS     elements per head and slot
CS     packed content: K and V of one head and slot, side by side
NP     planes of one layer (list level only; widths may differ)
2, 1   literal sizes; 2 is K and V
=====  =====================================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lmcache.errors import LayoutError

__all__ = ["Dims"]

_LEVELS = frozenset(["NL", "NP", "2"])
_AXES = frozenset(["NL", "NB", "BS", "PBS", "T", "NH", "HS", "CS", "2", "1"])
_FORM = re.compile(r"(?P<levels>(?:\w+ x )*)\[(?P<axes>\w+(?:, \w+)*)\]")
_CONTRADICTIONS = (
    ("HS", "CS", "content is packed or it is not"),
    ("2", "CS", "packed content is K and V already"),
    ("2", "NP", "planes are neither K nor V"),
    ("NB", "PBS", "slots are counted in blocks or over all of them"),
    ("NB", "T", "tokens in blocks are BS"),
)
_SPELLED = {"2": "TWO", "1": "ONE", "PBS": "NBBS"}


@dataclass(frozen=True)
class Dims:
    """A parsed dimension string."""

    levels: tuple[str, ...]
    axes: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Dims:
        """Parse ``text``.

        Raises:
            LayoutError: Not a dimension string, an unknown symbol, a symbol that occurs twice (1 aside), no
                axis that holds tokens, or symbols that contradict each other.
        """
        match = _FORM.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise LayoutError(f"dims={text!r}: expected the form 'NL x [NB, 2, BS, NH, HS]'")
        levels = tuple(match["levels"].split(" x ")[:-1])
        axes = tuple(match["axes"].split(", "))
        unknown = [s for s in levels if s not in _LEVELS] + [s for s in axes if s not in _AXES]
        if unknown:
            raise LayoutError(f"dims={text!r}: unknown symbol {', '.join(unknown)}")
        symbols = [s for s in levels + axes if s != "1"]
        if len(set(symbols)) != len(symbols):
            raise LayoutError(f"dims={text!r}: a symbol occurs twice")
        if len({"BS", "PBS", "T"}.intersection(axes)) != 1:
            raise LayoutError(f"dims={text!r}: expected exactly one of BS, PBS, T")
        if axes[-1] not in ("HS", "CS"):
            raise LayoutError(f"dims={text!r}: expected HS or CS as the last axis")
        for one, other, why in _CONTRADICTIONS:
            if one in symbols and other in symbols:
                raise LayoutError(f"dims={text!r}: {one} with {other}: {why}")
        if "NP" in levels and "NL" not in levels:
            raise LayoutError(
                f"dims={text!r}: NP without NL: planes are of a layer, expected a list of layers"
            )
        return cls(levels, axes)

    def axis(self, symbol: str) -> int | None:
        """Position of an axis in the tensor, or None."""
        return self.axes.index(symbol) if symbol in self.axes else None

    @property
    def name(self) -> str:
        """The name by convention: ``_X_`` between list levels, ``_`` between axes."""
        spelled = [_SPELLED.get(s, s) for s in self.axes]
        return "_X_".join([*(_SPELLED.get(s, s) for s in self.levels), "_".join(spelled)])

    def __str__(self) -> str:
        return "".join(f"{level} x " for level in self.levels) + "[" + ", ".join(self.axes) + "]"
