"""Real LMCache servers over real engines: what one of them stored, another finds, and loads as it was."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.engines import mooncake_master, s3_server
from helpers.redis_server import redis_server
from helpers.server import RunningServer, refused, run_cli, running_server, wait_for
from helpers.tier_load import Stranger
from helpers.wheels import ROOT, write_distribution
from lmcache.v1.protocol import messages as m

TOKENS = list(range(1300))
"""Five chunks and a part of one."""


@contextmanager
def on_redis(_: Path) -> Iterator[dict[str, Any]]:
    with redis_server() as server:
        yield {"type": "redis", "url": server.url}


@contextmanager
def on_s3(_: Path) -> Iterator[dict[str, Any]]:
    with s3_server("servers") as server:
        endpoint = f"http://127.0.0.1:{server.port}"
        yield {
            "type": "s3",
            "url": "s3://servers/kv",
            "endpoint": endpoint,
            "region": "r",
            "allow_http": True,
        }


@contextmanager
def on_mooncake(_: Path) -> Iterator[dict[str, Any]]:
    with mooncake_master() as master:
        yield {"type": "mooncake", "master": f"127.0.0.1:{master.port}", "segment": "32MiB"}


@contextmanager
def on_the_sample(folder: Path) -> Iterator[dict[str, Any]]:
    """The plugin of ``examples/``, as installed."""
    site = folder / "site"
    write_distribution(site, "sample", {"sqlite": "lmcache_storage_example.plugin"}, {})
    source = ROOT / "examples" / "lmcache-storage-example" / "src" / "lmcache_storage_example"
    shutil.copytree(source, site / source.name)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    yield {"type": "sqlite", "path": str(folder / "objects.db")}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "server")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "server")
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # what a test adds goes with it


def tier_of(server: RunningServer) -> dict[str, Any]:
    (row,) = server.state()["l2"]
    return dict(row)


@pytest.mark.parametrize(
    "engine", [on_redis, on_s3, on_mooncake, on_the_sample], ids=lambda e: e.__name__[3:]
)
def test_what_one_server_stored_another_finds_and_loads(engine: Any, tmp_path: Path) -> None:
    with engine(tmp_path) as spec:
        flags = ("--l2-adapter", json.dumps(spec))
        with running_server(*flags) as first, Stranger(first.address, "e") as stranger:
            hashes = stranger.hashes(TOKENS)
            assert stranger.store(hashes) == 5
            wait_for(lambda: tier_of(first)["queued_objects"] == 0, what="all is written behind")
            stranger.ask(m.Clear(tiers=["l1"]))
            assert stranger.find(hashes) == 5
            if spec["type"] == "mooncake":  # what the first lends goes with it
                found_by_another(flags, hashes)
        if spec["type"] != "mooncake":
            found_by_another(flags, hashes)


def found_by_another(flags: tuple[str, ...], hashes: list[bytes]) -> None:
    with running_server(*flags) as second, Stranger(second.address, "e") as stranger:
        assert stranger.find(hashes) == 5
        assert tier_of(second)["loaded"] == 5
        assert tier_of(second)["state"] == "up"


def test_a_server_whose_redis_hangs_answers_in_time_and_uses_it_again() -> None:
    with redis_server() as redis:
        spec = json.dumps({"type": "redis", "url": redis.url})
        with running_server("--l2-adapter", spec, "--l2-load-seconds", "0.5") as server:
            with Stranger(server.address, "e") as stranger:
                hashes = stranger.hashes(TOKENS)
                assert stranger.store(hashes) == 5
                wait_for(lambda: tier_of(server)["queued_objects"] == 0, what="all is written behind")
                stranger.ask(m.Clear(tiers=["l1"]))
                sleeper = threading.Thread(target=redis.tell, args=("DEBUG", "SLEEP", "3"))
                sleeper.start()
                wait_for(redis.hangs, what="Redis sleeps")
                start = time.monotonic()
                assert stranger.find(hashes) == 0
                assert time.monotonic() - start < 2.0
                sleeper.join(20)
                wait_for(lambda: stranger.find(hashes) == 5, 20, "the tier is used again")


def test_a_redis_that_is_not_there_ends_the_start_with_one_line() -> None:
    spec = json.dumps({"type": "redis", "url": "redis://:s3cret@127.0.0.1:1"})
    line = refused(run_cli("server", "--l1-size-gb", "0.01", "--l2-adapter", spec), 3)
    assert "127.0.0.1:1" in line
    assert "s3cret" not in line
