"""KV layouts as data: a table of rows, and an algebra over their dimension strings. Needs no torch.

* ``table``: the rows, their flags and sizes, and registration of more;
* ``strided``: canonical views and pages as plain integers;
* ``declared``: memory orders that engines declare, mapped onto rows;
* ``paged``: what a stored object knows about its pages.
"""

from __future__ import annotations

from lmcache.v1.kv_layout.declared import DECLARED_ORDERS, DeclaredOrder, declared_order, describe_declared
from lmcache.v1.kv_layout.dims import Dims
from lmcache.v1.kv_layout.paged import PLAIN, LayoutFingerprint, PagedLayout
from lmcache.v1.kv_layout.strided import (
    CanonicalView,
    PageGeometry,
    canonical_view,
    describe,
    describe_tensor,
)
from lmcache.v1.kv_layout.table import KVFormat, kv_format, kv_formats, register_kv_format

__all__ = [
    "DECLARED_ORDERS",
    "PLAIN",
    "CanonicalView",
    "DeclaredOrder",
    "Dims",
    "KVFormat",
    "LayoutFingerprint",
    "PageGeometry",
    "PagedLayout",
    "canonical_view",
    "declared_order",
    "describe",
    "describe_declared",
    "describe_tensor",
    "kv_format",
    "kv_formats",
    "register_kv_format",
]
