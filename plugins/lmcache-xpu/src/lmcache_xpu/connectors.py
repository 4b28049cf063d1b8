"""Connectors of engines that run LMCache in their process, by the names that they have for Intel GPUs.

They are the core's, on this wheel's ops: the kernel moves tokens on torch's queues, and reaches objects in USM where
they are. What one does its base class says.
"""

from __future__ import annotations

from typing import Any

from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.gpu_connectors import (
    SGLangGPUConnector,
    SGLangLayerwiseGPUConnector,
    VLLMBufferLayerwiseGPUConnector,
    VLLMPagedMemGPUConnectorV2,
    VLLMPagedMemGPUConnectorV3,
    VLLMPagedMemLayerwiseGPUConnector,
)

__all__ = [
    "CLASSES",
    "SGLangLayerwiseXPUConnector",
    "SGLangXPUConnector",
    "VLLMBufferLayerwiseXPUConnector",
    "VLLMPagedMemLayerwiseXPUConnector",
    "VLLMPagedMemXPUConnectorV2",
    "VLLMPagedMemXPUConnectorV3",
]


class VLLMPagedMemXPUConnectorV2(VLLMPagedMemGPUConnectorV2):
    """vLLM, all layers of a chunk at once."""


class VLLMPagedMemXPUConnectorV3(VLLMPagedMemGPUConnectorV3):
    """vLLM, layers that differ."""


class VLLMPagedMemLayerwiseXPUConnector(VLLMPagedMemLayerwiseGPUConnector):
    """vLLM, layer by layer."""


class VLLMBufferLayerwiseXPUConnector(VLLMBufferLayerwiseGPUConnector):
    """vLLM, layer by layer through a buffer that blending works on."""


class SGLangXPUConnector(SGLangGPUConnector):
    """SGLang, all layers of a chunk at once."""


class SGLangLayerwiseXPUConnector(SGLangLayerwiseGPUConnector):
    """SGLang, layer by layer."""


CLASSES: dict[tuple[EngineType, str], type[Any]] = {
    (EngineType.VLLM, "whole"): VLLMPagedMemXPUConnectorV2,
    (EngineType.VLLM, "v3"): VLLMPagedMemXPUConnectorV3,
    (EngineType.VLLM, "layerwise"): VLLMPagedMemLayerwiseXPUConnector,
    (EngineType.VLLM, "blending"): VLLMBufferLayerwiseXPUConnector,
    (EngineType.SGLANG, "whole"): SGLangXPUConnector,
    (EngineType.SGLANG, "layerwise"): SGLangLayerwiseXPUConnector,
}
"""By engine, and what the configuration asks for."""
