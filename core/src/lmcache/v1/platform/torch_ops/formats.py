"""Which KV formats an op of the baseline serves, asked where the op begins."""

from __future__ import annotations

from collections.abc import Callable

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import KVFormat, kv_format

__all__ = ["served_row"]


def served_row(op: str, engine_kv_format: int | str | KVFormat, rule: Callable[[KVFormat], str]) -> KVFormat:
    """The row of ``engine_kv_format``, which ``op`` serves by ``rule`` (the one given to ``serves``).

    Raises:
        LayoutError: No such row, or one that the op does not serve; it names both and says why.
    """
    row = kv_format(engine_kv_format)
    why = rule(row)
    if why:
        raise LayoutError(f"{op} does not serve {row.label}: {why}")
    return row
