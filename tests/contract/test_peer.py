"""Prefill and decode on two hosts (network namespaces), with real servers: what one commits the other finds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from helpers.netns import Host, two_hosts
from helpers.push_rounds import idle, kill_pushers, kill_receivers
from helpers.pusher import payload_of
from helpers.server import Worker, namespace, wait_for
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.protocol import messages as m

CHUNK = 16
GROUP = namespace(model="pd", chunk_size=CHUNK, page_bytes=(70_000,))
PORT = 5555
ROUNDS = int(os.environ.get("LMCACHE_KILL_ROUNDS", "8"))


class Engine(Worker):
    """A rank that knows what its chunks should be."""

    def put(self, tokens: list[int]) -> float:
        """Store; the seconds that the commit took."""
        hashes = self.hashes(tokens)
        lease = next(self._leases)
        reserved = self.ask(m.Reserve(session=self.session, lease=lease, hashes=[b"".join(hashes)]))
        assert isinstance(reserved, m.Reserved)
        new = [h for h, offset in zip(hashes, reserved.slots[0][::2], strict=True) if offset >= 0]
        for index, chunk in enumerate(new):
            write = m.Write(session=self.session, lease=lease, index=index)
            self.ask(write, [payload_of(chunk, GROUP.object_bytes)])
        began = time.monotonic()
        indexes = list(range(len(new)))
        done = self.ask(m.Commit(session=self.session, lease=lease, indexes=indexes, wait=5.0))
        assert done == m.Ok(count=len(new))
        return time.monotonic() - began

    def get(self, tokens: list[int], wait: float = -1.0) -> int:
        """How many chunks there are; every one has its own bytes."""
        hashes = self.hashes(tokens)
        lease = next(self._leases)
        lookup = m.Lookup(
            session=self.session, request=f"r{lease}", lease=lease, hashes=b"".join(hashes), wait=wait
        )
        found = self.ask(lookup)
        assert isinstance(found, m.Found)
        assert not found.pending
        for index, chunk in enumerate(hashes[: found.chunks]):
            size = GROUP.object_bytes
            read = m.Read(session=self.session, lease=lease, index=index, offset=0, length=size)
            _, frames = self.channel.call(read, 10.0)
            assert frames == [payload_of(chunk, size)]
        self.ask(m.EndRequest(session=self.session, requests=[f"r{lease}"]))
        return found.chunks

    def hashes(self, tokens: list[int]) -> list[bytes]:
        return chunk_hashes(tokens, Scope(chunk_size=CHUNK))


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


def peer_of(host: Host, **options: Any) -> tuple[str, str]:
    """The flag that makes a server's tier of the server on ``host``."""
    fields = {"type": "peer", "address": f"{host.far}:{PORT}", "transport": "frames", **options}
    return ("--l2-adapter", json.dumps(fields))


def prompt(name: int, chunks: int = 4) -> list[int]:
    return list(range(name * 1000, name * 1000 + chunks * CHUNK))


@pytest.fixture
def pair(hosts: tuple[Host, Host], request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine, Any]]:
    """Engines on both servers, the decode server's on its port; and the decode server."""
    flags = ("--chunk-size", str(CHUNK))
    with ExitStack() as end:
        decode = end.enter_context(hosts[1].server(*flags, port=PORT))
        prefill = end.enter_context(hosts[0].server(*flags, *peer_of(hosts[1], **request.param)))
        engines = [end.enter_context(Engine(server.address, [GROUP])) for server in (prefill, decode)]
        yield engines[0], engines[1], decode


@pytest.mark.parametrize("pair", [{"sync": True}], indirect=True)
def test_what_prefill_commits_in_step_decode_s_next_lookup_finds(pair: tuple[Engine, Engine, Any]) -> None:
    prefill, decode, server = pair
    for name in range(1, 11):
        prefill.put(prompt(name))
        assert decode.get(prompt(name)) == 4
    assert prefill.get(prompt(1)) == 4
    assert server.metrics()["lmcache_mp_pushed_objects_total"] == 40


@pytest.mark.parametrize("pair", [{}], indirect=True)
def test_what_prefill_writes_behind_decode_finds_soon_and_may_be_pulled_back(
    pair: tuple[Engine, Engine, Any],
) -> None:
    prefill, decode, _ = pair
    prefill.put(prompt(1))
    wait_for(lambda: decode.get(prompt(1)) == 4)
    decode.put(prompt(2))
    assert prefill.get(prompt(2)) == 0  # not in L1
    assert prefill.get(prompt(2), wait=5.0) == 4


@pytest.mark.parametrize("pair", [{"sync": True, "timeout_seconds": 0.5}], indirect=True)
def test_prefill_outlives_decode_and_finds_it_again(pair: tuple[Engine, Engine, Any], hosts: Any) -> None:
    prefill, decode, server = pair
    prefill.put(prompt(1))
    server.process.kill()
    server.process.wait()
    decode.channel.close()
    for name in range(2, 6):
        assert prefill.put(prompt(name)) < 6
        assert prefill.get(prompt(name)) == 4
    with hosts[1].server("--chunk-size", str(CHUNK), port=PORT) as again:
        with Engine(again.address, [GROUP]) as decode:
            assert decode.get(prompt(1)) == 0
            names = iter(range(10, 1000))

            def arrives() -> bool:
                name = next(names)
                prefill.put(prompt(name))
                return decode.get(prompt(name)) == 4

            wait_for(arrives, 20, "a push arrives at the new server")


def test_the_pool_of_decode_that_nobody_reads_does_not_fill_up(hosts: tuple[Host, Host]) -> None:
    flags = ("--chunk-size", str(CHUNK))
    with ExitStack() as end:
        decode = end.enter_context(hosts[1].server(*flags, l1_gb=0.002, port=PORT))
        prefill = end.enter_context(hosts[0].server(*flags, *peer_of(hosts[1], sync=True)))
        engine = end.enter_context(Engine(prefill.address, [GROUP]))
        for name in range(1, 21):  # 80 objects, of which 30 fit
            engine.put(prompt(name))
        state = decode.state()
        assert state["l1"]["evicted"] > 40
        assert state["l1"]["used_bytes"] <= state["l1"]["capacity_bytes"]
        with Engine(decode.address, [GROUP]) as reader:
            assert reader.get(prompt(20)) == 4
        idle(decode)


@pytest.mark.slow
def test_a_pusher_that_is_killed_leaves_nothing_phantom_wrong_or_taken(hosts: tuple[Host, Host]) -> None:
    with hosts[1].server(l1_gb=0.5, port=PORT) as server:
        kill_pushers(hosts, server, PORT, "frames", ROUNDS)


@pytest.mark.slow
def test_a_receiver_that_is_killed_is_found_again(hosts: tuple[Host, Host]) -> None:
    kill_receivers(hosts[1], PORT, "frames", ROUNDS // 4, lambda: hosts[1].server(l1_gb=0.5, port=PORT))
