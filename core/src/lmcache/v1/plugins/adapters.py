"""Storage adapters that plugins offer, each behind a guard: what one raises is an error that names the plugin."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lmcache.errors import LMCacheError, StartupError
from lmcache.v1.plugins.host import PluginHost
from lmcache.v1.plugins.records import PluginRecord
from lmcache.v1.storage.l2.adapter import StorageAdapter
from lmcache.v1.storage.l2.registry import BUILT_IN, Maker
from lmcache.v1.storage.l2.remote import reason

__all__ = ["external_adapters"]


def external_adapters(host: PluginHost) -> dict[str, Maker]:
    """Makers by type, for ``registry.build(spec, external)``. A built-in type is never replaced.

    A plugin that raises, or offers what cannot be called, is unplugged and costs itself only.
    """
    offers = host.collect("lmcache_storage_adapters", taken=BUILT_IN)
    for name, (make, record) in offers.items():
        if not callable(make) and record.state == "loaded":
            host.unplug(
                record, f"its storage adapter {name!r} is a {type(make).__name__}: expected a function"
            )
    return {
        name: partial(_make, name, make, record)
        for name, (make, record) in offers.items()
        if record.state == "loaded"
    }


def _make(name: str, make: Maker, record: PluginRecord, options: Mapping[str, Any]) -> StorageAdapter:
    """The adapter.

    Raises:
        LMCacheError: what the plugin says of its options.
        StartupError: if it fails in any other way, or makes something else.
    """
    try:
        adapter: Any = make(options)
    except (KeyboardInterrupt, LMCacheError):
        raise
    except BaseException as exc:
        fault = (
            f"it raises {type(exc).__name__}: {reason(str(exc))}"
            if str(exc)
            else f"it raises {type(exc).__name__}"
        )
    else:
        if isinstance(adapter, StorageAdapter):
            return adapter
        fault = f"it makes a {type(adapter).__name__}"
    text = f"--l2-adapter type {name!r} of {record.point.source}: {fault}: expected a StorageAdapter"
    raise StartupError(" ".join(text.split()))
