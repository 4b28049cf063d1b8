"""Rounds of kill -9 of a process that stores and deletes in an engine on the network.

After each, what was acknowledged is there, whatever is there is right, and nothing that was removed has come back.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.disk_writer import Writer, size_of
from helpers.engines import mooncake_master, s3_server
from helpers.redis_server import redis_server
from helpers.stored import call, is_right, key_of, spec
from lmcache.v1.storage.l2.adapter import StorageAdapter

SEED = 11
NUMBERS = 10_000
LATEST = 0.06
"""Seconds after its first store by which a writer is killed."""


def rounds(path: Path, count: int, after: Callable[[StorageAdapter], None] = lambda adapter: None) -> int:
    """How many objects were stored in ``count`` rounds of an engine's writers, each of which is killed."""
    rng, stored, adapter = random.Random(SEED), 0, spec(path)
    for round_ in range(count):
        writer = Writer("spec", path, round_ * NUMBERS, SEED + round_)
        writer.wait_until_it_stores()
        writer.process.join(rng.uniform(0, LATEST))
        did = writer.end(kill=True)
        stored += len(did["stored"])
        numbers = sorted(did["storing"])
        there = adapter.contains([key_of(number) for number in numbers], call())
        found = {number for number, held in zip(numbers, there, strict=True) if held}
        assert found >= did["stored"] - did["deleting"], "what was acknowledged is missing"
        assert not found & did["deleted"], "what was removed is there"
        assert all(is_right(adapter, number, size_of(number)) for number in found)
        assert not any(is_right(adapter, number, size_of(number)) for number in set(numbers) - found)
        after(adapter)
        adapter.delete([key_of(number) for number in numbers], call())
    adapter.close()
    return stored


@contextmanager
def written(folder: Path, **options: Any) -> Iterator[Path]:
    path = folder / "adapter.json"
    path.write_text(json.dumps(options))
    yield path


@pytest.mark.parametrize(("piece", "count"), [("32MiB", 8), ("64KiB", 20)])
def test_objects_in_redis_outlive_their_writer(tmp_path: Path, piece: str, count: int) -> None:
    with redis_server() as server, written(tmp_path, type="redis", url=server.url, piece=piece) as path:
        parts = []

        def parts_expire(_: StorageAdapter) -> None:
            names = server.tell("KEYS", "lmcache:part:*")
            parts.extend(names)
            assert all(0 < server.tell("TTL", name) <= 600 for name in names)
            for name in names:
                server.tell("DEL", name)

        assert rounds(path, count, parts_expire) > 2 * count
        assert bool(parts) == (piece == "64KiB")  # some were hit between the pieces


def test_objects_in_s3_outlive_their_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "writer", "AWS_SECRET_ACCESS_KEY": "writer"}
    for name, value in keys.items():  # here, too: they are to be gone afterwards
        monkeypatch.setenv(name, value)
    with s3_server("kills") as server:
        options = {"endpoint": f"http://127.0.0.1:{server.port}", "region": "us-east-1", "allow_http": True}
        with written(tmp_path, type="s3", url="s3://kills", environment=keys, **options) as path:
            assert rounds(path, 8) > 16


def test_objects_in_mooncake_outlive_their_writer(tmp_path: Path) -> None:
    with mooncake_master() as master:
        address = f"127.0.0.1:{master.port}"
        with written(tmp_path, type="mooncake", master=address) as path:
            lender = spec(path, segment="512MiB")
            assert rounds(path, 8) > 16
            lender.close()
