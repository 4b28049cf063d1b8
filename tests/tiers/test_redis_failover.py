"""The address of a Redis goes over to another server, as with a virtual IP or a managed service."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from helpers.redis_server import redis_server
from helpers.server import wait_for
from lmcache.testing.adapters.objects import new_object, read, write
from lmcache.v1.storage.l2.adapter import AdapterError, Call
from lmcache.v1.storage.l2.registry import build

SECONDS = 10.0


class Address:
    """A port of 127.0.0.1. Connections stay with the server that was ``port`` when they were made."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                theirs = socket.create_connection(("127.0.0.1", self.port))
                self._open += [ours, theirs]
                for source, target in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        for one in self._open:
            one.close()


@contextmanager
def address(port: int) -> Iterator[Address]:
    made = Address(port)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("piece", ["32MiB", "64KiB"])
def test_a_server_that_became_a_replica_costs_a_call_and_its_successor_is_used(piece: str) -> None:
    """It keeps its connections and answers them: with READONLY to every store, for ever."""
    with redis_server() as first, redis_server() as second, address(first.port) as moving:
        adapter = build({"type": "redis", "url": moving.url, "piece": piece})
        before, after = new_object(200_000), [new_object(200_000) for _ in range(3)]
        write(adapter, [before], SECONDS)
        first.tell("REPLICAOF", "127.0.0.1", second.port)
        moving.port = second.port
        wait_for(lambda: first.tell("ROLE")[3] == b"connected", 20, "it is a replica")
        with pytest.raises(AdapterError, match="READONLY"):
            adapter.store(after, Call(SECONDS))
        write(adapter, after, SECONDS)
        assert [read(adapter, put.key, 200_000, SECONDS) for put in after] == [put.payload for put in after]
        assert second.tell("DBSIZE") == 3
        adapter.close()
