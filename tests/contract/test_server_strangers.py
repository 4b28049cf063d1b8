"""A real ``lmcache server`` process among strangers: other protocols, garbage, connections that say nothing."""

from __future__ import annotations

import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import zmq

from helpers.server import (
    CALL_SECONDS,
    RunningServer,
    Worker,
    channel_to,
    hello,
    namespace,
    resident,
    running_server,
    wait_for,
)
from lmcache.v1.keys import Scope, chunk_hashes
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import RequestFailed

TOKENS = list(range(1000))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One that no test of this module ends."""
    with running_server() as running:
        yield running


def test_a_client_of_another_protocol_is_refused_with_both_ranges(server: RunningServer) -> None:
    before = server.metrics()['lmcache_mp_errors_total{code="protocol"}']
    with channel_to(server.address) as channel:
        for low, high in ((m.PROTOCOL + 6, m.PROTOCOL + 8), (-2, m.PROTOCOL_MIN - 1)):
            with pytest.raises(RequestFailed) as caught:
                hello(channel, protocol_min=low, protocol_max=high)
            assert caught.value.code == "protocol"
            assert f"client speaks protocol {low}..{high}" in str(caught.value)
            assert f"{m.PROTOCOL_MIN}..{m.PROTOCOL}; install matching versions" in str(caught.value)
        assert hello(channel, protocol_min=m.PROTOCOL, protocol_max=m.PROTOCOL + 5).protocol == m.PROTOCOL
    assert server.metrics()['lmcache_mp_errors_total{code="protocol"}'] == before + 2


def tls_hello() -> bytes:
    """The first bytes of a TLS client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="server")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
GARBAGE = {
    "nothing": b"",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": tls_hello(),
    "redis": b"*1\r\n$4\r\nPING\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
    "half a greeting": GREETING[:30],
    "greeting, no handshake": GREETING + b"\x00\x05hello",
    "a frame of 2**63 bytes": GREETING + b"\x02" + (1 << 63).to_bytes(8, "big"),
    "an older protocol's frame": b"\x01\x00" + b"\x05\x00ping",
}


def test_garbage_on_the_port_does_not_disturb_a_client(server: RunningServer) -> None:
    stop = threading.Event()
    slowest = [0.0, 0.0]

    def good() -> None:
        with channel_to(server.address) as channel:
            session = hello(channel).session
            while not stop.is_set():
                began = time.monotonic()
                reply, _ = channel.call(m.Ping(session=session), CALL_SECONDS)
                assert isinstance(reply, m.Pong)
                assert reply.known
                slowest[:] = [max(slowest[0], time.monotonic() - began), slowest[1] + 1]

    thread = threading.Thread(target=good)
    thread.start()
    try:
        with ExitStack() as stack:
            for _ in range(3):
                for data in GARBAGE.values():
                    peer = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                    peer.sendall(data)
            seen = slowest[1]
            wait_for(lambda: slowest[1] > seen + 100, what="a hundred more answers")
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()
    assert slowest[0] < 1.0
    assert server.process.poll() is None
    assert server.get("/healthcheck")[0] == 200


def test_connections_that_say_nothing_are_closed_and_fill_neither_log_nor_table() -> None:
    with running_server() as server, channel_to(server.address) as channel, ExitStack() as stack:
        attach = hello(channel, role="worker", engine="E").attach
        assert attach is not None
        files = len(os.listdir(f"/proc/{server.pid}/fd"))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (files + 10, files + 10))
        silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(30)]
        for one in silent:
            one.settimeout(CALL_SECONDS)
            one.connect(f"\0{attach.socket[1:]}")
        began = time.monotonic()
        assert [one.recv(1) for one in silent[:10]] == [b""] * 10, "closed by the server"
        assert time.monotonic() - began < 9
        assert server.errors().count("accept failed") == 1


def test_a_client_that_asks_and_does_not_read_takes_no_memory_without_bound() -> None:
    with running_server("--chunk-size", "256") as server, channel_to(server.address) as channel:
        with Worker(server.address, [namespace(page_bytes=(512 << 10,))]) as worker:
            assert worker.store(TOKENS[:256]) == 1
        session = hello(channel, role="worker", engine="reader").session
        shape = m.Register(session=session, namespaces=[namespace(page_bytes=(512 << 10,))], mapped=False)
        channel.call(shape, CALL_SECONDS)
        digests = b"".join(chunk_hashes(TOKENS[:256], Scope(chunk_size=256)))
        lookup = m.Lookup(session=session, request="r", lease=1, hashes=digests)
        channel.call(lookup, CALL_SECONDS)
        read = m.encode(m.Read(session=session, lease=1, index=0, offset=0, length=m.PIECE_BYTES))
        with zmq.Context() as context, context.socket(zmq.DEALER) as silent:
            silent.setsockopt(zmq.LINGER, 0)
            silent.setsockopt(zmq.RCVHWM, 1)
            silent.connect(server.address)
            for ident in range(1, 301):
                silent.send_multipart([ident.to_bytes(8, "little"), read])
            wait_for(lambda: server.metrics()["lmcache_mp_undeliverable_replies_total"] > 200, 20)
            assert resident(server.pid) < 600 << 20
            channel.call(m.Ping(), CALL_SECONDS)


def test_garbage_on_the_http_port_does_not_disturb_it(server: RunningServer) -> None:
    for data in GARBAGE.values():
        with socket.create_connection(("127.0.0.1", server.http_port)) as peer:
            peer.sendall(data)
    assert server.get("/healthcheck")[0] == 200
    assert server.get("/no-such-path")[0] == 404
