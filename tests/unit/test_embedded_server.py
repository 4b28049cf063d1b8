"""A server in a thread: reached as any other, and nothing of it remains in its host process."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.server import Worker, channel_to, namespace, wait_for
from lmcache.errors import ConfigError, StartupError
from lmcache.v1.multiprocess.client import CacheClient, ClientOptions
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.embedded import EmbeddedServer, embedded_address
from lmcache.v1.protocol import messages as m

CONFIG = ServerConfig(l1_size_gb=0.01, l2_flush_seconds=3)
TOKENS = list(range(600))


@pytest.fixture
def engine() -> str:
    return f"engine-{uuid.uuid4()}"


@pytest.fixture
def server(engine: str) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(CONFIG, engine)
    yield server
    server.close()


def test_any_process_of_an_engine_finds_it_by_the_engines_id(server: EmbeddedServer, engine: str) -> None:
    client = CacheClient(embedded_address(engine), "worker", engine)
    try:
        assert client.start(wait=10), client.reason
        assert client.attachment is not None
        assert client.attachment.pool is not None, "its pool is mapped"
    finally:
        client.close()
    with Worker(server.address, [namespace()], engine) as worker:
        assert worker.store(TOKENS) == 2
    l1 = server.status()["l1"]
    assert isinstance(l1, dict)
    assert l1["objects"] == 2


def test_ids_of_any_length_and_kind_have_addresses_of_their_own() -> None:
    ids = ["", "a", "b" * 4000, "§ /\0", "a_dp0", "a_dp1"]
    assert len({embedded_address(ident) for ident in ids}) == len(ids)
    assert max(len(embedded_address(ident)) for ident in ids) < 100


def test_a_second_engine_of_the_same_id_is_refused_in_one_line(server: EmbeddedServer, engine: str) -> None:
    with pytest.raises(StartupError, match=f"^engine_id '{engine}': .*one of its own$"):
        EmbeddedServer(CONFIG, engine)
    with channel_to(server.address) as tool:
        tool.call(m.Ping(), 5)  # the first is not disturbed


def test_a_bad_setting_leaves_nothing_behind(engine: str, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    file = tmp_path / "file"
    file.touch()
    disk = json.dumps({"type": "disk", "path": str(file / "below"), "max_gb": 1})
    for config in (
        ServerConfig(l1_size_gb=0.01, chunk_size=7),
        ServerConfig(l1_size_gb=0.01, l2_adapter=(disk,)),
        ServerConfig(l1_size_gb=1 << 20),
    ):
        with pytest.raises((ConfigError, StartupError)):
            EmbeddedServer(config, engine)
        assert set(threading.enumerate()) == threads
    EmbeddedServer(CONFIG, engine).close()  # the address is free


def test_the_host_process_is_as_it_was(engine: str, tmp_path: Path) -> None:
    def facts() -> dict[str, object]:
        gc.collect()
        mask = os.umask(0o22)
        os.umask(mask)
        return {
            "signals": [
                signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
            ],
            "root logger": (list(logging.getLogger().handlers), logging.getLogger().level),
            "start method": multiprocessing.get_start_method(allow_none=True),
            "mask": mask,
            "variables": dict(os.environ),
            "threads": {thread.name for thread in threading.enumerate()},
            "memory": [
                line for line in Path("/proc/self/maps").read_text().splitlines() if "lmcache-l1" in line
            ],
            "open files": len(os.listdir("/proc/self/fd")),
        }

    disk = json.dumps({"type": "disk", "path": str(tmp_path / "disk"), "max_gb": 1})
    config = ServerConfig(l1_size_gb=0.01, l2_adapter=(disk,))
    with channel_to(embedded_address(engine)) as tool:
        first = EmbeddedServer(config, engine)
        tool.call(m.Ping(), 5)  # the process's own ZeroMQ context is there from here on
        tool.reset()
        first.close()
        del first
        before = facts()
        server = EmbeddedServer(config, engine)
        tool.reset()
        tool.call(m.Ping(), 5)
        tool.reset()
        server.close()
        del server
        wait_for(lambda: facts() == before, 5, "everything as before")


def test_what_waits_for_a_tier_is_written_at_the_end_and_found_by_the_next(
    engine: str, tmp_path: Path
) -> None:
    slow = {"type": "disk", "path": str(tmp_path / "disk"), "max_gb": 1}
    config = ServerConfig(l1_size_gb=0.01, l2_adapter=(json.dumps(slow),), l2_flush_seconds=3)
    first = EmbeddedServer(config, engine)
    with Worker(first.address, [namespace()], engine) as worker:
        assert worker.store(TOKENS) == 2
    first.close()
    first.close()  # harmless
    second = EmbeddedServer(config, engine)
    try:
        (tier,) = second.status()["l2"]  # type: ignore[misc]
        assert tier["objects"] == 2
    finally:
        second.close()


def test_the_scheduler_outlives_it_without_waiting(server: EmbeddedServer, engine: str) -> None:
    client = CacheClient(server.address, "scheduler", engine, options=ClientOptions(control_timeout=60.0))
    assert client.start(wait=10), client.reason
    server.close()
    ended = threading.Thread(target=client.close)
    ended.start()
    ended.join(20)
    assert not ended.is_alive(), "no goodbye to who is gone"
