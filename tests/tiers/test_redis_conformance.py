"""The Redis adapter on real servers, through the conformance suite: plain, in pieces, with TLS, as a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from helpers.redis_server import RedisServer, redis_cluster, redis_server
from lmcache.testing.adapters import AdapterConformance
from lmcache.v1.storage.l2.adapter import StorageAdapter
from lmcache.v1.storage.l2.registry import build


@pytest.fixture(scope="module")
def plain() -> Iterator[RedisServer]:
    with redis_server("--unixsocket", "redis.sock") as server:
        yield server


@pytest.fixture(scope="module")
def with_tls() -> Iterator[RedisServer]:
    with redis_server(tls=True) as server:
        yield server


@pytest.fixture(scope="module")
def cluster() -> Iterator[Sequence[RedisServer]]:
    with redis_cluster() as servers:
        yield servers


class _OnRedis(AdapterConformance):
    persistent = True
    options: dict[str, Any]

    def make(self) -> StorageAdapter:
        return build({"type": "redis", **self.options})


class TestOneServer(_OnRedis):
    @pytest.fixture(autouse=True)
    def server(self, plain: RedisServer) -> None:
        self.options = {"url": plain.url}


class TestInPieces(_OnRedis):
    largest = 3_000_000

    @pytest.fixture(autouse=True)
    def server(self, plain: RedisServer) -> None:
        self.options = {"url": plain.url, "piece": "64KiB", "key_prefix": "pieces:", "ttl_seconds": 1000}


class TestThroughAUnixSocket(_OnRedis):
    @pytest.fixture(autouse=True)
    def server(self, plain: RedisServer) -> None:
        self.options = {"url": f"unix://{plain.folder}/redis.sock", "key_prefix": "unix:"}


class TestWithTls(_OnRedis):
    @pytest.fixture(autouse=True)
    def server(self, with_tls: RedisServer) -> None:
        files = {"ca_file": "ca.pem", "cert_file": "client.pem", "key_file": "client.key"}
        options = {name: str(with_tls.folder / file) for name, file in files.items()}
        self.options = {"url": with_tls.url, **options}


class TestACluster(_OnRedis):
    @pytest.fixture(autouse=True)
    def server(self, cluster: Sequence[RedisServer]) -> None:
        self.options = {"url": cluster[1].url, "cluster": True, "piece": "1MiB"}
