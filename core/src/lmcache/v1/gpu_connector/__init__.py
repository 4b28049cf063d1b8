"""In-process connectors between paged KV and memory objects; see docs/connectors.md.

Names are resolved on first access, so that what needs none of them imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache.v1.gpu_connector.interface import GPUConnectorInterface
    from lmcache.v1.gpu_connector.routing import CreateGPUConnector

__all__ = ["CreateGPUConnector", "GPUConnectorInterface"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lmcache.v1.gpu_connector import interface, routing

    return getattr(routing if name == "CreateGPUConnector" else interface, name)
