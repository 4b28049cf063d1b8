"""Servers whose peers are each other, themselves, or two at once: every request ends, and nothing goes in circles."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from helpers.server import Server, dead_port, wait_for
from helpers.tier_load import Stranger
from lmcache.v1.protocol import messages as m

CHUNKS = 5
SOON = 8.0


def tokens(number: int) -> list[int]:
    return list(range(number * 10_000, number * 10_000 + CHUNKS * 256))


@contextmanager
def servers(*peers_of: tuple[int, ...], **options: Any) -> Iterator[tuple[list[Server], list[Stranger]]]:
    """Servers, each with those of the given numbers as its peers, and an engine at each."""
    ports = [dead_port() for _ in peers_of]
    with ExitStack() as end:
        made = []
        for mine, peers in zip(ports, peers_of, strict=True):
            flags = []
            for peer in peers:
                spec = {"type": "peer", "address": f"127.0.0.1:{ports[peer]}", "transport": "frames"}
                flags += ["--l2-adapter", json.dumps(spec | options)]
            server = Server(*flags, l1_gb=0.05, port=mine)
            made.append(end.enter_context(server))
        strangers = [end.enter_context(Stranger(f"tcp://127.0.0.1:{port}", "e")) for port in ports]
        yield made, strangers


def rows(server: Server) -> list[dict[str, Any]]:
    return list(server.running.state()["l2"])


def quiet(server: Server) -> bool:
    return (
        all(row["queued_objects"] == 0 for row in rows(server))
        and not server.running.state()["peers"]["open"]
    )


def l1_clear(stranger: Stranger) -> None:
    stranger.ask(m.Clear(tiers=["l1"]))


@pytest.mark.parametrize("sync", [False, True])
def test_two_servers_that_push_to_each_other_store_each_object_once(sync: bool) -> None:
    with servers((1,), (0,), sync=sync) as (made, engines):
        for number, (mine, other) in enumerate((engines, engines[::-1])):
            hashes = mine.hashes(tokens(number))
            start = time.monotonic()
            assert mine.store(hashes, wait=5.0) == CHUNKS
            assert time.monotonic() - start < SOON
            wait_for(lambda h=hashes, o=other: o.find(h) == CHUNKS, what="the other has it")
        wait_for(lambda: all(map(quiet, made)), what="nothing is under way")
        l1_clear(engines[0])
        for number in range(2):
            assert engines[0].find(engines[0].hashes(tokens(number))) == CHUNKS
        wait_for(lambda: all(map(quiet, made)), what="nothing is under way")
        for server in made:
            (row,) = rows(server)
            assert row["state"] == "up"
            assert row["stored"] <= 2 * CHUNKS
            assert server.running.state()["peers"]["reserved_bytes"] == 0


@pytest.mark.parametrize("sync", [False, True])
def test_a_server_that_is_its_own_peer_serves(sync: bool) -> None:
    with servers((0,), sync=sync) as ((server,), (engine,)):
        hashes, absent = engine.hashes(tokens(0)), engine.hashes(tokens(1))
        start = time.monotonic()
        assert engine.store(hashes, wait=5.0) == CHUNKS
        assert engine.find(hashes) == CHUNKS
        assert engine.find(absent) == 0
        wait_for(lambda: quiet(server), what="nothing is under way")
        l1_clear(engine)
        assert engine.find(hashes) == 0
        assert time.monotonic() - start < SOON
        assert server.running.state()["peers"]["reserved_bytes"] == 0


def test_of_two_decode_servers_each_has_it_all_and_the_end_of_one_costs_the_other_nothing() -> None:
    with servers((1, 2), (), (), sync=True, timeout_seconds=0.5) as (made, engines):
        hashes = engines[0].hashes(tokens(0))
        assert engines[0].store(hashes, wait=5.0) == CHUNKS
        assert [engine.find(hashes, 0.0) for engine in engines[1:]] == [CHUNKS, CHUNKS]
        made[1].kill()
        for number in range(1, 4):
            hashes = engines[0].hashes(tokens(number))
            start = time.monotonic()
            assert engines[0].store(hashes, wait=5.0) == CHUNKS
            assert time.monotonic() - start < SOON
            wait_for(
                lambda h=hashes: engines[2].find(h, 0.0) == CHUNKS, what="the other decode server has it"
            )
        states = {row["name"]: row["state"] for row in rows(made[0])}
        assert states["peer-2"] == "up"
