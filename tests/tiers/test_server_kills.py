"""Rounds of kill -9 of a server over each engine on the network, at any instant under load.

The next server finds what is there, all of it right, and nothing else; nothing is left behind in the engine.
LMCACHE_TIER_KILL_ROUNDS sets the number of rounds, LMCACHE_TIER_KILL_SECONDS how long those of an engine may take (on a
busy machine there are fewer then), LMCACHE_KILL_SEED the seed.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import obstore
import pytest
from obstore.store import S3Store

from helpers.engines import mooncake_master, s3_server
from helpers.forked_server import ForkedServer
from helpers.kill_load import CHUNKS, Load, prompt
from helpers.redis_server import redis_server
from helpers.server import namespace, wait_for
from helpers.tier_load import Stranger
from lmcache.v1.keys import Scope, chunk_hashes, object_key
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.l2.registry import build

ROUNDS = int(os.environ.get("LMCACHE_TIER_KILL_ROUNDS", "4"))
SECONDS = float(os.environ.get("LMCACHE_TIER_KILL_SECONDS", "20"))
LEAST_ROUNDS = min(ROUNDS, 3)
SEED = int(os.environ.get("LMCACHE_KILL_SEED", "5"))
LATEST = 0.3
"""Seconds under load by which a server is killed."""
NAMESPACE = namespace("load", page_bytes=(8192,))
"""Objects of 128 KiB: several of the smallest pieces."""


class Killed(NamedTuple):
    """What servers are started over, and how to look behind them."""

    spec: dict[str, Any]
    environment: dict[str, str]
    names: Callable[[], set[str]] | None
    """Every object of the engine by its key in hex; None: it cannot be asked."""
    begin: Callable[[], None] = lambda: None
    """Called after a new server has started, before anything is stored: asserts that nothing is left behind."""
    end: Callable[[], None] = lambda: None


@contextmanager
def on_redis(_: Path) -> Iterator[Killed]:
    with redis_server() as server:

        def names() -> set[str]:
            found = {name.decode().removeprefix("lmcache:") for name in server.tell("KEYS", "*")}
            return {name for name in found if not name.startswith("part:")}

        def parts_expire() -> None:
            parts = server.tell("KEYS", "lmcache:part:*")
            assert all(0 < server.tell("TTL", name) <= 600 for name in parts)

        spec = {"type": "redis", "url": server.url, "piece": "64KiB"}
        yield Killed(spec, {}, names, parts_expire)


@contextmanager
def on_s3(_: Path) -> Iterator[Killed]:
    with s3_server("kills") as server:
        endpoint = f"http://127.0.0.1:{server.port}"
        keys = {"access_key_id": "k", "secret_access_key": "k", "region": "r", "endpoint": endpoint}
        store = S3Store("kills", **keys, client_options={"allow_http": True})  # type: ignore[arg-type]

        def names() -> set[str]:
            return {entry["path"] for page in obstore.list(store) for entry in page}

        spec = {
            "type": "s3", "url": "s3://kills", "endpoint": endpoint, "region": "r", "allow_http": True,
            "access_key_env": "KILLS_KEY", "secret_key_env": "KILLS_KEY",
        }  # fmt: skip
        yield Killed(spec, {"KILLS_KEY": "k"}, names)


@contextmanager
def on_mooncake(_: Path) -> Iterator[Killed]:
    with mooncake_master() as master:
        spec = {"type": "mooncake", "master": f"127.0.0.1:{master.port}"}
        lender = build(spec | {"segment": "512MiB"})
        yield Killed(spec | {"segment": 0}, {}, None)
        lender.close()


@contextmanager
def on_shared_fs(folder: Path) -> Iterator[Killed]:
    path = folder / "shared"

    def files() -> list[Path]:
        return [found for found in path.rglob("*") if found.is_file()]

    def names() -> set[str]:
        return {found.stem for found in files() if found.suffix == ".kv"}

    def nothing_is_left() -> None:
        assert not [found for found in files() if found.suffix == ".tmp"]

    yield Killed({"type": "shared_fs", "path": str(path), "sweep_hours": 1e-6}, {}, names, nothing_is_left)


@contextmanager
def on_peer(folder: Path) -> Iterator[Killed]:
    with ForkedServer(folder / "decode.log", l1_size_gb=0.2) as decode:
        with Stranger(decode.address, "looks", NAMESPACE) as stranger:

            def peers() -> dict[str, Any]:
                return dict(stranger.ask(m.Status()).fields["peers"])

            def nothing_is_taken() -> None:
                wait_for(lambda: peers()["sessions"] == 0, 15, "what was killed is forgotten")
                assert (peers()["reserved_bytes"], peers()["open"], peers()["pulls"]) == (0, 0, 0)

            spec = {"type": "peer", "address": decode.address.removeprefix("tcp://"), "transport": "frames"}
            yield Killed(spec, {}, None, end=nothing_is_taken)
        assert "Traceback" not in (folder / "decode.log").read_text()


@pytest.mark.parametrize(
    "engine", [on_redis, on_s3, on_mooncake, on_shared_fs, on_peer], ids=lambda e: e.__name__[3:]
)
def test_after_every_kill_what_is_found_is_right_and_nothing_else_is_there(
    engine: Any, tmp_path: Path
) -> None:
    random_, begun, numbers = random.Random(SEED), [], list(range(1_000_000, 0, -1))
    found = whole = done = 0
    with engine(tmp_path) as killed:
        settings = {"l1_size_gb": 0.05, "l2_adapter": (json.dumps(killed.spec),)}
        until = time.monotonic() + SECONDS
        while done < ROUNDS and (done < LEAST_ROUNDS or time.monotonic() < until):
            done += 1
            with ForkedServer(tmp_path / "log", killed.environment, **settings) as server:
                killed.begin()
                with Stranger(server.address, "judge", NAMESPACE) as judge:
                    asked = begun[-6:] + random_.sample(begun, min(3, len(begun)))
                    for number in asked:
                        chunks = judge.find(judge.hashes(prompt(number)))
                        found += chunks
                        whole += chunks == CHUNKS
                    assert judge.find(judge.hashes(prompt(2_000_000 + random_.randrange(1000)))) == 0, (
                        "phantom"
                    )
                    (row,) = judge.ask(m.Status()).fields["l2"]
                    assert (row["state"], row["quarantined"]) == ("up", 0)
                load = Load(server.address, begun, numbers, NAMESPACE)
                time.sleep(random_.uniform(0.0, LATEST))
                server.kill()
                load.join()
                assert load.faults == []
            if killed.names is not None:
                extra = killed.names() - {key for number in begun for key in keys(number)}
                assert not extra, "the engine holds what nobody stored"
        killed.end()
    assert found > done, "what was written before a kill is found after it"
    assert whole
    assert "Traceback" not in (tmp_path / "log").read_text()
    print(f"{done} rounds, {len(begun)} prompts begun, {found} chunks found again, {whole} prompts whole")


@cache
def keys(number: int) -> list[str]:
    """Names of the objects of a prompt."""
    chunks = chunk_hashes(prompt(number), Scope(chunk_size=NAMESPACE.chunk_size))
    return [object_key(NAMESPACE.digest(), chunk).hex() for chunk in chunks]
