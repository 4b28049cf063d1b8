"""HTTP says that a server is healthy exactly while its request loop answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from helpers.server import dead_port, http_get, wait_for
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.http import HttpServer, claim
from lmcache.v1.multiprocess.server.loop import RequestLoop
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.multiprocess.server.service import Service
from lmcache.v1.storage.shm_pool import ShmPool

HEALTHY = (200, {"healthy": True})


@contextmanager
def http_for(loop_address: str) -> Iterator[str]:
    """The URL of an HTTP server that asks the loop at ``loop_address``."""
    server = HttpServer(claim("127.0.0.1", 0), loop_address, CollectorRegistry())
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.close()


def health(url: str) -> tuple[int, dict[str, object]]:
    code, body = http_get(f"{url}/healthcheck", seconds=10)
    return code, json.loads(body)


@dataclass
class LoopThread:
    """A request loop in a thread. Whoever holds ``lock`` blocks it at its next request."""

    address: str
    lock: threading.Lock


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    config = ServerConfig(l1_size_gb=0.01)
    metrics, lock, stop = Metrics(), threading.Lock(), threading.Event()
    pool = ShmPool(config.l1_bytes)
    requests = RequestLoop("127.0.0.1", 0, metrics)
    service = Service(config, pool.view, None, metrics)
    thread = threading.Thread(target=requests.run, args=(service, lock, stop, lambda: None))
    thread.start()
    try:
        yield LoopThread(requests.address, lock)
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()
        requests.close()
        pool.close()


def test_health_is_the_loop_s_and_comes_back_with_it(loop: LoopThread) -> None:
    with http_for(loop.address) as url:
        assert health(url) == HEALTHY
        with loop.lock:
            code, told = health(url)
            assert code == 503
            assert told["healthy"] is False
            assert "no answer from" in str(told["reason"])
            assert http_get(f"{url}/status", seconds=10)[0] == 503
            assert http_get(f"{url}/metrics")[0] == 200
        assert wait_for(lambda: health(url) == HEALTHY)
        assert http_get(f"{url}/status")[0] == 200


def test_without_a_loop_nothing_is_healthy() -> None:
    with http_for(f"tcp://127.0.0.1:{dead_port()}") as url:
        code, told = health(url)
        assert (code, told["healthy"]) == (503, False)
        assert "no connection to" in str(told["reason"])
        assert http_get(f"{url}/status", seconds=10)[0] == 503
