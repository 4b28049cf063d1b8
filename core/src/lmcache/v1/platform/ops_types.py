"""Types that device ops take. Plain integers throughout, so a native kernel can read them."""

from __future__ import annotations

from enum import IntEnum

from lmcache.v1.kv_layout import EngineKVFormat
from lmcache.v1.kv_layout.shape_desc import PageBufferShapeDesc
from lmcache.v1.platform.transfer_plan import (
    BatchStep,
    CBGroupSpec,
    DirectCopyGroupSpec,
    DirectCopyObject,
    KernelGroupSpec,
    LaunchVar,
    StagingCopy,
    TransferPhase,
)

__all__ = [
    "BatchStep",
    "CBGroupSpec",
    "DirectCopyGroupSpec",
    "DirectCopyObject",
    "EngineKVFormat",
    "GPUKVFormat",
    "KernelGroupSpec",
    "LaunchVar",
    "PageBufferShapeDesc",
    "StagingCopy",
    "TransferDirection",
    "TransferPhase",
]


class TransferDirection(IntEnum):
    """Which way a transfer goes. H2D writes the engine's pages, D2H reads them."""

    H2D = 0
    D2H = 1


#: The older name of the same enumeration.
GPUKVFormat = EngineKVFormat
