"""A server inside an engine's process: in a thread, on a Unix address, without HTTP, signals or anything printed.

It is the same server as ``lmcache server``, reached by the same protocol: whoever dies, hangs or comes late finds what
he would find there.
"""

from __future__ import annotations

import threading

from lmcache.errors import StartupError
from lmcache.logging import init_logger
from lmcache.v1.keys import digest
from lmcache.v1.multiprocess.server.assembly import Assembly
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.plugins import ServerPlugins, refused_policies
from lmcache.v1.multiprocess.server.tiers import parse_adapters

__all__ = ["EmbeddedServer", "embedded_address"]

logger = init_logger(__name__)

_END_SECONDS = 5.0
"""For transfers under way, beside the time that tiers have to be written."""


def embedded_address(engine: str) -> str:
    """Where the server of an engine listens; every process of the engine on this host computes the same.

    An abstract Unix address: it leaves no file, and is free again the moment its process ends.
    """
    return f"ipc://@lmcache-in-{digest('embedded', engine).hex()[:32]}"


class EmbeddedServer:
    """Serves from construction until ``close``, which may be called more than once.

    Args:
        config: Settings; ``port`` and those of HTTP have no meaning here.
        engine: Whose it is, by an id that no other engine on this host has.

    Raises:
        ConfigError: For a bad setting. StartupError: If memory or a tier cannot be had, or if an engine of this id
        has a server already. In both cases nothing is left behind.
    """

    def __init__(self, config: ServerConfig, engine: str) -> None:
        self.address = embedded_address(engine)
        self._stop = threading.Event()
        self._plugins = ServerPlugins()
        try:
            config.check(self._plugins.policies, refused_policies(self._plugins.host.records))
            self._assembly = Assembly(config, self._plugins, self.address, self._stop)
        except BaseException as exc:
            self._plugins.close()
            if isinstance(exc, StartupError) and self.address in str(exc):
                raise StartupError(
                    f"engine_id {engine!r}: a live engine on this host has it; give each engine one of its own"
                ) from None
            raise
        self._thread = threading.Thread(target=self._run, name="lmcache-embedded", daemon=True)
        self._thread.start()
        tiers = ", ".join(name for name, _ in parse_adapters(config.l2_adapter)) or "nothing"
        logger.info("cache of engine %s: L1 of %g GiB, below it %s", engine, config.l1_size_gb, tiers)

    def status(self) -> dict[str, object]:
        """As ``/status`` of ``lmcache server``."""
        with self._assembly.lock:
            return self._assembly.service.status()

    def close(self) -> None:
        """Let transfers end, write what waits for tiers, and let go of everything, all in bounded time."""
        self._stop.set()
        self._thread.join(_END_SECONDS + self._assembly.config.l2_flush_seconds)
        if self._thread.is_alive():
            logger.warning("the cache of this engine does not end; it is left to the end of the process")

    def _run(self) -> None:
        try:
            self._assembly.run()
        except Exception:  # an engine lives on without its cache
            logger.exception("the cache of this engine has failed; requests run uncached")
        finally:
            self._assembly.close()
            self._plugins.close()
