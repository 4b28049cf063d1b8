"""Redis and Valkey, one server or a cluster: an object is one value, ``key_prefix`` and the key in hex its name.

A value above ``piece`` is sent and fetched in pieces, so that no command holds the server for long. It is written
under a name of its own that expires, and renamed when it is complete; it is read like a file, and its header is read
again at the end, since somebody may have replaced it meanwhile.
"""

from __future__ import annotations

import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis

from lmcache.v1.storage.l2.adapter import AdapterError, Call, Put, StorageAdapter, Usage, Want
from lmcache.v1.storage.l2.options import read_options
from lmcache.v1.storage.l2.redis_options import Options, client_settings, place
from lmcache.v1.storage.l2.redis_values import load_pieces, receive, send, store_pieces
from lmcache.v1.storage.l2.redis_wire import Cancelled, Refused, Wire
from lmcache.v1.storage.l2.remote import Faults, cut_header, header_size, is_whole, probe_at_start, reason

__all__ = ["Options", "RedisAdapter", "make"]

_DEPTH = 2
"""Values under way at once on a connection: the server prepares one while another travels."""
_SMALL_DEPTH = 64
_HEADER_GUESS = 4096
_SCAN_COUNT = 1000
_MOVED_AWAY = ("READONLY", "MASTERDOWN")
"""What a server says that is no primary any more: it keeps its connections."""
_NO_REDIS = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""What redis-py's reader and its commands raise where that which answers is no Redis."""
_FAULTS = (
    redis.exceptions.RedisError,
    redis.exceptions.RedisClusterException,  # no node answers; it is none of the former
    OSError,
    *_NO_REDIS,
)


def make(options: Mapping[str, Any]) -> RedisAdapter:
    """The adapter of ``{"type": "redis", …}``.

    Raises:
        ConfigError: for a bad option.
        StartupError: if the server cannot be reached or refuses us, unless ``required`` is false.
    """
    read = read_options("redis", Options, options)
    adapter = RedisAdapter(read)
    probe_at_start(adapter, adapter.ping, read.required, "start it")
    return adapter


