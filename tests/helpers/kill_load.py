"""Engines that store prompt after prompt in a server that is about to be killed."""

from __future__ import annotations

import threading

from helpers.tier_load import Gone, Stranger
from lmcache.errors import LMCacheError
from lmcache.v1.keys import Namespace

CHUNKS = 6
WRITERS = 2


class Load:
    """Engines that store prompt after prompt until the server is gone. ``begun``: every prompt that was ever stored."""

    def __init__(
        self, address: str, begun: list[int], numbers: list[int], ns: Namespace | None = None
    ) -> None:
        self._begun = begun
        self.acknowledged: list[int] = []
        self.faults: list[str] = []
        self._strangers = [Stranger(address, f"load{i}", ns) for i in range(WRITERS)]
        self._threads = [
            threading.Thread(target=self._run, args=(stranger, numbers)) for stranger in self._strangers
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, stranger: Stranger, numbers: list[int]) -> None:
        try:
            while True:
                number = numbers.pop()
                self._begun.append(number)
                hashes = stranger.hashes(prompt(number))
                stored = stranger.store(hashes)
                self.acknowledged.append(number)
                if (found := stranger.find(hashes, 1.0)) != CHUNKS:
                    self.faults.append(f"prompt {number}: {stored} of {CHUNKS} chunks stored, {found} found")
        except (Gone, LMCacheError):
            stranger.channel.close()

    def join(self) -> None:
        """The server was killed."""
        for stranger in self._strangers:
            stranger.gone.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def prompt(number: int) -> list[int]:
    return list(range(number * 2_000, number * 2_000 + CHUNKS * 256))
