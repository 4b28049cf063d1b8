"""The transfer contexts of a worker, and the choice between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache.errors import LMCacheError
from lmcache.logging import info_once, init_logger
from lmcache.v1.multiprocess.transfer_context.base import (
    LoadItem,
    PagesUnsafe,
    StoreItem,
    TransferContext,
    TransferCounters,
)
from lmcache.v1.multiprocess.transfer_context.engine_driven import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transfer_context.lmcache_driven import LMCacheDrivenTransferContext
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages
from lmcache.v1.platform import get_device_spec
from lmcache.v1.platform.base.device_spec import MPTransferMode
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import Channel, expect

__all__ = [
    "EngineDrivenTransferContext",
    "LMCacheDrivenTransferContext",
    "LoadItem",
    "PagesUnsafe",
    "StoreItem",
    "TransferContext",
    "TransferCounters",
    "create_transfer_context",
]

logger = init_logger(__name__)

_PROBE_SECONDS = 2.0


def create_transfer_context(
    mode: MPTransferMode | str,
    address: str,
    engine: str,
    groups: Sequence[KVGroupPages],
    *args: Any,
    **kwargs: Any,
) -> TransferContext:
    """The transfer context for a mode; the other arguments are :class:`TransferContext`'s.

    AUTO asks the spec of the device that the pages lie on.

    Raises:
        ConfigError: for an unknown mode. ValueError: for a mode that cannot be delivered here; it lists what
            is missing.
    """
    chosen = mode if isinstance(mode, MPTransferMode) else MPTransferMode.parse(mode)
    if chosen is MPTransferMode.AUTO:
        chosen = _automatic(address, groups[0].device if groups else "cpu")
    if chosen is MPTransferMode.LMCACHE_DRIVEN:
        return LMCacheDrivenTransferContext(address, engine, groups, *args, **kwargs)
    return EngineDrivenTransferContext(address, engine, groups, *args, **kwargs)


def _automatic(address: str, device: str) -> MPTransferMode:
    """What the device's backend prefers, unless a server that answers now does not serve it."""
    spec = get_device_spec(device.partition(":")[0])
    chosen = MPTransferMode.ENGINE_DRIVEN if spec is None else spec.default_mp_transfer_mode()
    why = "no single backend serves it" if spec is None else f"backend {spec.backend_name} says so"
    if chosen is MPTransferMode.LMCACHE_DRIVEN:
        channel = Channel(address)
        try:
            modes = expect(m.Pong, channel.call(m.Ping(), _PROBE_SECONDS)[0]).modes
        except LMCacheError as exc:
            logger.debug("which modes %s serves is not known yet: %s", address, exc)
        else:
            if chosen.value not in modes:
                chosen, why = MPTransferMode.ENGINE_DRIVEN, f"the server serves {', '.join(modes)} only"
        finally:
            channel.close()
    info_once(logger, f"auto:{device}:{why}", "transfer mode auto is %s on %s: %s", chosen.value, device, why)
    return chosen
