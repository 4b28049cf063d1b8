"""What a storage engine is to us: batches of objects by key, and the truth about each of them.

An adapter moves bytes and knows nothing else. Queues, deadlines, checksums, retries, circuit breaking, metrics and
eviction are the tier's around it (:mod:`lmcache.v1.storage.l2.tier`), so that they are the same for all.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lmcache.errors import LMCacheError
from lmcache.v1.storage.accounts import Accounts

__all__ = ["AdapterError", "AdapterFull", "Call", "Held", "Put", "StorageAdapter", "Usage", "Want"]


class AdapterError(LMCacheError):
    """The storage engine failed as a whole: not reachable, out of space, refused. One line for people."""


class AdapterFull(AdapterError):
    """The engine has no room for more, whatever its usage says. The tier evicts, if it may, and goes on."""


class Call:
    """One call of an adapter: until when its answer is of use, and whether anybody still waits for it.

    Args:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Nobody waits any more. The adapter stops at its next look; what it did until then stands."""
        self._cancelled.set()

    @property
    def remaining(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether to stop: cancelled, or too late."""
        return self._cancelled.is_set() or time.monotonic() >= self.deadline


class Put(NamedTuple):
    """An object to store: ``header`` and ``payload`` are one value, to be given back as they are.

    ``payload`` stays as it is until the call returns, and not longer.
    """

    key: bytes
    header: bytes
    payload: memoryview


class Want(NamedTuple):
    """An object to load: its payload is exactly ``len(payload)`` bytes and is written there."""

    key: bytes
    payload: memoryview


class Held(NamedTuple):
    """An object that the engine holds. ``size`` is that of header and payload; ``used`` is a Unix time.

    ``account`` is whose quota it counts against, None where the engine does not know; ``taken`` is what it takes of
    the capacity, 0: as much as its size.
    """

    key: bytes
    size: int
    used: float
    account: str | None = None
    taken: int = 0


class Usage(NamedTuple):
    """``capacity`` is 0 where the engine has no limit that we know of; -1: the figure is not to be had."""

    used_bytes: int
    objects: int
    capacity_bytes: int


class StorageAdapter(ABC):
    """A storage engine.

    Every method blocks, may be called from several threads at once, and is to look at ``call.over`` between objects
    and to give up in bounded time after it. A key is 64 bytes. A method either raises, which says that nothing is
    known of any object of the batch, or answers for each object, in order. Answers are taken for hints: what is
    loaded is verified by its header before anybody sees it.
    """

    threads: int = 2
    """Calls that may run at once."""

    batch: int = 16
    """Objects per call that the engine likes best."""

    shared: bool = False
    """Whether others write to the engine too, so that it may hold what was never stored here."""

    reads: bool = True
    """Whether it is asked for objects at all. False: what only takes them."""

    writes: bool = True
    """Whether objects are stored there at all. False: what only gives them."""

    sync: bool = False
    """Whether whoever stores is told only once it is there, too, or was given up."""

    scans: int = 0
    """Rises whenever an engine of our own holds something else than was stored and deleted through us (another
    directory came to its place): :meth:`scan` is asked again then."""

    type_name: str = ""
    """What an operator asked for it by. Set by LMCache."""

    @abstractmethod
    def contains(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        """Whether each object is there. Must not prolong its life."""

    @abstractmethod
    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        """Store each; True: it is there in full, or was before. Never leaves a part of one that can be found."""

    @abstractmethod
    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        """Fill each payload; its header, or None if it is not there, too long or too short.

        Writes to ``payload`` only, and not after it has returned.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        """Remove each; True: it is not there any more."""

    def scan(self) -> Iterator[Held]:
        """Everything that is held, as at start. Only engines that we own in full (not ``shared``) need it."""
        return iter(())

    def headers(self, keys: Sequence[bytes], call: Call) -> list[bytes | None]:
        """The header of each object, for people who look inside; None: not there, or not to be had cheaply."""
        return [None] * len(keys)

    def clear(self, call: Call) -> int:
        """Remove everything that is ours; how many objects, -1 if that is not known."""
        keys = [held.key for held in self.scan()]
        return sum(self.delete(keys, call))

    @abstractmethod
    def usage(self) -> Usage:
        """What is held. Does no I/O: it is asked for whenever somebody looks at the server's status."""

    def accounts(self) -> Accounts | None:
        """The books of who has how much of what :meth:`usage` tells, and the quotas, beyond which :meth:`store`
        answers False. None: it keeps none, so no account can be limited here. Does no I/O."""
        return None

    def takes(self, header: int, payload: int) -> int:
        """Bytes of the capacity that an object with header and payload of these lengths takes."""
        return header + payload

    def describe(self) -> str:
        """Where it is, for people. No secrets."""
        return type(self).__name__

    def close(self) -> None:  # noqa: B027 -- many have nothing to let go of
        """Let go. No other method is called afterwards; those that still run may fail."""
