"""How long objects live in Redis, what is removed with them, and objects that a cluster moves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis

from helpers.redis_server import RedisServer, adapter_on, redis_cluster, redis_server
from lmcache.testing.adapters.objects import new_object, read, write
from lmcache.v1.storage.l2 import redis_values
from lmcache.v1.storage.l2.adapter import AdapterError, Call, Want

SECONDS = 10.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lfu") as started:
        yield started


@pytest.mark.parametrize(("size", "piece"), [(1000, "32MiB"), (300_000, "64KiB")])
def test_an_object_lives_for_ttl_seconds_or_without_end(server: RedisServer, size: int, piece: str) -> None:
    for seconds in (0, 500):
        with adapter_on(server.url, ttl_seconds=seconds, piece=piece, key_prefix="ttl:") as adapter:
            put = new_object(size)
            write(adapter, [put], SECONDS)
            left = server.tell("TTL", "ttl:" + put.key.hex())
            assert left == -1 if not seconds else 490 < left <= 500


def test_contains_does_not_prolong_a_life_and_load_does(server: RedisServer) -> None:
    """As the server's LFU counts: its counter begins at 5 and grows with use."""
    with adapter_on(server.url) as adapter:
        put = new_object(1000)
        write(adapter, [put], SECONDS)
        name = "lmcache:" + put.key.hex()
        before = server.tell("OBJECT", "FREQ", name)
        for _ in range(200):
            assert adapter.contains([put.key], Call(SECONDS)) == [True]
        assert server.tell("OBJECT", "FREQ", name) == before
        for _ in range(200):
            read(adapter, put.key, 1000, SECONDS)
        assert server.tell("OBJECT", "FREQ", name) > before


def test_parts_of_a_store_that_was_given_up_expire_and_are_cleared(server: RedisServer) -> None:
    with adapter_on(server.url, piece="64KiB", key_prefix="parts:") as adapter:
        put = new_object(2_000_000)
        looks = iter(range(1000))

        class Limited(Call):
            """Over when it was looked at some times."""

            @property
            def over(self) -> bool:
                return next(looks) > 20

        assert adapter.store([put], Limited(SECONDS)) == [False]
        names = server.tell("KEYS", "parts:*")
        assert len(names) == 1
        assert 0 < server.tell("TTL", names[0]) <= 600
        assert adapter.contains([put.key], Call(SECONDS)) == [False]
        assert adapter.clear(Call(SECONDS)) == 0
        assert server.tell("KEYS", "parts:*") == []


def test_a_value_that_is_replaced_while_it_is_read_in_pieces_is_never_a_mixture(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with adapter_on(server.url, piece="64KiB", key_prefix="mix:") as adapter:
        old = new_object(1_000_000)
        new = new_object(1_000_000, old.key)
        write(adapter, [old], SECONDS)
        whole, calls = redis_values._range, []

        def replaced(*arguments: Any) -> bool:
            calls.append(1)
            if len(calls) == 5:
                write(adapter, [new], SECONDS)
            return whole(*arguments)

        monkeypatch.setattr(redis_values, "_range", replaced)
        want = Want(old.key, memoryview(bytearray(1_000_000)))
        assert adapter.load([want], Call(SECONDS)) == [None]
        assert read(adapter, old.key, 1_000_000, SECONDS) == bytes(new.payload)


@pytest.mark.parametrize("prefix", ["mine:", "odd*[a-z]?\\^:", "ü:"])
def test_clear_removes_what_is_ours_and_nothing_else(server: RedisServer, prefix: str) -> None:
    with adapter_on(server.url, key_prefix=prefix) as adapter:
        others = [prefix + "other", prefix + "0" * 127, "somebody:" + "0" * 128, "oddx" + prefix]
        for name in others:
            server.tell("SET", name, "theirs")
        puts = [new_object(100) for _ in range(2500)]
        write(adapter, puts, SECONDS)
        assert adapter.clear(Call(SECONDS)) == 2500
        assert not any(adapter.contains([put.key for put in puts], Call(SECONDS)))
        assert server.tell("EXISTS", *others) == len(others)


def test_a_clear_whose_time_is_over_says_how_far_it_came(server: RedisServer) -> None:
    with adapter_on(server.url, key_prefix="far:") as adapter:
        write(adapter, [new_object(10)], SECONDS)
        with pytest.raises(AdapterError, match="cleared 0 objects only"):
            adapter.clear(Call(0.0))


def test_an_object_is_found_after_its_slot_has_moved_to_another_node() -> None:
    with redis_cluster() as servers, adapter_on(servers[0].url, cluster=True) as adapter:
        puts = [new_object(10_000) for _ in range(6)]
        write(adapter, puts, SECONDS)
        moved = puts[0]
        name = "lmcache:" + moved.key.hex()
        target = _move(servers, name)
        assert read(adapter, moved.key, 10_000, SECONDS) is None  # moved, without its keys
        for put in puts:
            write(adapter, [put], SECONDS)
            assert read(adapter, put.key, 10_000, SECONDS) == bytes(put.payload)
        with target.client() as client:
            assert client.exists(name)
        assert adapter.contains([put.key for put in puts], Call(SECONDS)) == [True] * 6
        assert adapter.delete([put.key for put in puts], Call(SECONDS)) == [True] * 6
        assert adapter.contains([put.key for put in puts], Call(SECONDS)) == [False] * 6


def _move(servers: Sequence[RedisServer], name: str) -> RedisServer:
    """Give the slot of ``name`` to a node that did not have it, all nodes being told."""
    slot = servers[0].tell("CLUSTER", "KEYSLOT", name)
    for server in servers:
        with server.client() as client:
            try:
                client.exists(name)
            except redis.exceptions.MovedError:
                continue
            client.delete(name)
            owner = server
    target = next(server for server in servers if server is not owner)
    node = target.tell("CLUSTER", "MYID")
    for server in (target, *(s for s in servers if s is not target)):
        server.tell("CLUSTER", "SETSLOT", slot, "NODE", node)
    return target


def test_a_node_that_is_gone_costs_its_own_objects_and_bounded_time() -> None:
    with redis_cluster() as servers, adapter_on(servers[0].url, cluster=True) as adapter:
        puts = [new_object(1000) for _ in range(12)]
        write(adapter, puts, SECONDS)
        servers[2].kill()
        found = []
        for put in puts:
            start = time.monotonic()
            try:
                found.append(adapter.contains([put.key], Call(3.0)) == [True])
            except AdapterError:
                found.append(False)
            assert time.monotonic() - start < 10.0
        assert any(found)
        assert not all(found)
