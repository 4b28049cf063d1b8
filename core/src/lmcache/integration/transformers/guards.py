"""When a model's KV may be loaded and saved, and which calls of ``generate`` can be served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache.errors import ConfigError
from lmcache.integration.transformers import identity
from lmcache.logging import init_logger, warn_once

__all__ = ["ModelWatch", "check_generate"]

logger = init_logger(__name__)


class ModelWatch:
    """Notices that a model is not what its identity says.

    Args:
        model: The model.
        weights: Whether its weights count: they do unless the caller vouches for them.
        remedy: What its user does when they changed.
    """

    def __init__(self, model: Any, weights: bool, remedy: str) -> None:
        self._model, self._weights, self._remedy = model, weights, remedy
        self._state = identity.weights_state(model) if weights else ()

    def ok(self) -> bool:
        """Whether its KV may be loaded and saved now; why not is logged once."""
        name = type(self._model).__name__
        if self._model.training:
            warn_once(logger, "training", "%s is in training mode: runs uncached", name)
            return False
        if self._weights and identity.weights_state(self._model) != self._state:
            warn_once(
                logger,
                f"weights:{id(self)}",
                "the weights of %s changed: runs uncached; %s",
                name,
                self._remedy,
            )
            return False
        return True


def check_generate(model: Any, options: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: The options of ``generate`` ask for several sequences or beams, other input than tokens at
            positions from 0 on, or a mask that hides tokens.
    """
    for name in ("num_beams", "num_return_sequences"):
        value = options.get(name) or getattr(model.generation_config, name, None) or 1
        if value != 1:
            raise ConfigError(f"{name}={value}: expected 1 with the prefix cache; call model.generate itself")
    for name in ("inputs_embeds", "position_ids"):
        if options.get(name) is not None:
            raise ConfigError(
                f"{name}: expected tokens at positions from 0 on with the prefix cache; drop it"
            )
    mask = options.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise ConfigError(
            "attention_mask hides tokens: expected none hidden with the prefix cache; drop the padding"
        )
