"""Small facts about a vLLM model that vLLM's own connector module asks for."""

from __future__ import annotations

from typing import Any


def mla_enabled(model_config: Any) -> bool:
    """Whether the model caches one latent vector per token (multi-head latent attention) instead of K and V."""
    return bool(getattr(model_config, "use_mla", False))
