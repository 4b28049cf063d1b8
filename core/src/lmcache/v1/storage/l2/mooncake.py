"""A Mooncake Store pool, over TCP: memory that several machines lend, which one master keeps the books of.

Objects go from and to the caller's memory. Mooncake's calls cannot be given up, so the deadline is looked at between
objects; when the master is gone, a call takes some four seconds to say so. An object that is there is never replaced.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from lmcache.errors import ConfigError, StartupError
from lmcache.v1.storage.l2.adapter import AdapterError, Call, Put, StorageAdapter, Usage, Want
from lmcache.v1.storage.l2.options import Size, read_options
from lmcache.v1.storage.l2.remote import Faults, header_size, is_whole

try:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig
except ModuleNotFoundError:
    raise  # the registry says how to install it
except ImportError as exc:
    raise ConfigError(
        f"--l2-adapter mooncake: {exc}; install the libraries, e.g. apt-get install libibverbs1 librdmacm1 libnuma1"
    ) from None

__all__ = ["MooncakeAdapter", "Options", "make"]

_ABSENT = (-703, -704)
"""Begun by a writer that has not ended it, or may have died; and not there at all."""
_MASTER_GONE = -900
_CODES = {
    -200: "the pool has no room for it",
    -600: "refused as invalid",
    -706: "in use",
    -800: "transfer failed",
}
"""What the store's error codes mean, as far as they are met here."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """See ``docs/storage/mooncake.md``."""

    master: str
    host: str = ""
    segment: Size = Size(0)
    buffer: Size = Size(16 << 20)
    replicas: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    key_prefix: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,100}$")] = "lmcache:"
    connect_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 2.0
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4

    def __post_init__(self) -> None:
        host, _, port = self.master.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ValueError(f"master={self.master!r}: expected HOST:PORT of mooncake_master")


def make(options: Mapping[str, Any]) -> MooncakeAdapter:
    """The adapter of ``{"type": "mooncake", …}``.

    Raises:
        ConfigError: for a bad option.
        StartupError: if the master cannot be reached, or does not take us in.
    """
    return MooncakeAdapter(read_options("mooncake", Options, options))


class MooncakeAdapter(StorageAdapter):
    """A client of the pool, which lends ``segment`` bytes to it."""

    shared = True

    def __init__(self, options: Options) -> None:
        self._options = options
        self.threads = options.threads
        self._store = MooncakeDistributedStore()
        self._config = ReplicateConfig()
        self._config.replica_num = options.replicas
        host = self._reach()
        code = self._store.setup(
            host, "P2PHANDSHAKE", int(options.segment), int(options.buffer), "tcp", "", options.master
        )
        if code:
            raise StartupError(
                f"--l2-adapter {self.describe()}: the master does not take us in (code {code})"
            )

    def _reach(self) -> str:
        """Our address as the master sees it. Asked first, since the store's set-up waits for it for 90 seconds."""
        host, _, port = self._options.master.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), self._options.connect_seconds) as sock:
                return self._options.host or str(sock.getsockname()[0])
        except OSError as exc:
            raise StartupError(
                f"--l2-adapter {self.describe()}: {exc}; start mooncake_master there"
            ) from None

    # ---- the interface

    def contains(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        """Grants each object that is there the master's short lease (5 s), as every question to it does."""
        if not keys or call.over:
            return [False] * len(keys)
        faults = Faults(self.describe())
        codes = self._store.batch_is_exist([self._name(key) for key in keys])
        return [self._answer(code, faults) == 1 for code in codes]

    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        """From the caller's memory. The object can be found when it is complete.

        The store says yes to what somebody else has begun, who may have died since: so it is asked in the end.
        """
        faults, put_in = Faults(self.describe()), []
        for item in objects:
            if call.over:
                break
            header, payload = _Memory(item.header), _Memory(item.payload)
            (code,) = self._store.batch_put_from_multi_buffers(
                [self._name(item.key)],
                [[header.address, payload.address]],
                [[header.size, payload.size]],
                self._config,
            )
            if self._answer(code, faults) == 0:
                put_in.append(self._name(item.key))
        there = dict(zip(put_in, self._store.batch_is_exist(put_in), strict=True)) if put_in else {}
        answers = [there.get(self._name(item.key)) == 1 for item in objects]
        faults.settle([stored or None for stored in answers])
        return answers

    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        """Into the caller's memory."""
        faults, answers = Faults(self.describe()), []
        for want in wants:
            answers.append(None if call.over else self._load(want, faults))
        faults.settle(answers)
        return answers

    def _load(self, want: Want, faults: Faults) -> bytes | None:
        name = self._name(want.key)
        total = self._answer(self._store.get_size(name), faults)
        size = header_size(total, len(want.payload))
        if not size:
            return None
        header = bytearray(size)
        into, payload = _Memory(header), _Memory(want.payload)
        (code,) = self._store.batch_get_into_multi_buffers(
            [name], [[into.address, payload.address]], [[into.size, payload.size]]
        )
        found = self._answer(code, faults) == total and is_whole(header)
        return bytes(header) if found else None

    def delete(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        """By force: a lease of a reader does not keep an object that is damaged."""
        if not keys or call.over:
            return [False] * len(keys)
        faults = Faults(self.describe())
        codes = self._store.batch_remove([self._name(key) for key in keys], True)
        answers = [code in _ABSENT or self._answer(code, faults) == 0 for code in codes]
        faults.settle([gone or None for gone in answers])
        return answers

    def clear(self, call: Call) -> int:
        """What is named as we name it, by whomever it was stored."""
        count = self._store.remove_by_regex(f"^{self._pattern()}[0-9a-f]{{128}}$", True)
        faults = Faults(self.describe())
        if self._answer(count, faults) < 0:
            faults.settle([None])
        return int(count)

    def _pattern(self) -> str:
        return "".join(f"\\{c}" if c in ".-" else c for c in self._options.key_prefix)

    def usage(self) -> Usage:
        """Not known: others use the pool, too."""
        return Usage(-1, -1, 0)

    def describe(self) -> str:
        """The master, the prefix, and what we lend."""
        lent = f", lends {self._options.segment >> 20} MiB" if self._options.segment else ""
        return f"mooncake {self._options.master} {self._options.key_prefix}*{lent}"

    def close(self) -> None:
        """Leave the pool; objects in memory that we lent go with us."""
        self._store.close()

    # ----

    def _name(self, key: bytes) -> str:
        return self._options.key_prefix + key.hex()

    def _answer(self, code: int, faults: Faults) -> int:
        """``code``, with what it says noted if it is an error.

        Raises:
            AdapterError: if the master does not answer: then nothing that is asked for now would be.
        """
        if code == _MASTER_GONE:
            raise AdapterError(f"{self.describe()}: the master does not answer")
        if code < 0 and code not in _ABSENT:
            faults.add(_CODES.get(code, f"error code {code}"))
        return int(code)


class _Memory:
    """Address and size of a buffer, which it holds; one that is read-only is copied."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        self._hold = (ctypes.c_char * len(view)).from_buffer(bytearray(view) if view.readonly else view)
        self.address = ctypes.addressof(self._hold)
        self.size = len(view)
