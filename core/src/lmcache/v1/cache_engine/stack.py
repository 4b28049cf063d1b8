"""The storage below one engine: L1 in a pool of shared memory, tiers, and what closes them in the right order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, cast

from lmcache.errors import ConfigError, DeviceError, LMCacheError, StartupError
from lmcache.logging import init_logger
from lmcache.v1.config import LMCacheEngineConfig, TierSpec, policy_name, tier_specs
from lmcache.v1.keys import Namespace
from lmcache.v1.memory.turn import OwnerLock
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.multiprocess.pool_pins import PoolPins
from lmcache.v1.storage.l1 import GRACE_SECONDS, L1Cache
from lmcache.v1.storage.l2 import registry
from lmcache.v1.storage.l2.adapter import StorageAdapter
from lmcache.v1.storage.policies import BUILT_IN
from lmcache.v1.storage.shm_pool import ShmPool
from lmcache.v1.storage.tiers import TieredStore, TierOptions

__all__ = ["StorageStack"]

logger = init_logger(__name__)

_WATERMARK, _EVICT_RATIO = 0.95, 0.05


class StorageStack:
    """Everything that one engine keeps chunks in.

    Args:
        config: Settings.
        metadata: For the rank, which has storage of its own where storage is local.
        namespace_of: What a key's namespace is, for headers.
        adapters: Storage engines by name, instead of those of the configuration.

    Raises:
        ConfigError: A storage engine cannot be made of its options.
        StartupError: There is not enough memory, or a storage engine cannot be had.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        namespace_of: Callable[[bytes], Namespace | None],
        adapters: Sequence[tuple[str, StorageAdapter]] | None = None,
    ) -> None:
        self.lock = OwnerLock()
        self._pool = _pool(config)
        self._pins = PoolPins(self._pool.view)
        made: list[tuple[str, StorageAdapter]] = []
        try:
            if adapters is None:
                self.specs = tier_specs(config, metadata.worker_id, metadata.world_size)
                _build(self.specs, made)
            else:
                self.specs = [TierSpec(name, {"type": name}) for name, _ in adapters]
                made.extend(adapters)
            self.view = self._pool.view
            name = str(policy_name(config.cache_policy))
            watermark = None if name == "noop" else _WATERMARK
            self.l1 = L1Cache(self.view, watermark, _EVICT_RATIO, BUILT_IN[name](), GRACE_SECONDS)
            self.tiers = TieredStore(
                self.l1, self.view, made, cast("Lock", self.lock), _options(config), namespace_of=namespace_of
            )
        except BaseException:
            for _, adapter in made:
                adapter.close()
            self._pool.close()
            raise
        self._lock_pages()

    def close(self, seconds: float) -> None:
        """Write what waits, then let go. Memory that objects still show stays mapped until they are gone."""
        self.tiers.close(seconds)
        self._pins.release()
        self._pool.close()

    def _lock_pages(self) -> None:
        """For the device that copies to and from the pool, if there is one."""
        from lmcache.v1.platform import _device_detect
        from lmcache.v1.platform._selection import import_torch

        if import_torch() is None:
            return
        try:
            spec = _device_detect.selected().spec
        except DeviceError as exc:  # whoever copies will meet it, too, and cannot go on
            logger.debug("the pool is not page-locked: %s", exc)
            return
        self._pins.pin(spec)


def _pool(config: LMCacheEngineConfig) -> ShmPool:
    try:
        return ShmPool(config.pool_bytes)
    except StartupError as exc:  # its remedy names the server's flag
        raise StartupError(str(exc).replace("--l1-size-gb", "max_local_cpu_size")) from None


def _options(config: LMCacheEngineConfig) -> TierOptions:
    return TierOptions(
        store_policy="write_behind" if config.local_cpu else "skip_l1",
        prefetch_policy="retain" if config.local_cpu else "drop",
        load_seconds=config.blocking_timeout_secs,
    )


def _build(specs: Sequence[TierSpec], made: list[tuple[str, StorageAdapter]]) -> None:
    external = _external() if any(spec["type"] not in registry.BUILT_IN for _, spec in specs) else {}
    for name, spec in specs:
        try:
            made.append((name, registry.build(spec, external)))
        except (ConfigError, StartupError) as exc:
            raise type(exc)(str(exc).replace("--l2-adapter", "l2_adapters")) from None
        except ModuleNotFoundError as exc:
            raise StartupError(
                f"l2_adapters type {spec['type']!r}: needs the module {exc.name}, which is not here"
            ) from None


def _external() -> Mapping[str, registry.Maker]:
    """Storage engines of plugins, by type."""
    from lmcache.v1.plugins.host import PluginHost

    offers = PluginHost().collect("lmcache_storage_adapters", taken=registry.BUILT_IN)
    return {name: _guarded(name, make, record.point.source) for name, (make, record) in offers.items()}


def _guarded(name: str, make: Any, source: str) -> registry.Maker:
    """A plugin's maker whose faults are one line."""

    def guarded(options: Mapping[str, Any]) -> StorageAdapter:
        try:
            adapter = make(options)
        except LMCacheError:  # what it says of its options
            raise
        except Exception as exc:
            raise StartupError(f"storage engine {name!r} of {source}: {type(exc).__name__}: {exc}") from exc
        if not isinstance(adapter, StorageAdapter):
            raise StartupError(
                f"storage engine {name!r} of {source}: a {type(adapter).__name__}: expected a StorageAdapter"
            )
        return adapter

    return guarded
