"""The in-process connector: the multiprocess connector's two sides over a server that lives inside the engine.

Rank 0's worker holds the server, so that it lives as long as the engine; the scheduler and the other ranks reach it as
they would reach ``lmcache server``. Named by ``kv_connector_module_path``; by its bare name vLLM comes through
``vllm_v1_adapter``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lmcache.errors import ConfigError, StartupError
from lmcache.integration.vllm.inproc_settings import (
    connector_settings,
    in_users_words,
    read_config,
    server_config,
)
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.settings import ConnectorSettings
from lmcache.v1.multiprocess.server.embedded import EmbeddedServer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["LMCacheConnectorV1", "LMCacheConnectorV1Dynamic"]


class LMCacheConnectorV1Dynamic(LMCacheMPConnector):
    """Caches KV blocks in the engine's own memory and the tiers below it.

    Settings: a file, the environment and ``kv_connector_extra_config``; see ``docs/vllm-in-process.md``.

    Raises:
        ConfigError: for a setting that is unknown or cannot be met. StartupError: if memory or a tier cannot be had.
    """

    _server: EmbeddedServer | None = None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER and self._parallel.rank == 0:
            try:
                self._server = EmbeddedServer(self._server_config, self._engine)
            except (ConfigError, StartupError) as exc:
                raise type(exc)(in_users_words(str(exc))) from None

    def _read_settings(self, transfer: Any) -> ConnectorSettings:
        parallel = self._config.parallel_config
        hosts = getattr(parallel, "nnodes", 1)
        if hosts > 1:
            raise ConfigError(
                f"nnodes={hosts}: an engine on several hosts has no cache in its process;"
                " run `lmcache server` and LMCacheMPConnector"
            )
        config = read_config(transfer.kv_connector_extra_config)
        if config.use_layerwise:
            self._check_layerwise(config.source_of("use_layerwise"))
        sizes = [group.kv_cache_spec.block_size for group in self._kv.kv_cache_groups]
        self._server_config = server_config(config, sizes, getattr(parallel, "data_parallel_index", 0))
        return connector_settings(config, transfer.engine_id or "")

    def _check_layerwise(self, source: str) -> None:
        groups = len(self._kv.kv_cache_groups)
        if groups > 1:
            raise ConfigError(
                f"use_layerwise ({source}): this model has {groups} KV groups, which are loaded in a step of their own;"
                " expected one group; remove the setting"
            )
        if getattr(self._config.parallel_config, "use_ubatching", False):
            raise ConfigError(
                f"use_layerwise ({source}): with micro-batches a layer is computed in parts; remove one of the two"
            )
        graphs = self._config.compilation_config.cudagraph_mode
        if graphs is not None and graphs.has_full_cudagraphs():
            # vLLM's wrapper looks for the bare key in the extra config, and changes the mode if it is there.
            raise ConfigError(
                f"use_layerwise ({source}): cudagraph_mode {graphs.name} records whole steps, which wait for no layer;"
                " give it as use_layerwise in kv_connector_extra_config, or set cudagraph_mode PIECEWISE"
            )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A recorded graph waits for no layer."""
        return read_config(extra_config).use_layerwise

    def shutdown(self) -> None:
        """Close this side's session and, where it lives, the server."""
        super().shutdown()
        server, self._server = self._server, None  # and with it, its memory
        if server is not None:
            server.close()


LMCacheConnectorV1 = LMCacheConnectorV1Dynamic
"""Under the name that vLLM's registry has, for users who give it with the module's path."""
