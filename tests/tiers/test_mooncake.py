"""The Mooncake adapter with a real master: the conformance suite, two clients, a full pool, a master that is gone."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from helpers.engines import Engine, mooncake_master
from helpers.server import dead_port, wait_for
from lmcache.errors import ConfigError, StartupError
from lmcache.testing.adapters import AdapterConformance
from lmcache.testing.adapters.objects import new_object, read, write
from lmcache.v1.storage.l2.adapter import AdapterError, Call, StorageAdapter
from lmcache.v1.storage.l2.registry import build

SECONDS = 20.0


@pytest.fixture(scope="module")
def master() -> Iterator[Engine]:
    with mooncake_master() as engine:
        yield engine


def opened(port: int, **options: Any) -> StorageAdapter:
    return build({"type": "mooncake", "master": f"127.0.0.1:{port}", "segment": "64MiB", **options})


class TestMooncake(AdapterConformance):
    """One client for all: leaving the pool takes two seconds. What it lends goes with it, so nothing is persistent."""

    client: StorageAdapter

    @pytest.fixture(autouse=True)
    def pool(self, client: StorageAdapter) -> None:
        self.client = client

    @contextmanager
    def opened(self) -> Iterator[StorageAdapter]:
        yield self.client


@pytest.fixture(scope="module")
def client(master: Engine) -> Iterator[StorageAdapter]:
    adapter = opened(master.port)
    yield adapter
    adapter.close()


def test_what_a_client_lent_goes_with_it() -> None:
    with mooncake_master() as master:
        first, put = opened(master.port), new_object(1000)
        write(first, [put], SECONDS)
        first.close()
        second = opened(master.port)
        assert second.contains([put.key], Call(SECONDS)) == [False]
        assert read(second, put.key, 1000, SECONDS) is None
        second.close()


def _lend(port: int, end: Connection) -> None:
    """A machine that lends memory and stores nothing."""
    adapter = opened(port, segment="128MiB")
    end.send("lent")
    end.poll(60)
    adapter.close()


def test_what_lies_in_another_process_is_found_by_two_clients_that_lend_nothing() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with mooncake_master() as master:
        lender = context.Process(target=_lend, args=(master.port, theirs), daemon=True)
        lender.start()
        assert ours.poll(30)
        writer, reader = (opened(master.port, segment=0) for _ in range(2))
        puts = [new_object(size, shift=3) for size in (1, 70_001, 5_000_000)]
        write(writer, puts, SECONDS)
        for put in puts:
            assert read(reader, put.key, len(put.payload), SECONDS, shift=5) == bytes(put.payload)
        lender.kill()
        lender.join(10)
        assert _gone(reader, puts[1])
        writer.close()
        reader.close()


def _gone(adapter: StorageAdapter, put: Any) -> bool:
    """Whether an object whose memory has died is missed, by an answer or by an error, and soon."""
    start = time.monotonic()
    try:
        found = read(adapter, put.key, len(put.payload), SECONDS) is not None
    except AdapterError:
        found = False
    return not found and time.monotonic() - start < 5


def test_a_pool_without_room_is_an_error_with_its_reason() -> None:
    with mooncake_master() as master:
        adapter = opened(master.port, segment=0)  # nobody lends anything
        with pytest.raises(AdapterError, match="no room"):
            adapter.store([new_object(1000)], Call(SECONDS))
        adapter.close()


def test_an_object_that_a_reader_has_leased_can_be_removed(client: StorageAdapter) -> None:
    put = new_object(1000)
    write(client, [put], SECONDS)
    assert read(client, put.key, 1000, SECONDS) == bytes(put.payload)
    assert client.delete([put.key], Call(SECONDS)) == [True]
    assert client.contains([put.key], Call(SECONDS)) == [False]


def test_what_another_has_begun_and_not_ended_is_not_there(client: StorageAdapter) -> None:
    """As a writer leaves it that dies in the middle, until the master gives it up."""
    put = new_object(1000)
    pool, name = client._store, "lmcache:" + put.key.hex()  # type: ignore[attr-defined]
    assert pool.batch_put_session_start([name], [1000 + len(put.header)]) == [0]
    assert client.contains([put.key], Call(SECONDS)) == [False]
    assert read(client, put.key, 1000, SECONDS) is None
    if client.store([put], Call(SECONDS)) == [True]:
        assert read(client, put.key, 1000, SECONDS) == bytes(put.payload)
    else:
        assert client.contains([put.key], Call(SECONDS)) == [False]


def test_a_master_that_is_gone_is_an_error_in_bounded_time_and_its_successor_is_used() -> None:
    with mooncake_master() as master:
        adapter = opened(master.port)
        put = new_object(1000)
        write(adapter, [put], SECONDS)
        master.kill()
        start = time.monotonic()
        with pytest.raises(AdapterError, match="does not answer"):
            adapter.contains([put.key], Call(1.0))
        assert time.monotonic() - start < 10
        master.start()

        def stored() -> bool:
            try:
                return adapter.store([new_object(1000)], Call(SECONDS)) == [True]
            except AdapterError:
                return False

        wait_for(stored, 30, "the pool is whole again")
        adapter.close()


def test_a_master_that_is_not_there_ends_the_start_soon() -> None:
    start = time.monotonic()
    with pytest.raises(StartupError, match="start mooncake_master there"):
        opened(dead_port())
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"master": "somewhere"}, "HOST:PORT"),
        ({"key_prefix": "a|b"}, "key_prefix"),
        ({"segmet": 1}, "segment"),
    ],
)
def test_a_bad_option_is_one_line(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        opened(9, **change)
    assert "\n" not in str(caught.value)
