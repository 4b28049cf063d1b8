"""``EngineKVFormat``: the rows of the table as an enumeration, for code that speaks of layouts by constants."""

from __future__ import annotations

from enum import IntEnum
from typing import cast

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout.table import kv_format, kv_formats

__all__ = ["EngineKVFormat"]


class EngineKVFormat(IntEnum):
    """One member per row of the core, named as the row; members compare equal to the ids of native code.

    ``EngineKVFormat(id)`` also answers for a row that a plugin registered. Iteration and attributes know the
    core's rows only.
    """

    _ignore_ = "_row"
    for _row in kv_formats():
        vars()[_row.name] = _row.id

    @classmethod
    def _missing_(cls, value: object) -> EngineKVFormat:
        """A row that was registered later becomes a member when it is first asked for by its id.

        Raises:
            LayoutError: No such row; the message lists those that there are.
        """
        if not isinstance(value, int):
            raise LayoutError(f"KV format {value!r}: expected the integer id of a row")
        row = kv_format(value)
        member = int.__new__(cls, row.id)
        member._name_ = row.name
        member._value_ = row.id
        return cast("EngineKVFormat", cls._value2member_map_.setdefault(row.id, member))
