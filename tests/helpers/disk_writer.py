"""A process that stores and deletes in a directory until it is killed, and says what it does, before and after."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from helpers import stored
from lmcache.v1.storage.l2 import disk, shared_fs  # here, so that forked processes have them

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["helpers.disk_writer"])
MAKERS = {"disk": stored.disk, "shared_fs": stored.shared_fs, "spec": stored.spec}
SIZES = (0, 100, 4096, 5000, 70_000, 300_000, 1 << 20)
THREADS = 3

__all__ = ["MAKERS", "Writer", "disk", "shared_fs", "size_of"]


def size_of(number: int) -> int:
    """Every object has one size, so that whoever knows its number knows all of it."""
    return SIZES[number % len(SIZES)]


def _work(kind: str, path: Path, first: int, seed: int, says: Connection, stop: Connection) -> None:
    adapter = MAKERS[kind](path)

    def say(what: str, number: int) -> None:
        os.write(says.fileno(), b"%s %d\n" % (what.encode(), number))  # short: one piece, whole or not at all

    def run(thread: int) -> None:
        rng, mine, number = random.Random(seed * 10 + thread), [], first + thread
        while not ended.is_set():
            say("storing", number)
            if stored.store(adapter, number, size_of(number)):
                say("stored", number)
                mine.append(number)
            if mine and rng.random() < 0.3:
                victim = mine.pop(rng.randrange(len(mine)))
                say("deleting", victim)
                adapter.delete([stored.key_of(victim)], stored.call())
                say("deleted", victim)
            number += THREADS

    ended = threading.Event()
    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    stop.poll(60)
    ended.set()
    for thread in threads:
        thread.join(60)
    adapter.close()


class Writer:
    """The process. ``end`` says what it had done by then."""

    def __init__(self, kind: str, path: Path, first: int, seed: int) -> None:
        self._text = b""
        self._says, theirs = _CONTEXT.Pipe(duplex=False)
        their_stop, self._stop = _CONTEXT.Pipe(duplex=False)
        arguments: Iterable[Any] = (kind, path, first, seed, theirs, their_stop)
        self.process = _CONTEXT.Process(target=_work, args=tuple(arguments), daemon=True)
        self.process.start()
        theirs.close()
        their_stop.close()

    def wait_until_it_stores(self) -> None:
        while b"stored" not in self._text:
            assert self._says.poll(60), "nothing stored for a minute"
            more = os.read(self._says.fileno(), 1 << 16)
            assert more, "the writer ended before it had stored anything"
            self._text += more

    def end(self, kill: bool) -> dict[str, set[int]]:
        if kill:
            self.process.kill()
        else:
            self._stop.send_bytes(b"stop")
        while more := os.read(self._says.fileno(), 1 << 16):
            self._text += more
        self.process.join(60)
        assert self.process.exitcode == (-9 if kill else 0)
        self._says.close()
        self._stop.close()
        did: dict[str, set[int]] = {what: set() for what in ("storing", "stored", "deleting", "deleted")}
        for line in self._text.splitlines():
            what, number = line.split()
            did[what.decode()].add(int(number))
        return did
