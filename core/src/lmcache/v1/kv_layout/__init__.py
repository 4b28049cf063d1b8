"""KV layouts as data: a table of rows, and an algebra over their dimension strings. Needs no torch.

* ``table``: the rows, their flags and sizes, and registration of more;
* ``strided``: canonical views and pages as plain integers;
* ``declared``: memory orders that engines declare, mapped onto rows;
* ``paged``: what a stored object knows about its pages;
* ``detection``, with ``hints`` and ``engine_forms``: which row an engine's tensors are;
* ``structure``: the tensors of each layer, their addresses and sizes;
* ``groups``: which layers go together;
* ``shape_desc``: geometry as device ops take it.
"""

from __future__ import annotations

from lmcache.v1.kv_layout.declared import DECLARED_ORDERS, DeclaredOrder, declared_order, describe_declared
from lmcache.v1.kv_layout.detection import (
    normalize_and_discover_per_layer_formats,
    normalize_kv_and_discover_format,
)
from lmcache.v1.kv_layout.dims import Dims
from lmcache.v1.kv_layout.hints import AmbiguousLayoutError, LayoutHints
from lmcache.v1.kv_layout.ids import EngineKVFormat
from lmcache.v1.kv_layout.paged import PLAIN, LayoutFingerprint, PagedLayout
from lmcache.v1.kv_layout.recover import in_memory_order
from lmcache.v1.kv_layout.shape_desc import PageBufferShapeDesc
from lmcache.v1.kv_layout.strided import (
    CanonicalView,
    PageGeometry,
    canonical_view,
    describe,
    describe_tensor,
)
from lmcache.v1.kv_layout.structure import (
    LayerShape,
    block_stride_elems,
    get_group_data_ptrs,
    layer_shape,
    layer_tensors,
)
from lmcache.v1.kv_layout.table import KVFormat, kv_format, kv_formats, register_kv_format

__all__ = [
    "DECLARED_ORDERS",
    "PLAIN",
    "AmbiguousLayoutError",
    "CanonicalView",
    "DeclaredOrder",
    "Dims",
    "EngineKVFormat",
    "KVFormat",
    "LayerShape",
    "LayoutFingerprint",
    "LayoutHints",
    "PageBufferShapeDesc",
    "PageGeometry",
    "PagedLayout",
    "block_stride_elems",
    "canonical_view",
    "declared_order",
    "describe",
    "describe_declared",
    "describe_tensor",
    "get_group_data_ptrs",
    "in_memory_order",
    "kv_format",
    "kv_formats",
    "layer_shape",
    "layer_tensors",
    "normalize_and_discover_per_layer_formats",
    "normalize_kv_and_discover_format",
    "register_kv_format",
]
