"""Small names that engines and plugins import from the top of the package."""

from __future__ import annotations

from enum import Enum

from lmcache.logging import init_logger

__all__ = ["EngineType", "init_logger"]


class EngineType(str, Enum):
    """The serving engine that owns the paged KV cache."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"
    ATOM = "atom"
    TRANSFORMERS = "transformers"
    MOCK = "mock"