class RedisAdapter(StorageAdapter):
    """One server, or all masters of a cluster."""

    shared = True

    def __init__(self, options: Options) -> None:
        self._options = options
        self.threads = options.threads
        self._prefix = options.key_prefix.encode()
        self._part = self._prefix + b"part:{"
        self._settings = client_settings(options)
        self._where = place(options)
        self._lock = threading.Lock()
        self._client: Any = None
        self._pools: set[Any] = set()
        self._stale = False
        """Whether the cluster's nodes may have changed."""

    # ---- the interface

    def contains(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        """EXISTS, which leaves the time of the last use and the time to live as they are."""

        def again(client: Any, key: bytes) -> bool:
            return bool(client.exists(self._name(key)))

        answers = self._small(b"EXISTS", keys, call, again)
        return [answer == 1 for answer in answers]

    def delete(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        """UNLINK; what was not there is not there any more."""

        def again(client: Any, key: bytes) -> int:
            return int(client.unlink(self._name(key)))

        return [isinstance(answer, int) for answer in self._small(b"UNLINK", keys, call, again)]

    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        """SET, or pieces and RENAME."""
        life, piece = self._options.ttl_seconds, self._options.piece

        def again(client: Any, put: Put) -> bytes:
            value = b"".join((put.header, put.payload))
            return b"OK" if client.set(self._name(put.key), value, ex=life or None) else b""

        verb = _Verb(
            lambda wire, put: send(wire, self._name(put.key), put, life),
            lambda wire, put: wire.reply(),
            again,
            _DEPTH,
            lambda wire, put: store_pieces(
                wire, self._name(put.key), self._part_name(put.key), put, call, life, piece
            ),
        )
        return [a == b"OK" for a in self._answers([put.key for put in objects], objects, call, verb)]

    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        """GET, or GETRANGE piece by piece."""

        def again(client: Any, want: Want) -> bytes | None:
            value = client.get(self._name(want.key)) or b""
            size = header_size(len(value), len(want.payload))
            if not size or not is_whole(value[:size]):
                return None
            want.payload[:] = memoryview(value)[size:]
            return bytes(value[:size])

        verb = _Verb(
            lambda wire, want: wire.command(b"GET", self._name(want.key)),
            receive,
            again,
            _DEPTH,
            lambda wire, want: load_pieces(wire, self._name(want.key), want, call, self._options.piece),
        )
        answers = self._answers([want.key for want in wants], wants, call, verb)
        return [answer if isinstance(answer, bytes) else None for answer in answers]

    def headers(self, keys: Sequence[bytes], call: Call) -> list[bytes | None]:
        """The beginning of each value; this counts as a use of it."""

        def begin(wire: Wire, key: bytes) -> None:
            wire.command(b"GETRANGE", self._name(key), 0, _HEADER_GUESS - 1)

        def again(client: Any, key: bytes) -> bytes:
            return bytes(client.getrange(self._name(key), 0, _HEADER_GUESS - 1))

        verb = _Verb(begin, lambda wire, key: wire.reply(), again, _SMALL_DEPTH)
        found = self._answers(list(keys), list(keys), call, verb)
        return [cut_header(answer) if isinstance(answer, bytes) else None for answer in found]

    def clear(self, call: Call) -> int:
        """Unlink what has our prefix and is named as we name it."""
        count = 0
        with self._faults():
            client = self._connected()
            nodes = client.get_primaries() if self._options.cluster else [None]
            for node in nodes:
                one = client.get_redis_connection(node) if node else client
                for name in one.scan_iter(match=_literal(self._prefix) + b"*", count=_SCAN_COUNT):
                    if call.over:
                        raise AdapterError(
                            f"{self._where}: cleared {count} objects only, then the time was over"
                        )
                    if self._is_ours(name):
                        count += one.unlink(name) and not name.startswith(self._part)
        return count

    def usage(self) -> Usage:
        """Not known: others use the server, too."""
        return Usage(-1, -1, 0)

    def describe(self) -> str:
        """Address and prefix; a password is not shown."""
        return self._where

    def close(self) -> None:
        """Close every connection."""
        with self._lock:
            client, self._client = self._client, None
            pools = list(self._pools)
        if client is not None:
            client.close()
        for pool in pools:  # a cluster's client leaves those of its nodes open
            pool.disconnect()

    def ping(self) -> None:
        """Whether the server answers and lets us in; raises AdapterError if not."""
        with self._faults():
            self._connected().ping()

    # ---- connections

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except _FAULTS as exc:
            self._stale = self._options.cluster
            garbage = "its answer makes no sense: " if isinstance(exc, _NO_REDIS) else ""
            raise AdapterError(f"{self._where}: {garbage}{reason(exc)}") from None

    def _connected(self) -> Any:
        """The client; made, and its picture of the cluster renewed, when that is due."""
        with self._lock:
            if self._client is None:
                kind = redis.RedisCluster if self._options.cluster else redis.Redis
                self._client = kind.from_url(self._options.url, **self._settings)
            elif self._stale:
                self._client.nodes_manager.initialize()
            self._stale = False
            return self._client

    @contextmanager
    def _wire(self, pool: Any, call: Call) -> Iterator[Wire]:
        """A connection of ``pool``; one with replies left unread is closed at the end."""
        with self._faults():
            connection = pool.get_connection()
            wire = None
            try:
                wire = Wire(connection, call)
                yield wire
            finally:
                if wire is not None and wire.clean:
                    wire.let_go()
                else:
                    connection.disconnect()
                pool.release(connection)

    def _by_pool(self, client: Any, keys: Sequence[bytes]) -> dict[Any, list[int]]:
        """The indexes of keys by the pool of the node that has them."""
        pools: dict[Any, list[int]] = defaultdict(list)
        for index, key in enumerate(keys):
            if self._options.cluster:
                node = client.get_node_from_key(self._name(key))
                pools[client.get_redis_connection(node).connection_pool].append(index)
            else:
                pools[client.connection_pool].append(index)
        with self._lock:
            self._pools |= set(pools)
        return pools

    # ---- names

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _part_name(self, key: bytes) -> bytes:
        """A new name in the same slot of a cluster as that of ``key``: what is in braces decides."""
        return self._part + self._name(key) + b"}:" + secrets.token_hex(8).encode()

    def _is_ours(self, name: bytes) -> bool:
        rest = name[len(self._prefix) :]
        return name.startswith(self._part) or (len(rest) == 128 and not rest.strip(b"0123456789abcdef"))

    # ---- batches

    def _small(
        self, command: bytes, keys: Sequence[bytes], call: Call, again: Callable[..., Any]
    ) -> list[Any]:
        verb = _Verb(
            lambda wire, key: wire.command(command, self._name(key)),
            lambda wire, key: wire.reply(),
            again,
            _SMALL_DEPTH,
        )
        return self._answers(keys, keys, call, verb)

    def _answers(self, keys: Sequence[bytes], items: Sequence[Any], call: Call, verb: _Verb) -> list[Any]:
        """The answer to each item: what ``verb`` receives, or None where the call was over before."""
        answers: list[Any] = [None] * len(items)
        with self._faults():
            client = self._connected()
            pools = self._by_pool(client, keys)
        for pool, indexes in pools.items():
            if call.over:
                break
            with self._wire(pool, call) as wire:
                try:
                    self._converse(wire, [(index, items[index]) for index in indexes], call, verb, answers)
                except Cancelled:
                    break
        self._follow(client, items, verb.again, call, answers)
        if any(isinstance(answer, Refused) and answer.code in _MOVED_AWAY for answer in answers):
            for pool in pools:  # the address may lead to its successor by now, old connections never do
                pool.disconnect(inuse_connections=False)
        faults = Faults(self._where)
        for answer in answers:
            if isinstance(answer, Refused) and answer.code != "WRONGTYPE":  # that is somebody else's value
                faults.add(answer.text)
        faults.settle([None if isinstance(answer, Refused) else answer for answer in answers])
        return answers

    def _converse(
        self, wire: Wire, items: list[tuple[int, Any]], call: Call, verb: _Verb, answers: list[Any]
    ) -> None:
        """Send and receive, a few items ahead; large ones alone, after the others."""
        plain: list[tuple[int, Any]] = []
        large: list[tuple[int, Any]] = []
        for pair in items:
            (large if verb.pieces and self._is_large(pair[1]) else plain).append(pair)
        sent = 0
        for done, (index, item) in enumerate(plain):
            while sent < min(len(plain), done + verb.depth) and not call.over:
                verb.send(wire, plain[sent][1])
                sent += 1
            if sent == done:
                return
            answers[index] = verb.receive(wire, item)
        for index, item in large:
            if verb.pieces and not call.over:
                answers[index] = verb.pieces(wire, item)

    def _is_large(self, item: Put | Want) -> bool:
        return len(item.payload) > self._options.piece

    def _follow(
        self, client: Any, items: Sequence[Any], again: Callable[..., Any], call: Call, answers: list[Any]
    ) -> None:
        """Ask once more, through redis-py, where a cluster has moved an item: it knows all redirections."""
        for index, answer in enumerate(answers):
            if isinstance(answer, Refused) and answer.code in ("MOVED", "ASK", "TRYAGAIN") and not call.over:
                self._stale = self._options.cluster
                with self._faults():
                    answers[index] = again(client, items[index])


class _Verb(NamedTuple):
    """One kind of command: how it is sent, what is received, and how redis-py alone does it."""

    send: Callable[[Wire, Any], None]
    receive: Callable[[Wire, Any], Any]
    again: Callable[[Any, Any], Any]
    depth: int
    pieces: Callable[[Wire, Any], Any] | None = None


def _literal(prefix: bytes) -> bytes:
    """A pattern that matches ``prefix`` and nothing else."""
    return b"".join(b"\\" + bytes((c,)) if c in b"*?[]\\^-" else bytes((c,)) for c in prefix)
