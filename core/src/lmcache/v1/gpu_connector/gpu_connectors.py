"""The connectors, by the path that engines and device wheels import."""

from __future__ import annotations

from lmcache.v1.gpu_connector.blend import VLLMBufferLayerwiseGPUConnector
from lmcache.v1.gpu_connector.grouped import VLLMPagedMemGPUConnectorV3
from lmcache.v1.gpu_connector.interface import GPUConnectorInterface
from lmcache.v1.gpu_connector.layerwise import SGLangLayerwiseGPUConnector, VLLMPagedMemLayerwiseGPUConnector
from lmcache.v1.gpu_connector.opaque import VLLMOpaquePagesConnector
from lmcache.v1.gpu_connector.whole import SGLangGPUConnector, VLLMPagedMemGPUConnectorV2

__all__ = [
    "GPUConnectorInterface",
    "SGLangGPUConnector",
    "SGLangLayerwiseGPUConnector",
    "VLLMBufferLayerwiseGPUConnector",
    "VLLMOpaquePagesConnector",
    "VLLMPagedMemGPUConnectorV2",
    "VLLMPagedMemGPUConnectorV3",
    "VLLMPagedMemLayerwiseGPUConnector",
]
